"""What happened to a training: entries of the journal. The oldest go in time, and one that sums them up stays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal

EventType = Literal["Normal", "Warning"]
SYSTEM = "muster"  # the actor of what the control plane does on its own

# Reasons that programs look for. Metering reads data["worker"], data["gpus"] and, where the time of writing is not
# the time meant, data["at"] (ISO) of the first four; any of the last three closes what is still open. Where the time of
# day was set, data["steady"] is the same moment on the clock that durations are measured with.
WORKER_STARTED = "WorkerStarted"
WORKER_EXITED = "WorkerExited"
WORKER_LENT = "WorkerLent"  # its GPUs are somebody else's from now on
WORKER_BACK = "WorkerBack"  # and its own again
FINISHED = {"succeeded": "Succeeded", "failed": "Failed", "cancelled": "Cancelled"}
STEADY = "steady"
TRIMMED = "JournalTrimmed"  # stands for older entries that were dropped; data is a `usage.Dropped`
UNWATCHED = "HangUnwatched"  # there is a hang timeout, and no rank tells its step
EMBEDDED = "embedded"  # the actor who has the token of the control plane's own user
STATE_LOST = "StateLost"  # finished steps are gone; data has steps, step (where it goes on, if known), workers, of
HEALED = "Healed"  # it gets on after a loss; data: ranksRunSeconds, nextStepSeconds, step, redone, lost, heirs, workers
TERMINAL_EDIT = "UDTerminalState"
TARGET_REACHED = "TargetReached"  # data: target, generation (for which one), ranksRunSeconds, nextStepSeconds


@dataclass(frozen=True)
class Event:
    """One entry. `id` is given by the journal and only grows; `data` holds what programs need."""

    reason: str
    message: str = ""
    type: EventType = "Normal"
    actor: str = SYSTEM
    round: int | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    at: datetime | None = None
    namespace: str = ""
    training: str = ""
    uid: str = ""
    id: int = 0

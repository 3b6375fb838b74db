"""What happens in a run, as its coordinator tells it, and what the journal calls it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from enum import StrEnum
from typing import Any

from muster.types.event import HEALED, UNWATCHED, Event, EventType
from muster.types.records import record


class Kind(StrEnum):
    OPENED = "opened"
    LATE = "late"
    JOINED = "joined"
    LEFT = "left"
    LOST = "lost"
    FALSE_ALARM = "false-alarm"
    LEAVING = "leaving"
    DISMISSED = "dismissed"
    PARKED = "parked"
    KEPT_OUT = "kept-out"
    UNFIT = "unfit"
    REFUSED = "refused"
    GONE = "gone"
    RELEASE = "release"
    RECALL = "recall"
    EXIT = "exit"
    SAVING = "saving"
    RESUMED = "resumed"
    FELL_BACK = "fell-back"
    STATE_REFUSED = "state-refused"
    STATE_DAMAGED = "state-damaged"
    TARGET = "target"
    TAKEN_BACK = "taken-back"
    UNWATCHED = "unwatched"
    STALLED = "stalled"
    STEPS_AGAIN = "steps-again"
    REMARK = "remark"
    RECOVERED = "recovered"
    HEALED = "healed"
    MESH_CONVERGING = "mesh-converging"
    MESH_READY = "mesh-ready"
    MESH_DEGRADED = "mesh-degraded"
    MEASURED = "measured"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    FAREWELL = "farewell"


# None: the journal has a word of its own for it, written when the end of the training is; or the event does not happen
# under a control plane.
JOURNAL: dict[Kind, tuple[str, EventType] | None] = {
    Kind.OPENED: None,
    Kind.LATE: None,
    Kind.JOINED: ("WorkerJoined", "Normal"),
    Kind.LEFT: ("WorkerLeft", "Normal"),
    Kind.LOST: ("WorkerLost", "Warning"),
    Kind.FALSE_ALARM: ("FalseAlarm", "Warning"),
    Kind.LEAVING: ("WorkerLeaving", "Normal"),
    Kind.DISMISSED: ("WorkerDismissed", "Normal"),
    Kind.PARKED: ("WorkerParked", "Warning"),
    Kind.KEPT_OUT: ("WorkerKeptOut", "Warning"),
    Kind.UNFIT: ("WorkerUnfit", "Warning"),
    Kind.REFUSED: ("WorkerRefused", "Warning"),
    Kind.GONE: ("RanksGone", "Normal"),
    Kind.RELEASE: ("RoundReleased", "Normal"),
    Kind.RECALL: ("RoundRecalled", "Normal"),
    Kind.EXIT: ("RankFailed", "Warning"),
    Kind.SAVING: ("RecallHeld", "Normal"),
    Kind.RESUMED: ("StateResumed", "Normal"),
    Kind.FELL_BACK: ("StateFellBack", "Warning"),
    Kind.STATE_REFUSED: ("StateRefused", "Warning"),
    Kind.STATE_DAMAGED: ("StateDamaged", "Warning"),
    Kind.TARGET: ("TargetChanged", "Normal"),
    Kind.TAKEN_BACK: ("ResizeTakenBack", "Warning"),
    Kind.UNWATCHED: (UNWATCHED, "Warning"),
    Kind.STALLED: ("StepsStalled", "Warning"),
    Kind.STEPS_AGAIN: ("StepsAgain", "Normal"),
    Kind.REMARK: ("ProgramRemark", "Warning"),
    Kind.RECOVERED: ("RoundRecovered", "Normal"),
    Kind.HEALED: (HEALED, "Normal"),
    Kind.MESH_CONVERGING: ("MeshConverging", "Normal"),
    Kind.MESH_READY: ("MeshReady", "Normal"),
    Kind.MESH_DEGRADED: ("DegradedMesh", "Warning"),
    Kind.MEASURED: ("Measured", "Normal"),
    Kind.SUCCEEDED: None,
    Kind.FAILED: None,
    Kind.CANCELLED: None,
    Kind.FAREWELL: None,
}


@record()
class RunEvent:
    """One thing that happened. `at` is on the coordinator's clock."""

    at: float
    kind: Kind
    text: str
    round: int | None
    data: Mapping[str, Any] = field(default_factory=dict)  # what programs need of it

    def journaled(self) -> Event | None:
        """The same for the journal of the training, which adds whose it is and when it was written."""
        word = JOURNAL[self.kind]
        return None if word is None else Event(word[0], self.text, word[1], round=self.round, data=self.data)

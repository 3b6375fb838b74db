"""Which phases a training may go through, and what each write of its status must keep.

    pending → ready → succeeded | failed | cancelled        pending may end without ever being ready
            ←                                               only of one that is suspended

A terminal phase never changes. `observedGeneration` only grows. Exits appear with the terminal phase and stay.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime

from muster.types.training import SUSPENDED, TERMINAL, Condition, Phase, Status

NEXT: Mapping[str, frozenset[str]] = {
    "pending": frozenset({"ready"}) | TERMINAL,
    "ready": TERMINAL,
    "succeeded": frozenset(),
    "failed": frozenset(),
    "cancelled": frozenset(),
}


def may_become(now: str, later: str) -> bool:
    return later == now or later in NEXT[now]


def broken_rules(before: Status, after: Status) -> list[str]:
    """What a write of `after` over `before` would break; empty if it may be written."""
    broken = []
    back = (before.phase, after.phase) == ("ready", "pending") and is_suspended(after)
    if not may_become(before.phase, after.phase) and not back:
        broken.append(f"phase {before.phase} cannot become {after.phase}")
    if after.observed_generation < before.observed_generation:
        broken.append("observedGeneration must not go back")
    if before.outcome is not None and after.outcome != before.outcome:
        broken.append("an outcome is decided once")
    if (after.rank_exits is not None) != (after.phase in TERMINAL):
        broken.append("rankExits is there exactly when the training has ended")
    if before.phase in TERMINAL and replace(after, observed_generation=before.observed_generation) != before:
        broken.append("nothing of an ended training's status changes")
    return broken


def with_phase(status: Status, phase: Phase) -> Status:
    """The status in that phase; one that cannot be entered from here is a fault of the caller."""
    if not may_become(status.phase, phase):
        raise ValueError(f"phase {status.phase} cannot become {phase}")
    return replace(status, phase=phase)


def is_suspended(status: Status) -> bool:
    admitted = status.condition("Admitted")
    return admitted is not None and admitted.reason == SUSPENDED


def set_back(status: Status) -> Status:
    """One that is suspended is pending again, however far it was."""
    return replace(status, phase="pending") if status.phase == "ready" and is_suspended(status) else status


def with_condition(
    status: Status, kind: str, holds: bool, reason: str, message: str, now: datetime, generation: int
) -> Status:
    """The status with a condition as it is now; the time of its last transition moves only when it turns."""
    value = "True" if holds else "False"
    old = status.condition(kind)
    since = old.last_transition_time if old is not None and old.status == value else now
    new = Condition(kind, value, reason, message, since, generation)  # type: ignore[arg-type]
    others = [one for one in status.conditions if one.type != kind]
    at = status.conditions.index(old) if old is not None else len(others)
    return replace(status, conditions=(*others[:at], new, *others[at:]))

"""The usual time per step of a run, and the decision whether its steps have stalled.

The longest pause between steps that a run survived counts as usual: evaluation and checkpoints pause every training.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from muster.types.records import record, replace
from muster.types.world import Pace, Progress

MIN_STALL_S = 40.0
PAUSES = 3.0  # so many times the longest pause
STEPS = 100.0  # so many times the usual time per step
CHANGE = 1.25  # the record is written again if the limit changes by this factor
SAMPLES = 32
MIN_SAMPLES = 3  # with fewer nobody knows what is usual


@record()
class Stall:
    """Since when no step has come, in which round, and the warning about it."""

    round: int
    since: float
    warning: str


def advanced(pace: Pace, number: int, marks: Iterable[tuple[Progress | None, Progress]]) -> Pace:
    """Return the pace after ranks of round `number` told steps: for each its last mark, if any, and its new one.

    The time between rounds is not a pause.
    """
    marks = tuple(marks)
    at = max((mark.at for _, mark in marks), default=None)
    if at is None:
        return pace
    if pace.round != number:
        return replace(pace, round=number, last_at=at)
    moved = [(new.at - old.at) / (new.step - old.step) for old, new in marks if old is not None and new.step > old.step]
    per_step = (*pace.per_step, *(gap for gap in moved[:1] if gap > 0.0))[-SAMPLES:]
    return replace(pace, last_at=max(at, pace.last_at), per_step=per_step, longest=max(pace.longest, at - pace.last_at))


def usual_s(pace: Pace) -> float:
    """The median time per step; NaN as long as too few are known."""
    return statistics.median(pace.per_step) if len(pace.per_step) >= MIN_SAMPLES else float("nan")


def limit_s(pace: Pace) -> float | None:
    """Return how long no step may come before that is unusual; None while nobody knows what is usual."""
    if len(pace.per_step) < MIN_SAMPLES:
        return None
    return max(MIN_STALL_S, PAUSES * pace.longest, STEPS * usual_s(pace))


def recordable(pace: Pace) -> Pace:
    """Return the pace without its last step: ranks report that step again to another coordinator, with its age."""
    return replace(pace, round=-1, last_at=0.0)


def has_changed(recorded_s: float | None, pace: Pace) -> bool:
    """Return True if the limit differs so much from `recorded_s` that the record should have the new limit."""
    new_s = limit_s(pace)
    return new_s is not None and (recorded_s is None or not recorded_s / CHANGE <= new_s <= recorded_s * CHANGE)


def warning(pace: Pace) -> str:
    """Say that steps have stalled. The sentence stays true while they do."""
    return f"no step for more than {limit_s(pace) or MIN_STALL_S:.3g} s, usually {usual_s(pace):.2g} s per step"

"""When did a training start, come to its outcome and end, and when must it, on the clock for durations?

A status shows the time of day. Only where that was set to another time since the control plane's first start the
moment to measure from is kept beside it.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Literal

from muster.core.steady import apart
from muster.types.training import SUSPENDED, Status, SteadyTimes, Training

_AS_SHOWN = SteadyTimes()


def started(status: Status) -> datetime | None:
    return (status.steady or _AS_SHOWN).started_at or status.started_at


def deadline(training: Training) -> datetime | None:
    """When it must have ended; before its first round, when that must have begun. None: whenever it likes."""
    limit, since = training.spec.active_deadline_seconds, started(training.status) or waits_since(training)
    return None if limit is None or since is None else since + timedelta(seconds=limit)


def waits_since(training: Training) -> datetime | None:
    """Since when one that has not begun may: since it was first looked at, or was suspended for the last time.

    None before that. Whoever stamped its creation has another clock, and may have had nobody to look at it.
    """
    admitted = training.status.condition("Admitted")
    suspended = training.spec.suspend or (admitted is not None and admitted.reason == SUSPENDED)
    if suspended or training.status.observed_generation == 0:
        return None
    return (training.status.steady or _AS_SHOWN).waits_since or training.metadata.creation_timestamp


def decided(status: Status) -> datetime | None:
    shown = status.outcome.finished_at if status.outcome is not None else None
    return (status.steady or _AS_SHOWN).decided_at or shown


def finished(status: Status) -> datetime | None:
    return (status.steady or _AS_SHOWN).finished_at or status.finished_at


def kept(
    status: Status, which: Literal["started_at", "decided_at", "finished_at"], now: datetime, ahead: timedelta
) -> Status:
    """The status with the moment that it is now, if what is shown of it tells another one."""
    if apart(now + ahead, now) is None:
        return status
    return replace(status, steady=replace(status.steady or _AS_SHOWN, **{which: now}))


def waiting(training: Training, status: Status, now: datetime) -> Status:
    """The status with the moment since which it waits, if there is a deadline for that."""
    old = training.status
    admitted = old.condition("Admitted")
    resumed = admitted is not None and admitted.reason == SUSPENDED and not training.spec.suspend
    if training.spec.active_deadline_seconds is None or started(old) is not None:
        return status
    if old.observed_generation and not resumed:
        return status
    return replace(status, steady=replace(status.steady or _AS_SHOWN, waits_since=now))

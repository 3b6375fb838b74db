"""When did a training start, come to its outcome and end, on the clock that durations are measured with?

A status shows the time of day. Only where that was set to another time since the control plane's first start the
moment to measure from is kept beside it.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Literal

from muster.core.steady import apart
from muster.types.training import Status, SteadyTimes

_AS_SHOWN = SteadyTimes()


def started(status: Status) -> datetime | None:
    return (status.steady or _AS_SHOWN).started_at or status.started_at


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

"""The pace at which workers start on one machine: how many at once, and whose turn it is.

A worker that starts needs a core for its imports. Hundreds that start together keep each other, and those that train,
from renewing their leases.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from muster.types.training import Uid

PER_CORE = 2
STARTING = timedelta(seconds=20)  # a worker that takes longer no longer holds others back
LOOK_AGAIN = timedelta(seconds=1)  # for what nothing wakes: a worker has been starting for too long


@dataclass(frozen=True)
class StartRequest:
    """Workers that a training lacks, since when."""

    uid: Uid
    since: datetime
    actives: int
    spares: int


@dataclass(frozen=True)
class StartAllowance:
    """How many workers may be started now; None for any number. The reason is for users, where it is too few."""

    count: int | None = None
    reason: str = ""


ANY_NUMBER = StartAllowance()


def most_at_once(cores: int) -> int:
    return PER_CORE * max(1, cores)


def allow(uid: Uid, requests: Iterable[StartRequest], starting: int, most: int) -> StartAllowance:
    """Share what is free: the workers of worlds before all spares, and whoever has waited longest first."""
    free = max(0, most - starting)
    queue = sorted(requests, key=lambda request: (request.since, request.uid))
    allowed, ahead = 0, 0
    for wanted, is_active in [(one, True) for one in queue] + [(one, False) for one in queue]:
        given = min(free, wanted.actives if is_active else wanted.spares)
        free -= given
        if wanted.uid == uid:
            allowed += given
        elif not allowed and is_active and wanted.actives:
            ahead += 1
    lacking = sum(one.actives + one.spares for one in queue if one.uid == uid)
    if allowed >= lacking:
        return StartAllowance(allowed)
    others = f"; {ahead} other training{'s' * (ahead != 1)} wait{'s' * (ahead == 1)} too" if ahead else ""
    told = f"{lacking - allowed} of its workers wait for their turn to start: this machine starts {most} at once"
    return StartAllowance(allowed, f"{told}{others}")

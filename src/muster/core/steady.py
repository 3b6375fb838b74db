"""How much time has gone by, whatever became of the time of day?

Durations are measured on a clock of their own. At a home's first start it is the time of day, and from then on it
goes on by what the machine counts since its boot, over restarts of the control plane too. Only of a time that no such
count covers (the machine was off, another machine took over) the time of day has to tell the length, and is believed
only so far. What was stored by versions that did not know of it was measured by the time of day: the same until then.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta

MOST_UNSEEN = timedelta(minutes=10)  # what a time that no clock has seen counts at most
TOGETHER = timedelta(seconds=0.05)  # moments on two clocks that differ by less are one


@dataclass(frozen=True)
class Mark:
    """When a control plane was last known alive: by the time of day, on the steady clock, and since which boot."""

    at: datetime
    steady: datetime | None = None
    boot: str = ""
    uptime_s: float = 0.0

    @property
    def moment(self) -> datetime:
        return self.steady or self.at


def resumed(kept: Mark | None, now: datetime, boot: str, uptime_s: float, *, moves: bool = False) -> datetime:
    """Where the steady clock stands, by the time of day and the machine's count; it never goes back.

    `moves`: another machine may have gone on with it, and this one's count says nothing about the time between.
    """
    if kept is None or kept.steady is None:
        return now
    if boot and boot == kept.boot and uptime_s >= kept.uptime_s:
        return kept.steady + timedelta(seconds=uptime_s - kept.uptime_s)
    most = MOST_UNSEEN if moves else MOST_UNSEEN + timedelta(seconds=uptime_s)
    return kept.steady + max(timedelta(), min(now - kept.at, most))


def apart(shown: datetime, steady: datetime) -> datetime | None:
    """The second of them, if it has to be kept beside the first."""
    return steady if abs(shown - steady) >= TOGETHER else None

"""What time is it, and how much time has gone by? The time of day can be set, elapsed time cannot."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from muster.core.steady import Mark, resumed

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Of this machine since it was last started; "" where there is none."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


class SystemClock:
    """The clocks of this machine."""

    def __init__(self) -> None:
        self._boot = boot_id()
        self._from, self._from_s = self.now(), _uptime_s()

    def now(self) -> datetime:
        return datetime.now(UTC)

    def monotonic(self) -> float:
        return time.monotonic()

    def steady(self) -> datetime:
        return self._from + timedelta(seconds=_uptime_s() - self._from_s)

    def mark(self) -> Mark:
        return Mark(self.now(), self.steady(), self._boot, _uptime_s())

    def resume(self, kept: Mark | None, *, moves: bool) -> None:
        """Go on where the process before this one was, as far as that is known. `moves`: it may be another machine."""
        uptime_s = _uptime_s()
        self._from, self._from_s = resumed(kept, self.now(), self._boot, uptime_s, moves=moves), uptime_s


def _uptime_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)  # it also counts while the machine sleeps

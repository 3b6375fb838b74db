"""Clocks that go as a test wants them to."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta

from muster.core.steady import Mark


class HandClock:
    """`at` is moved by hand, and so is the time of day beside it: `set_by` is what somebody has set it by."""

    def __init__(self, at: datetime | None = None) -> None:
        self.at = at or datetime.now(UTC)
        self.set_by = timedelta()

    def now(self) -> datetime:
        return self.at + self.set_by

    def steady(self) -> datetime:
        return self.at

    def monotonic(self) -> float:
        return asyncio.get_running_loop().time()

    def mark(self) -> Mark:
        return Mark(self.now(), self.steady())

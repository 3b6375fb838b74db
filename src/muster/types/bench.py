"""How fast do the ranks of a training add up numbers together? What was measured before its program began."""

from __future__ import annotations

import math
from datetime import datetime

from muster.types import plural
from muster.types.codec import limited
from muster.types.records import record

MOST_SIZES = 16
LONGEST_ERROR = 400
_MOST_S = 86_400.0
_UNTRUE = "no time that was measured can be true"


@record()
class BenchSize:
    """All-reduces of so many bytes. One takes as long as the rank that waits longest."""

    bytes: int = limited(ge=1, le=1 << 40)
    count: int = limited(default=0, ge=0, le=1_000_000)
    fast_seconds: float = limited(default=0.0, ge=0, le=_MOST_S)
    median_seconds: float = limited(default=0.0, ge=0, le=_MOST_S)
    slow_seconds: float = limited(default=0.0, ge=0, le=_MOST_S)


@record()
class Bench:
    """What was measured; or in `error`, why nothing was. `bytes_per_second` is what each link of a ring carries."""

    round: int = limited(default=0, ge=0, le=1 << 53)
    measured_at: datetime | None = None
    via: str = limited(default="", max_length=32)
    workers: int = limited(default=0, ge=0, le=1 << 20)
    ranks: int = limited(default=0, ge=0, le=1 << 24)
    latency_seconds: float | None = None  # of the smallest size, half of the time
    bytes_per_second: float | None = None  # of the largest, half of the time
    sizes: tuple[BenchSize, ...] = limited(default=(), max_items=MOST_SIZES)
    error: str = limited(default="", max_length=LONGEST_ERROR)

    def __str__(self) -> str:
        if self.error or self.latency_seconds is None or self.bytes_per_second is None:
            return f"all-reduce was not measured: {self.error or 'nothing was found'}"
        between = f"{self.ranks} ranks on {plural.workers(self.workers)} over {self.via}"
        smallest, largest = min(one.bytes for one in self.sizes), max(one.bytes for one in self.sizes)
        return (
            f"all-reduce between {between}: {self.latency_seconds * 1000:.3g} ms for {smallest} bytes, "
            f"{self.bytes_per_second / 1e6:.4g} MB/s for {largest}"
        )


def summed_up(round: int, via: str, workers: int, ranks: int, sizes: tuple[BenchSize, ...]) -> Bench:
    """What such times say: the smallest size tells of latency, the largest of bandwidth."""
    real = tuple(
        one
        for one in sizes
        if all(
            math.isfinite(seconds) and seconds > 0
            for seconds in (one.fast_seconds, one.median_seconds, one.slow_seconds)
        )
    )
    if not real or ranks < 2:
        return Bench(round, error=_UNTRUE)
    smallest, largest = min(real, key=lambda one: one.bytes), max(real, key=lambda one: one.bytes)
    carried = bus_bytes(largest.bytes, ranks) / largest.median_seconds
    if not math.isfinite(carried):  # in so short a time
        return Bench(round, error=_UNTRUE)
    return Bench(round, None, via, workers, ranks, smallest.median_seconds, carried, real)


def believable(told: Bench) -> Bench:
    """A worker's word, with nothing in it that does not follow from the times that it tells."""
    if told.error:
        return Bench(told.round, error=printable(told.error))
    return summed_up(told.round, printable(told.via), told.workers, told.ranks, told.sizes)


def printable(text: str) -> str:
    """Without what a terminal obeys, and what no message can have in it."""
    return "".join(char if char.isprintable() else " " for char in text)


def bus_bytes(size: int, ranks: int) -> float:
    """What each link of a ring carries: the usual way to compare worlds of different sizes."""
    return 2 * (ranks - 1) / ranks * size

"""When has rank 0 written down how fast its workers reach each other, and is the coordinator told?

What is read was written by a user's process: it is bounded, and what cannot be true is an error that is told instead.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from muster import files
from muster.types import bench
from muster.types.bench import Bench, BenchSize
from muster.types.codec import from_wire, to_wire
from muster.types.frames import Frame, MeasuredFrame, WelcomeFrame

LOOK_S, MARGIN_S = 0.25, 10.0
_MOST_BYTES = 1 << 15
_ODD = "what was written down cannot be understood"


class Measured:
    def __init__(self, send: Callable[[Frame], object]) -> None:
        self._send = send
        self._awaited: tuple[str, int] | None = None  # the file, and the round that writes it
        self._told: MeasuredFrame | None = None

    async def follow(self, path: str, number: int, within_s: float, runs: Callable[[], object]) -> None:
        """Until it is there, those ranks are gone, or it is not coming any more."""
        self._awaited = path, number
        for _ in range(int((within_s + MARGIN_S) / LOOK_S)):
            await asyncio.sleep(LOOK_S)
            self.look()
            if self._awaited is None or runs() is None:
                break
        self._awaited = None

    def look(self) -> None:
        """Tell it if it is there: at the latest before it is told that a rank has ended."""
        if self._awaited is not None and (text := _read(self._awaited[0])) is not None:
            number, self._awaited = self._awaited[1], None
            self._told = MeasuredFrame(round=number, bench=understood(text, number))
            self._send(self._told)

    def hear(self, frame: Frame) -> None:
        if isinstance(frame, WelcomeFrame) and self._told is not None:
            self._send(self._told)  # it may be another coordinator


def understood(text: str, number: int) -> Bench:
    """What rank 0 wrote: what was measured, or in a line of its own why nothing was."""
    try:
        told = json.loads(text)
    except RecursionError:
        return Bench(number, error=_ODD)
    except ValueError:
        line = " ".join(bench.printable(text).split())[: bench.LONGEST_ERROR]
        return Bench(number, error=line or "nothing was written down")
    try:
        sizes = tuple(_size(one) for one in told["sizes"][: bench.MOST_SIZES])
        via, workers, ranks = str(told["via"])[:32], int(told["workers"]), int(told["ranks"])
        found = bench.summed_up(number, via, workers, ranks, sizes)
        return from_wire(Bench, to_wire(found))  # what the coordinator would not read costs the worker its connection
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError):
        return Bench(number, error=_ODD)


def _size(told: Any) -> BenchSize:
    seconds = told["seconds"]
    return BenchSize(int(told["bytes"]), int(told["count"]), *(float(seconds[spot]) for spot in ("p10", "p50", "p90")))


def _read(path: str) -> str | None:
    try:
        return files.read_bytes(path, _MOST_BYTES).decode(errors="replace")
    except OSError:
        return None

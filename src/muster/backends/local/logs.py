"""What ranks wrote: files of all workers, round by round and in order of time, as they are or as they grow.

All of it happens on a few threads, which readers take in turn: the event loop keeps workers alive and never waits for a
disk. A reader holds a bounded piece of what it reads and no file; one that leaves, leaves nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from muster.backends.local import log_files, log_tails
from muster.backends.local.log_files import RankFile, RoundFolder
from muster.backends.local.log_streams import CHUNK, Position, Reading, Stream
from muster.core.training.log_lines import RoundMarkers
from muster.core.training.log_order import in_order
from muster.ports import LogQuery

LOOK_S = 0.05  # how often a followed file is looked at: what writes it does not tell us
RESTS = 10  # times as long as a look takes, so that one over many files does not become all that there is
LONGEST_REST_S = 2.0
SETTLED_NS = (
    60_000_000  # what is followed is shown when it is so old: by then its time is noted, and so is what was before
)
MOST_ROUNDS = 100  # that a tail goes back
AT_ONCE = 4
A_TURN = 500  # pieces that are read in one

Place = tuple[str, str, str]
T = TypeVar("T")

_threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="logs")


async def _aside(work: Callable[..., T], *args: object) -> T:
    """On a thread, after those who asked before. Whoever leaves while it waits is not served any more."""
    return await asyncio.get_running_loop().run_in_executor(_threads, work, *args)


async def read(root: Path, query: LogQuery, ended: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
    """Whole lines. With several ranks each has its rank in front."""
    loop = asyncio.get_running_loop()
    reader, markers = _Reader(root, query), RoundMarkers(query.markers, query.timestamps)
    if query.tail is not None:
        await reader.pass_over(query.tail, whole=not query.follow or ended())
    while True:
        over, began = not query.follow or ended(), loop.time()
        reader.begin_look(time.time_ns())
        rounds = await reader.rounds()
        spent = loop.time() - began
        last = rounds[-1][0] if rounds else 0
        for number, folders in rounds:
            # Ranks of a round are gone before there is another: an unfinished line stays as it is.
            lines = reader.lines(folders, over=over or number < last)
            more = True
            while more:
                chunk, more = await _aside(_turn, lines)
                if chunk:
                    yield markers.before(number, chunk) + chunk
            if over:
                reader.leave_behind(number + 1)
        if over:
            return
        reader.leave_behind(last - 1)
        await asyncio.sleep(min(max(LOOK_S, spent * RESTS), LONGEST_REST_S))


class _Reader:
    """How far one reader is."""

    def __init__(self, root: Path, query: LogQuery) -> None:
        self._root = root
        self._query = query
        self._positions: dict[Place, Position] = {}
        self._ends: dict[Place, int] = {}  # where they differ from that of the file
        self._floor = 0  # rounds before it are read, or passed over
        self._now_ns = 0

    def begin_look(self, now_ns: int) -> None:
        """All that was written until now is seen by what follows."""
        if now_ns < self._now_ns:  # the time of day was set back: what is written now must not wait until then
            for position in self._positions.values():
                position.last_ns = 0
                position.notes.clear()
        self._now_ns = now_ns

    async def rounds(self) -> list[tuple[int, list[RoundFolder]]]:
        found = await _aside(log_files.rounds, self._root, self._query.round)
        wanted = (one for one in found if one.number >= self._floor)
        return [(number, list(folders)) for number, folders in itertools.groupby(wanted, lambda one: one.number)]

    def lines(self, folders: list[RoundFolder], *, over: bool) -> Iterator[bytes]:
        """What there is of a round and was not shown; unless it is over, what was just written can wait."""
        grown = []
        for file in log_files.of_round(self._root, folders, self._query.rank):
            position = self._positions.setdefault(file.place, Position())
            end = self._ends.get(file.place, file.size)  # what grows as fast as it is read has no other end
            if position.offset < min(file.size, end):
                position.look(file, self._now_ns)
                grown.append((file, end, position))
        tag = self._query.rank is None
        reading = Reading(self._root, tag, self._query.timestamps, over, self._now_ns, len(grown))
        streams = [Stream(*one, reading) for one in grown]
        yield from in_order(streams, None if over else self._now_ns - SETTLED_NS)

    async def pass_over(self, count: int, *, whole: bool) -> None:
        """Begin with the last lines of all files together: those of the last round, then of those before it."""
        self._now_ns = time.time_ns()
        for number, folders in reversed((await self.rounds())[-MOST_ROUNDS:]):
            self._floor = number
            if not (found := await _aside(log_files.of_round, self._root, folders, self._query.rank)):
                continue
            count -= await self._pass_over_files(found, count, whole)
            if count <= 0:
                return
            whole = True  # ranks of rounds before it are gone

    async def _pass_over_files(self, found: list[RankFile], count: int, whole: bool) -> int:
        """Begin with the last lines of these; how many lines that are."""
        tail = log_tails.Tail(self._root, found, count, whole=whole, now_ns=self._now_ns)
        while await _aside(tail.turn):
            pass
        shown = list(zip(found, tail.counts, strict=True))
        for at in range(0, len(shown), log_tails.TOGETHER):
            some = shown[at : at + log_tails.TOGETHER]
            for (file, _), offset in zip(some, await _aside(log_tails.begins, self._root, some, whole), strict=True):
                self._positions[file.place] = Position(offset)
                if not self._query.follow:
                    self._ends[file.place] = file.size
        return sum(tail.counts)

    def leave_behind(self, floor: int) -> None:
        if floor > self._floor:
            self._floor = floor
            self._positions = {
                place: at for place, at in self._positions.items() if int(place[1].removeprefix("round-")) >= floor
            }


def _turn(lines: Iterator[bytes]) -> tuple[bytes, bool]:
    """The next pieces, as many as make a turn, and whether there are more."""
    parts, size = [], 0
    for piece in itertools.islice(lines, A_TURN):
        parts.append(piece)
        size += len(piece)
        if size >= CHUNK:
            return b"".join(parts), True
    return b"".join(parts), len(parts) == A_TURN

"""What is heard of a step before it is sealed, and when is that enough?

At each commit a worker tells its buddy what its rank alone has: generators, a place in the data, counters. The rest of
a replicated training is the same on every rank, which sums prove a little later. If the worker dies in between, its
rank's state is put together here: what it said, and for all else what another rank has, where sums said at the step
before that it is the same and a glance at both (`state.glances`) says so still. Else the step before counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from muster.background import Tasks
from muster.node.bulk import Bulk
from muster.node.memory import NoRoom, Segment
from muster.node.shelf import Copy, Shelf, Spot
from muster.state import layout
from muster.state.layout import Manifest, Piece
from muster.types.world import Path

MOST_DATA = 4 << 20
MOST_RANKS = 64
AGAIN_S = 0.5


@dataclass(frozen=True)
class Preview:
    """A step of one rank: the bytes of those pieces that have a sum, one after the other."""

    manifest: Manifest
    data: bytes


def read(memory: Any, begin: int, length: int) -> Preview:
    """What a rank has written down of a copy that it begins with."""
    if begin < 0 or length <= 0 or begin + length > len(memory):
        raise ValueError("it is not within its memory")
    manifest = layout.read(memory[begin : begin + length], begin)
    own = [piece for piece in manifest.every if piece.sum]
    if sum(piece.length for piece in own) > MOST_DATA:
        raise ValueError("too much to be told at once")
    return Preview(manifest, b"".join(memory[piece.offset : piece.offset + piece.length] for piece in own))


async def heard(line: Bulk, told: Any) -> Preview:
    """From another worker."""
    manifest = layout.read(json.dumps(told).encode(), 1 << 61)
    length = sum(piece.length for piece in manifest.every if piece.sum)
    if length > MOST_DATA:
        raise ValueError("too much to be told at once")
    data = bytearray(length)
    if length:
        await line.take(memoryview(data))
    return Preview(manifest, bytes(data))


class Previews:
    """The last preview of each rank that tells us."""

    def __init__(self) -> None:
        self._last: dict[int, Preview] = {}

    def __iter__(self) -> Iterator[Preview]:
        return iter(self._last.values())

    def keep(self, preview: Preview) -> None:
        if preview.manifest.rank in self._last or len(self._last) < MOST_RANKS:
            self._last[preview.manifest.rank] = preview


class Teller:
    """Tells our buddy, over a connection that is never busy with anything else."""

    def __init__(self, path: Path, opened: Callable[[], Awaitable[Bulk]], tasks: Tasks) -> None:
        self.path = path
        self._opened = opened
        self._line: Bulk | None = None
        self._turn = asyncio.Lock()
        self._tasks = tasks
        self._again_at = 0.0
        self._tasks.start(self._open())

    async def _open(self) -> None:
        with contextlib.suppress(OSError):
            self._line = await self._opened()

    async def tell(self, preview: Preview, wait_s: float) -> None:
        """Until it is heard, or so long: then it goes on beside."""
        task = self._tasks.start(self._tell(preview))
        await asyncio.wait([task], timeout=wait_s)

    async def _tell(self, preview: Preview) -> None:
        async with self._turn:
            now = asyncio.get_running_loop().time()
            if self._line is None and now >= self._again_at:
                self._again_at = now + AGAIN_S
                await self._open()
            if self._line is None:
                return
            try:
                self._line.say(preview=json.loads(preview.manifest.write()))
                self._line.write(preview.data)
                await self._line.hear()
            except OSError:
                self._line = None

    def stop(self) -> None:
        if self._line is not None:
            self._line.abort()


async def believe(previews: Previews, shelf: Shelf, take: Callable[[int], Awaitable[Segment]]) -> None:
    """Put together what can be, of ranks of which there is only a preview."""
    for preview in previews:
        made = preview.manifest
        if shelf.get((made.rank, made.round, made.step)) is not None:
            continue
        found = same_elsewhere(made, shelf)
        if found is None:
            continue
        with contextlib.suppress(NoRoom):
            segment = await take(len(preview.data))
            try:
                segment.memory[: len(preview.data)] = preview.data
                put_together(preview, found, segment, shelf)
            finally:
                segment.users -= 1  # the copy has it now


def put_together(preview: Preview, found: Mapping[str, tuple[Piece, Spot]], segment: Segment, shelf: Shelf) -> Copy:
    pieces: list[Piece] = []
    spots: list[Spot] = []
    at = 0
    for piece in preview.manifest.every:
        if piece.sum:
            pieces.append(piece)
            spots.append((segment, at))
            at += piece.length
        else:
            twin, spot = found[piece.name]
            pieces.append(replace(piece, sum=twin.sum))
            spots.append(spot)
    manifest = replace(preview.manifest, pieces=tuple(pieces[:-1]), rest=pieces[-1])
    return shelf.put(manifest, spots, own=False)


def same_elsewhere(made: Manifest, shelf: Shelf) -> Mapping[str, tuple[Piece, Spot]] | None:
    """For each piece without a sum the same one of another rank at that step; None if there is one without."""
    before = max(
        (copy for copy in shelf if copy.manifest.rank == made.rank and copy.manifest.step < made.step),
        key=lambda copy: copy.key,
        default=None,
    )
    if before is None:
        return None
    for now in [copy for copy in shelf if _beside(copy.manifest, made)]:
        past = shelf.get((now.manifest.rank, before.manifest.round, before.manifest.step))
        if past is not None and (found := _matched(made, before.manifest, now, past.manifest)) is not None:
            return found
    return None


def _beside(other: Manifest, made: Manifest) -> bool:
    return other.rank != made.rank and (other.round, other.step, other.ranks) == (made.round, made.step, made.ranks)


def _matched(made: Manifest, before: Manifest, now: Copy, past: Manifest) -> Mapping[str, tuple[Piece, Spot]] | None:
    twins = {piece.name: (piece, spot) for piece, spot in zip(now.manifest.every, now.spots, strict=True)}
    sums = {piece.name: piece.sum for piece in before.pieces}
    theirs = {piece.name: piece.sum for piece in past.pieces}
    found: dict[str, tuple[Piece, Spot]] = {}
    for piece in made.pieces:
        if piece.sum:
            continue
        twin, spot = twins.get(piece.name, (None, None))
        if twin is None or spot is None or not piece.glance or _kind(twin) != _kind(piece):
            return None
        if not sums.get(piece.name) or sums[piece.name] != theirs.get(piece.name):
            return None
        found[piece.name] = twin, spot
    return found


def _kind(piece: Piece) -> tuple[Any, ...]:
    return piece.glance, piece.dtype, piece.shape, piece.whole, piece.begin, piece.length

"""Previews of another rank's step before that step is sealed.

At each commit a worker sends its buddy the content hashes of all pieces of its rank's step, and the bytes of the pieces
that only this rank has: generators, a place in the data, counters. If the worker dies before the step is sealed, the
buddy puts the step together: from those bytes, and from pieces of other ranks with equal hashes. If a piece is missing,
the step before counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
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
    """A step of one rank: its manifest, and the bytes of some pieces, one after the other."""

    manifest: Manifest
    included: tuple[int, ...]  # indices of the pieces whose bytes are here; the rest is behind the last piece
    data: bytes


def read(memory: Any, begin: int, length: int, included: Any) -> Preview:
    """Read the preview that a rank has written into its memory."""
    if begin < 0 or length <= 0 or begin + length > len(memory):
        raise ValueError("the preview lies outside the rank's memory")
    manifest = layout.read(memory[begin : begin + length], begin)
    pieces = _included_pieces(manifest, included)
    data = b"".join(memory[piece.offset : piece.offset + piece.length] for piece in pieces)
    return Preview(manifest, tuple(included), data)


async def receive(line: Bulk, message: dict[str, Any]) -> Preview:
    """Receive the preview that another worker sends."""
    manifest, included = layout.read(json.dumps(message["preview"]).encode(), 1 << 61), message["told"]
    data = bytearray(sum(piece.length for piece in _included_pieces(manifest, included)))
    if data:
        await line.take(memoryview(data))
    return Preview(manifest, tuple(included), bytes(data))


def _included_pieces(manifest: Manifest, included: Any) -> list[Piece]:
    pieces = manifest.every
    if not all(piece.hash for piece in pieces):
        raise ValueError("the preview lacks the hash of a piece")
    if not isinstance(included, list) or any(
        not isinstance(index, int) or isinstance(index, bool) for index in included
    ):
        raise ValueError("the preview does not name its pieces by their indices")
    if included != sorted(set(included)) or (included and not 0 <= included[0] <= included[-1] < len(pieces)):
        raise ValueError("the preview names pieces that the step does not have")
    chosen = [pieces[index] for index in included]
    if sum(piece.length for piece in chosen) > MOST_DATA:
        raise ValueError("the preview is too large")
    return chosen


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
                self._line.say(preview=json.loads(preview.manifest.write()), told=list(preview.included))
                self._line.write(preview.data)
                await self._line.hear()
            except OSError:
                self._line = None

    def stop(self) -> None:
        if self._line is not None:
            self._line.abort()


async def adopt(previews: Previews, shelf: Shelf, take: Callable[[int], Awaitable[Segment]]) -> None:
    """Put together each previewed step if all its pieces are here."""
    for preview in previews:
        manifest = preview.manifest
        if shelf.get((manifest.rank, manifest.round, manifest.step)) is not None:
            continue
        if missing_spots(preview, shelf) is None:
            continue
        with contextlib.suppress(NoRoom):
            segment = await take(len(preview.data))
            try:
                segment.memory[: len(preview.data)] = preview.data
                if (spots := missing_spots(preview, shelf)) is not None:  # taking memory may have dropped pieces
                    put_together(preview, spots, segment, shelf)
            finally:
                segment.users -= 1  # the copy has it now


def missing_spots(preview: Preview, shelf: Shelf) -> dict[int, Spot] | None:
    """Find the pieces without bytes in the preview, by their hashes. Return None if a piece is missing."""
    spots: dict[int, Spot] = {}
    for index in set(range(len(preview.manifest.every))) - set(preview.included):
        if (spot := shelf.spot(preview.manifest.every[index])) is None:
            return None
        spots[index] = spot
    return spots


def put_together(preview: Preview, spots: Mapping[int, Spot], segment: Segment, shelf: Shelf) -> Copy:
    """Add a step to the shelf: the bytes of its preview lie in `segment`, the other pieces in `spots`."""
    places: list[Spot] = []
    offset = 0
    for index, piece in enumerate(preview.manifest.every):
        if index in spots:
            places.append(spots[index])
        else:
            places.append((segment, offset))
            offset += piece.length
    return shelf.put(preview.manifest, places, own=False)

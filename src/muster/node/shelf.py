"""What state does this worker hold: its own ranks', and copies of others'?

A copy is a manifest and where each of its pieces lies. Equal pieces lie in one place, whoever they came from: that is
how two workers find out that they have the same. The newest of each rank are kept, and those that all have.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from muster.node.memory import Memory, Segment
from muster.state.layout import Manifest, Piece
from muster.types.state import Held

KEPT = 2
SMALL = 4 << 20  # of copies that are smaller more are kept: they come quickly, and others lag behind
KEPT_SMALL = 16
LARGE = 32 << 20  # of others' copies that are larger only what is needed is kept: memory is dear
Key = tuple[int, int, int]  # rank, round, step
Spot = tuple[Segment, int]


@dataclass(frozen=True)
class Copy:
    manifest: Manifest
    spots: tuple[Spot, ...]  # of each piece, the rest's last
    own: bool

    @property
    def key(self) -> Key:
        return self.manifest.rank, self.manifest.round, self.manifest.step

    @property
    def segments(self) -> list[Segment]:
        return list({spot[0].number: spot[0] for spot in self.spots}.values())

    @property
    def bytes(self) -> int:
        return sum(piece.length for piece in self.manifest.every)


class Shelf:
    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._copies: dict[Key, Copy] = {}
        self._spots: dict[tuple[str, int], Spot] = {}
        self._safe: list[tuple[int, int]] = []  # round and step, as they were last told, the newest first
        self.stride = 1

    def __iter__(self) -> Iterator[Copy]:
        return iter(self._copies.values())

    def get(self, key: Key) -> Copy | None:
        return self._copies.get(key)

    def has_own(self, rank: int) -> bool:
        return any(copy.own and copy.manifest.rank == rank for copy in self)

    def spot(self, piece: Piece) -> Spot | None:
        """Where the same content lies already."""
        return self._spots.get((piece.hash, piece.length)) if piece.hash else None

    @property
    def safe(self) -> tuple[int, int] | None:
        return self._safe[0] if self._safe else None

    def tell_safe(self, safe: tuple[int, int]) -> None:
        """That step is not let go of, nor is the one before it: others may hear of it later."""
        if safe != self.safe:
            self._safe = [safe, *self._safe[:1]]

    def put(self, manifest: Manifest, spots: Iterable[Spot], *, own: bool) -> Copy:
        copy = Copy(manifest, tuple(spots), own)
        self.drop(copy.key)
        for piece, spot in zip(manifest.every, copy.spots, strict=True):
            self._spots[piece.hash, piece.length] = spot
        for segment in copy.segments:
            segment.users += 1
        self._copies[copy.key] = copy
        kept = KEPT_SMALL if copy.bytes <= SMALL else 1 if copy.bytes > LARGE and not own else KEPT
        safe = self._safe[:1] if copy.bytes > LARGE else self._safe
        for old in superfluous(self._copies, manifest.rank, safe, self.stride, kept):
            self.drop(old)
        return copy

    def drop(self, key: Key) -> None:
        copy = self._copies.pop(key, None)
        if copy is None:
            return
        for segment in copy.segments:
            self._memory.let_go(segment)
        gone = {segment.number for segment in copy.segments if not segment.users}
        if gone:
            self._spots = {name: spot for name, spot in self._spots.items() if spot[0].number not in gone}

    def discard(self, total: str, length: int) -> list[Key]:
        """A piece of that content is not what it should be: nothing that lies there can be used."""
        spot = self._spots.pop((total, length), None)
        wrong = [
            key
            for key, copy in self._copies.items()
            for piece, where in zip(copy.manifest.every, copy.spots, strict=True)
            if (piece.hash, piece.length) == (total, length) and (spot is None or where == spot)
        ]
        for key in wrong:
            self.drop(key)
        return wrong

    def let_one_go(self) -> bool:
        """There is no room: give up the copy that is needed least, others' first. The newest of each rank stays."""
        newest = {key[0]: key for key in sorted(self._copies)}
        for key in sorted(self._copies, key=lambda key: (self._copies[key].own, *key[1:])):
            mine = any(not segment.lent for segment in self._copies[key].segments)
            if mine and key != newest[key[0]] and key[1:] not in self._safe[:1]:
                self.drop(key)
                return True
        return False

    def abandon(self, number: int, step: int) -> None:
        """A round went on from that step and got on: what was committed after it, before that round, never was."""
        for key in [key for key in self._copies if key[2] > step and key[1] < number]:
            self.drop(key)

    def held(self) -> tuple[Held, ...]:
        used = Counter(segment.number for copy in self for segment in copy.segments)
        return tuple(_held(copy, used) for copy in self)


def _held(copy: Copy, used: Counter[int]) -> Held:
    made = copy.manifest
    extra = sum(piece.length for piece, spot in zip(made.every, copy.spots, strict=True) if used[spot[0].number] == 1)
    return Held(made.rank, made.ranks, made.round, made.step, copy.bytes, extra)


def superfluous(
    keys: Iterable[Key], rank: int, safe: Iterable[tuple[int, int]], stride: int = 1, kept: int = KEPT
) -> list[Key]:
    """Which copies of a rank are not needed any more: all but the newest, those that all have, and those under way."""
    of_rank = sorted((key for key in keys if key[0] == rank), reverse=True)
    under_way = [key for key in of_rank if key[2] % stride == 0][: min(kept, KEPT)]
    pinned = set(safe)
    return [key for key in of_rank[kept:] if key[1:] not in pinned and key not in under_way]

"""Who gets what is vacant or yielded, and which bundle of its map?"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from muster.core.sharing.draft import TURN, Draft, OpenPipeline
from muster.types.sharing import PipelineId

SOON = 4  # of the pipelines nearest to their end, whose training GPUs others are kept off


class Filling:
    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._opens, self._free = draft.opens, draft.room.free
        self._narrow: list[int] | None = None  # maps that do not reach everything; with _soon, when first asked for
        self._soon: list[int] = []

    def keep_promises(self) -> None:
        """What was shrunk for somebody goes to it if it can still use it; whoever has nothing comes before."""
        if any(one.starves and one.most for one in self._opens.values()):
            return
        for bundle in self._draft.shares.promised:
            one = self._opens.get(bundle.pipeline)
            if one is None or one.count >= one.most or one.taken >> bundle.rank & 1:
                continue
            if one.spec.masks[bundle.rank] & ~self._draft.vacant == 0:
                self._draft.give(one, bundle.rank)

    def fill(self) -> None:
        """No GPU stays idle while an open pipeline can use it; whoever is furthest below its due chooses first."""
        draft = self._draft
        if len({one.spec.mask & draft.avail for one in self._opens.values()}) > 1:
            self._seat_one_each()
        queue = [(one.order(), one.name) for one in self._opens.values() if one.count < one.most]
        heapq.heapify(queue)
        while queue:
            _, name = heapq.heappop(queue)
            one = self._opens[name]
            rank = self._choose(one, draft.vacant)
            if rank is None and draft.yielded and one.will_fill(one.count + 1, TURN * (one.pipeline.expand_s or 0.0)):
                rank = self._choose(one, draft.vacant | draft.yielded)
            if rank is None:
                continue
            draft.give(one, rank)
            if one.count < one.most:
                heapq.heappush(queue, (one.order(), name))

    # With unequal maps

    def _seat_one_each(self) -> None:
        """As many as possible of those that have nothing get one, by making room for one another."""
        among = self._draft.vacant | self._draft.yielded
        hungry = sorted((one for one in self._opens.values() if one.starves and one.most), key=OpenPipeline.order)
        seats: dict[PipelineId, int] = {}
        for one in hungry:
            self._seat(one, among, seats, set())
        for name, rank in seats.items():
            self._draft.give(self._opens[name], rank)

    def _seat(self, one: OpenPipeline, among: int, seats: dict[PipelineId, int], tried: set[int]) -> bool:
        """Find a bundle for it; whoever sits there may move to another one of its own."""
        for rank in self._by_contention(one, among):
            mask = one.spec.masks[rank]
            if mask in tried:
                continue
            tried.add(mask)
            there = [other for other, its in seats.items() if self._opens[other].spec.masks[its] & mask]
            if len(there) > 1:
                continue
            if not there or self._seat(self._opens[there[0]], among & ~mask, seats, tried):
                seats[one.name] = rank
                return True
        return False

    def _by_contention(self, one: OpenPipeline, among: int) -> list[int]:
        maps = [other.spec.mask for other in self._opens.values() if other is not one]
        ranks = [rank for rank, mask in enumerate(one.spec.masks) if mask & ~among == 0 and not one.taken >> rank & 1]

        def wanted(rank: int) -> tuple[bool, bool, int, int]:
            mask = one.spec.masks[rank]
            return (mask & ~self._free != 0, not mask & one.own, sum(bool(m & mask) for m in maps), rank)

        return sorted(ranks, key=wanted)

    # Which bundle

    def _choose(self, one: OpenPipeline, among: int) -> int | None:
        """A rank that it does not have and whose GPUs are all among these: on its own training GPUs if possible, then
        where the fewest others could go."""
        reach = one.spec.mask & among
        if not reach:
            return None
        free = reach & self._free
        for part in (free & one.own, reach & one.own, self._least_wanted(one, free), reach):
            if part and (rank := _first_rank(one, part, among)) is not None:
                return rank
        return None

    def _least_wanted(self, one: OpenPipeline, reach: int) -> int:
        """Of these GPUs, those that no narrower open pipeline could use and on which nobody else trains soon."""
        if not reach:
            return 0
        for other in self._rivals(one):
            reach = reach & ~other or reach
        return reach

    def _rivals(self, one: OpenPipeline) -> Iterator[int]:
        """Masks to stay away from, the most important first: maps that are narrower, then GPUs others train on."""
        everything = self._draft.avail
        if self._narrow is None:
            maps = {other.spec.mask & everything for other in self._opens.values() if other.count < other.most}
            self._narrow = sorted(maps - {everything}, key=lambda mask: (mask.bit_count(), mask))
            ends = sorted(self._opens.values(), key=lambda other: (other.remaining, other.name))
            self._soon = [other.own for other in ends if other.own][:SOON]
        mine = one.spec.mask & everything
        yield from (mask for mask in self._narrow if mask != mine and mask.bit_count() < mine.bit_count())
        yield from (mask for mask in self._soon if mask != one.own)


def _first_rank(one: OpenPipeline, part: int, among: int) -> int | None:
    while part:
        low = part & -part
        rank = one.spec.rank_at[low.bit_length() - 1]
        mask = one.spec.masks[rank]
        if mask & ~among == 0 and not one.taken >> rank & 1:
            return rank
        part &= ~mask
    return None

"""Who gives a bundle to whom? Between pipelines that are all busy: calmly by their dues, or in turns."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Mapping

from muster.core.sharing.draft import TURN, Draft, OpenPipeline
from muster.types.sharing import Gpu, Lease, gpus_of

TINY = 1e-9  # shares that differ by less are equal
WORTH_IT = 14.0  # a bundle that moves is needed at least so many times as long

_Move = tuple[int, list[Lease]]  # the receiver's rank, and whose leases have to go for it


class Moving:
    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._opens = draft.opens
        self.recheck = math.inf  # when a turn will be over

    def _held(self) -> dict[Gpu, Lease]:
        return {
            gpu: lease for one in self._opens.values() for lease in one.kept.values() for gpu in gpus_of(lease.mask)
        }

    def _in_the_way(self, one: OpenPipeline, rank: int, at: Mapping[Gpu, Lease]) -> list[Lease] | None:
        """What has to go so that it gets this bundle; None if it cannot have it."""
        mask = one.spec.masks[rank]
        if mask & ~self._draft.avail or one.taken >> rank & 1:
            return None
        blocked = gpus_of(mask & ~self._draft.vacant)
        if not all(gpu in at for gpu in blocked):
            return None
        return list({at[gpu].bundle: at[gpu] for gpu in blocked}.values())

    # By their dues

    def move(self) -> None:
        """Calmly: to one that has nothing, or is a whole bundle short, from one that has more than its due."""
        queue = [(one.order(), one.name) for one in self._opens.values() if _is_short(one)]
        heapq.heapify(queue)
        donors = self._donors()
        while queue:
            _, name = heapq.heappop(queue)
            one = self._opens[name]
            found = self._find_move(one, donors)
            if found is None:
                continue
            rank, leases = found
            self._draft.take(one, rank, leases)
            for each in (one, *(self._opens[lease.bundle.pipeline] for lease in leases)):
                if _is_short(each):
                    heapq.heappush(queue, (each.order(), each.name))

    def _donors(self) -> list[OpenPipeline]:
        """Those furthest from their end first: the others are nearly done."""
        found = [one for one in self._opens.values() if one.kept]
        for one in found:
            one.kept = dict(sorted(one.kept.items()))
        return sorted(found, key=lambda one: (-one.remaining / max(1, one.count), one.name))

    def _find_move(self, one: OpenPipeline, donors: list[OpenPipeline]) -> _Move | None:
        """From one that keeps its due, else from one that has more than its due, else from anybody who may give."""
        for least in (1.0, 2 * TINY, -math.inf):
            for donor in donors:
                if donor.count - donor.due < least - TINY or not _may_give(donor, one):
                    continue
                if _outlasts(one, donor) and (found := self._best_of(donor, one)) is not None:
                    return found
        return self._find_composed_move(one)

    def _best_of(self, donor: OpenPipeline, one: OpenPipeline) -> _Move | None:
        """Best where the receiver trains itself, worst where the donor does; then the lowest rank."""
        best: tuple[tuple[bool, bool], int, Lease] | None = None
        for lease in donor.kept.values():
            mine = self._as_mine(one, lease)
            if mine is None:
                continue
            key = (not lease.mask & one.own, bool(lease.mask & donor.own))
            if best is None or key < best[0]:
                best = (key, mine, lease)
            if key == (False, False):
                break
        return None if best is None else (best[1], [best[2]])

    def _as_mine(self, one: OpenPipeline, lease: Lease) -> int | None:
        """The rank of its own that has exactly the GPUs of that lease."""
        if lease.mask & ~(one.spec.mask & self._draft.avail):
            return None
        mine = one.spec.rank_at[(lease.mask & -lease.mask).bit_length() - 1]
        return mine if one.spec.masks[mine] == lease.mask and not one.taken >> mine & 1 else None

    def _find_composed_move(self, one: OpenPipeline) -> _Move | None:
        """A bundle that is not exactly somebody else's: parts of it may be vacant, or several must give way."""
        if one.spec.tp_size == 1 and all(other.spec.tp_size == 1 for other in self._opens.values()):
            return None
        at, found = self._held(), []
        for rank in range(len(one.spec.masks)):
            if (leases := self._in_the_way(one, rank, at)) is None:
                continue
            wanted = Counter(lease.bundle.pipeline for lease in leases)
            if all(_may_give(self._opens[name], one, count) for name, count in wanted.items()):
                found.append((rank, leases))
        return min(found, key=lambda move: len(move[1]), default=None)

    # In turns

    def take_turns(self) -> None:
        """Somebody has nothing, and nobody can spare what it needs: what has been held longest moves on."""
        waiting = sorted(
            (one for one in self._opens.values() if one.starves and one.most > 0),
            key=lambda one: (one.waiting_since, one.name),
        )
        if not waiting:
            return
        at, now = self._held(), self._draft.now
        for one in waiting:
            for _, rank, leases in self._reachable(one, at):
                over = max(lease.held_since + self._turn_s(lease, one) for lease in leases)
                if now >= over:
                    waited = now - one.waiting_since
                    self._draft.take(one, rank, leases, f"{one.name} has waited {waited:.1f} s for a turn")
                    for lease in leases:
                        for gpu in gpus_of(lease.mask):
                            del at[gpu]
                    break
                self.recheck = min(self.recheck, over)

    def _reachable(self, one: OpenPipeline, at: Mapping[Gpu, Lease]) -> list[tuple[float, int, list[Lease]]]:
        """Its bundles that others would have to leave, and whom: the longest-held first."""
        found = []
        for rank in {one.spec.rank_at[gpu] for gpu in at if gpu in one.spec.rank_at}:
            if leases := self._in_the_way(one, rank, at):
                found.append((max(lease.held_since for lease in leases), rank, leases))
        return sorted(found, key=lambda item: item[:2])

    def _turn_s(self, lease: Lease, one: OpenPipeline) -> float:
        donor = self._opens[lease.bundle.pipeline].pipeline
        switch_s = (donor.shrink_s or 0.0) + (one.pipeline.expand_s or 0.0)
        return max(self._draft.shares.min_turn_s, TURN * switch_s)


def _is_short(one: OpenPipeline) -> bool:
    return one.count < one.most and (one.starves or one.lacks >= 1.0)


def _may_give(donor: OpenPipeline, receiver: OpenPipeline, count: int = 1) -> bool:
    left = donor.count - count
    if donor is receiver or len(donor.kept) < count or left < donor.least:
        return False
    return receiver.starves or left + 1 > donor.due


def _outlasts(one: OpenPipeline, donor: OpenPipeline) -> bool:
    """What remains must need the bundle for longer than the switch takes."""
    shrink, expand = donor.pipeline.shrink_s, one.pipeline.expand_s
    return shrink is None or expand is None or one.still_wants(WORTH_IT, shrink + expand)

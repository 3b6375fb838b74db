"""Who gives a bundle to whom? Between pipelines that are all busy: calmly by their dues, or in turns."""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from muster.core.sharing.draft import TURN, Draft, OpenPipeline
from muster.types.sharing import Gpu, Lease, PipelineId, gpus_of

TINY = 1e-9  # shares that differ by less are equal
HALF = 0.5  # who is so much of a bundle above its due is as near to it without that bundle

_Move = tuple[int, list[Lease]]  # the receiver's rank, and whose leases have to go for it


class Moving:
    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._opens = draft.opens
        self.recheck = math.inf  # when a turn will be over
        self._all_single = all(one.spec.tp_size == 1 for one in draft.opens.values())
        self._at: dict[Gpu, Lease] | None = None  # what could move, while pipelines move by their dues
        self._kept_masks: dict[PipelineId, tuple[int, int]] = {}

    def _held(self) -> dict[Gpu, Lease]:
        return {
            gpu: lease for one in self._opens.values() for lease in one.kept.values() for gpu in gpus_of(lease.mask)
        }

    def _in_the_way(self, one: OpenPipeline, rank: int, at: Mapping[Gpu, Lease]) -> list[Lease] | None:
        """What of others that are busy has to go so that it gets this bundle; None if it cannot have it."""
        mask = one.spec.masks[rank]
        if mask & ~self._draft.avail or one.taken >> rank & 1:
            return None
        blocked = gpus_of(mask & ~(self._draft.vacant | self._draft.yielded))
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
            found = self._find_move(one, donors) if _is_short(one) else None  # who gave two bundles is in there twice
            if found is None:
                continue
            rank, leases = found
            self._draft.take(one, rank, leases)
            self._forget(leases)
            for each in (one, *(self._opens[lease.bundle.pipeline] for lease in leases)):
                if _is_short(each):
                    heapq.heappush(queue, (each.order(), each.name))

    def _forget(self, leases: Iterable[Lease]) -> None:
        if self._at is not None:
            for gpu in [gpu for lease in leases for gpu in gpus_of(lease.mask)]:
                self._at.pop(gpu, None)

    def _donors(self) -> list[OpenPipeline]:
        """Those furthest from their end first: the others are nearly done."""
        found = [one for one in self._opens.values() if one.kept]
        for one in found:
            one.kept = dict(sorted(one.kept.items()))
        return sorted(found, key=lambda one: (-one.remaining / max(1, one.count), one.name))

    def _find_move(self, one: OpenPipeline, donors: list[OpenPipeline]) -> _Move | None:
        """From one that keeps its due, else from one that is as near to it afterwards, else from one that has more than
        its due, else from anybody who may give."""
        for least in (1.0, HALF, 2 * TINY, -math.inf):
            for donor in donors:
                if donor.count - donor.due < least - TINY or not _may_give(donor, one):
                    continue
                if _outlasts(one, donor) and (found := self._best_of(donor, one)) is not None:
                    return found
        return self._find_composed_move(one)

    def _best_of(self, donor: OpenPipeline, one: OpenPipeline) -> _Move | None:
        """Best where the receiver trains itself, worst where the donor does; then the lowest rank."""
        if donor.spec.tp_size != one.spec.tp_size:
            return None  # none of its bundles is one of the other's
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
        """A bundle that is not exactly somebody else's: parts of it may be vacant, or several must give way. The fewer
        the better, then the lowest rank."""
        if one.spec.tp_size == 1 and self._all_single:
            return None
        vacant, given = self._draft.vacant, self._may_be_given_to(one)
        for rank in _ranks_within(one, vacant & self._draft.avail):
            return rank, []
        best: _Move | None = None
        for rank in _ranks_within(one, (vacant | self._draft.yielded | given) & self._draft.avail):
            if self._at is None:
                self._at = self._held()
            if not (leases := self._in_the_way(one, rank, self._at)) or (best and len(leases) >= len(best[1])):
                continue
            wanted = Counter(lease.bundle.pipeline for lease in leases)
            if all(_may_give(self._opens[name], one, count) for name, count in wanted.items()):
                best = (rank, leases)
                if len(leases) == 1:
                    break
        return best

    def _may_be_given_to(self, one: OpenPipeline) -> int:
        """All GPUs of those that may give it at least one bundle."""
        whole = 0
        for donor in self._opens.values():
            if donor.kept and _may_give(donor, one):
                whole |= self._kept_mask(donor)
        return whole

    def _kept_mask(self, donor: OpenPipeline) -> int:
        """It only ever loses some while a plan is made, so their number says whether it has to be looked at again."""
        count, mask = self._kept_masks.get(donor.name, (-1, 0))
        if count != len(donor.kept):
            mask = 0
            for lease in donor.kept.values():
                mask |= lease.mask
            self._kept_masks[donor.name] = (len(donor.kept), mask)
        return mask

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


def _ranks_within(one: OpenPipeline, among: int) -> Iterator[int]:
    """Ranks that it does not have and whose GPUs are all among these, the lowest first."""
    spec, left = one.spec, one.spec.mask & among
    while left:
        low = left & -left
        rank = spec.rank_at[low.bit_length() - 1]
        mask = spec.masks[rank]
        if mask & ~left == 0 and not one.taken >> rank & 1:
            yield rank
        left &= ~mask


def _is_short(one: OpenPipeline) -> bool:
    return one.count < one.most and (one.starves or one.lacks >= 1.0)


def _may_give(donor: OpenPipeline, receiver: OpenPipeline, count: int = 1) -> bool:
    left = donor.count - count
    if donor is receiver or len(donor.kept) < count or left < donor.least:
        return False
    return receiver.starves or left + 1 > donor.due


def _outlasts(one: OpenPipeline, donor: OpenPipeline) -> bool:
    """What remains must need one more bundle for a turn, which is longer than the switch takes."""
    shrink_s, expand_s = donor.pipeline.shrink_s, one.pipeline.expand_s
    return shrink_s is None or expand_s is None or one.will_fill(one.count + 1, TURN * (shrink_s + expand_s))

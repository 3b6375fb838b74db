"""Who gets which GPUs next, and why?

`plan(shares, now)` looks at everything that is known and answers what to shrink, grant and expand. It is asked again
after every change, so a plan holds nothing back for later: grants and expands whose GPUs are still being vacated are
named, and made when they are. Draining GPUs count as vacant for planning, so nothing is shrunk twice for one purpose.

The stages, in order:

    fixed      whole-cluster requests (`fixed`)
    promised   what the last plan shrank for somebody who can still use it
    vacant     free GPUs to open pipelines, whoever is furthest below its due first
    yielded    bundles of holders that have nothing left to do
    moved      from one busy pipeline to another, calmly
    turns      one bundle each and somebody waits: the longest-held moves on
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from muster.core.sharing import due
from muster.core.sharing.fixed import FixedRequests
from muster.core.sharing.plans import Expand, Plan
from muster.core.sharing.room import holders, listed, room_of
from muster.types.sharing import (
    GENERATION_CLUSTER,
    Bundle,
    ClusterSpec,
    Gpu,
    Lease,
    LeaseState,
    Pipeline,
    PipelineId,
    Priority,
    Shares,
    gpus_of,
)

TINY = 1e-9  # shares that differ by less are equal
TURN = 4.0  # a turn lasts at least so many times as long as a switch takes
WORTH_IT = 14.0  # a bundle that moves is needed at least so many times as long


def plan(shares: Shares, now: float) -> Plan:
    return _Planning(shares, now).run()


def dues(shares: Shares, now: float) -> dict[PipelineId, float]:
    """How many GPUs the generation of each open pipeline should have."""
    return _Planning(shares, now).dues()


@dataclass
class _Open:
    """An open pipeline while a plan is made."""

    pipeline: Pipeline
    spec: ClusterSpec
    remaining: int
    waiting_since: float
    rate: float | None
    due: float = 0.0  # in bundles
    most: int = 0  # bundles that it can use
    count: int = 0  # bundles that it has or is given by this plan
    kept: dict[int, Lease] = field(default_factory=dict)  # rank → lease that may be taken away
    taken: int = 0  # mask of ranks, by rank number, that it has already
    own: int = 0  # GPUs on which it trains itself: nobody else will want them back before it is done here

    @property
    def lacks(self) -> float:
        return round(self.due - self.count, 9)  # equal shares are equal, however they were computed

    overdue: bool = False  # it has waited longer than a turn

    def order(self) -> tuple[bool, float, float, PipelineId]:
        """Whoever has nothing first, of those whoever has waited too long; then whoever is furthest below its due."""
        waits = self.waiting_since if self.overdue and self.count == 0 else math.inf
        return (self.count > 0, waits, -self.lacks, self.pipeline.pipeline_id)


class _Planning:
    """One plan in the making. It never touches what it was given."""

    def __init__(self, shares: Shares, now: float) -> None:
        self._shares, self._now = shares, now
        self._room = room_of(shares)
        self._fixed = FixedRequests(shares, self._room, now)
        self._shrinks = self._fixed.shrinks
        self._reasons = self._fixed.reasons
        self._recheck = self._fixed.recheck
        self._expands: list[tuple[Bundle, int]] = []

    def run(self) -> Plan:
        self._share_the_rest()
        expands = [Expand(bundle, mask, mask & ~self._room.free == 0) for bundle, mask in self._expands]
        return Plan(
            shrinks=tuple(self._shrinks),
            grants=tuple(self._fixed.grants),
            expands=tuple(expands),
            reasons=self._reasons | {str(bundle): why for bundle, why in self._shrinks.items()},
            recheck_at=None if self._recheck == math.inf else self._recheck,
        )

    def dues(self) -> dict[PipelineId, float]:
        self._share_the_rest()
        return {name: one.due * one.spec.tp_size for name, one in self._opens.items()}

    # Generation

    def _share_the_rest(self) -> None:
        room = self._room
        self._avail = self._shares.pool.mask & ~(room.lost | room.fixed | room.frozen | self._fixed.promised)
        self._opens = self._open_pipelines()
        if not self._opens:
            return
        self._yields: dict[int, Lease] = {}
        self._sort_generating()
        self._set_dues()
        self._vacant = (room.free | room.draining) & self._avail
        self._yielded = _union(lease.mask for lease in self._yields.values()) & self._avail
        self._keep_promises()
        self._fill()
        before = len(self._shrinks)
        self._move()
        self._take_turns()
        if len(self._shrinks) > before:
            self._fill()  # whoever gave a bundle away may be able to use what nobody could before
        for one in self._opens.values():
            if one.count == 0:
                self._explain_waiting(one)

    def _open_pipelines(self) -> dict[PipelineId, _Open]:
        found = {}
        for pipeline_id, rollout in self._shares.rollouts.items():
            pipeline = self._shares.pipelines[pipeline_id]
            if not pipeline.admitted or not pipeline.movable or rollout.remaining <= 0:
                continue
            since = rollout.opened_at if rollout.waiting_since is None else rollout.waiting_since
            one = _Open(pipeline, pipeline.infer, rollout.remaining, since, rollout.rate)
            one.overdue = rollout.waiting_since is not None and self._now - since > self._shares.min_turn_s
            for name, spec in pipeline.clusters.items():
                if name != GENERATION_CLUSTER:
                    one.own |= spec.mask
            found[pipeline_id] = one
        return found

    def _sort_generating(self) -> None:
        """Bundles that stay with an open pipeline, and those that a holder without demand yields."""
        for lease in self._room.generating:
            if lease.mask & self._fixed.promised:
                continue  # a fixed request takes it, now or as soon as it is granted
            one = self._opens.get(lease.bundle.pipeline)
            rank = lease.bundle.rank
            if one is None:
                if lease.state is LeaseState.HELD:
                    for gpu in gpus_of(lease.mask):
                        self._yields[gpu] = lease
                continue
            one.count += 1
            one.taken |= 1 << rank
            if lease.state is LeaseState.HELD:
                one.kept[rank] = lease
        for bundle, lease in self._shares.leases.items():
            if lease.state is LeaseState.DRAINING and (one := self._opens.get(bundle.pipeline)) is not None:
                one.taken |= 1 << bundle.rank  # it cannot be woken before it is down

    def _set_dues(self) -> None:
        claims = []
        for one in self._opens.values():
            spec, tp = one.spec, one.spec.tp_size
            reach = spec.mask & self._avail
            bundles = reach.bit_count() if tp == 1 else 0
            if tp > 1:
                whole = [mask for mask in spec.masks if mask & ~reach == 0]
                bundles, reach = len(whole), _union(whole)
            useful = math.ceil(one.remaining / (spec.slots_per_bundle or 1))
            one.most = min(bundles, useful)
            weight = one.pipeline.weight * one.remaining * tp
            claims.append(due.Claim(one.pipeline.pipeline_id, weight, reach, float(one.most * tp)))
        for pipeline_id, gpus in due.shares(claims).items():
            self._opens[pipeline_id].due = gpus / self._opens[pipeline_id].spec.tp_size

    # Vacant and yielded GPUs

    def _keep_promises(self) -> None:
        """What was shrunk for somebody goes to it if it can still use it; whoever has nothing comes before."""
        if any(one.count == 0 and one.most for one in self._opens.values()):
            return
        for bundle in self._shares.promised:
            one = self._opens.get(bundle.pipeline)
            if one is None or one.count >= one.most or one.taken >> bundle.rank & 1:
                continue
            if one.spec.masks[bundle.rank] & ~self._vacant == 0:
                self._give(one, bundle.rank)

    def _fill(self) -> None:
        """No GPU stays idle while an open pipeline can use it; whoever is furthest below its due chooses first."""
        if len({one.spec.mask & self._avail for one in self._opens.values()}) > 1:
            self._seat_one_each()
        queue = [(one.order(), one.pipeline.pipeline_id) for one in self._opens.values() if one.count < one.most]
        heapq.heapify(queue)
        while queue:
            _, pipeline_id = heapq.heappop(queue)
            one = self._opens[pipeline_id]
            rank = self._choose(one, self._vacant)
            if rank is None and self._yielded and self._still_wants(one, TURN, one.pipeline.expand_s):
                rank = self._choose(one, self._vacant | self._yielded)
            if rank is None:
                continue
            self._give(one, rank)
            if one.count < one.most:
                heapq.heappush(queue, (one.order(), pipeline_id))

    def _seat_one_each(self) -> None:
        """With unequal maps: as many as possible of those that have nothing get one, by making room for one another."""
        among = self._vacant | self._yielded
        hungry = sorted((one for one in self._opens.values() if one.count == 0 and one.most), key=_Open.order)
        seats: dict[PipelineId, int] = {}
        for one in hungry:
            self._seat(one, among, seats, set())
        for pipeline_id, rank in seats.items():
            self._give(self._opens[pipeline_id], rank)

    def _seat(self, one: _Open, among: int, seats: dict[PipelineId, int], tried: set[int]) -> bool:
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
                seats[one.pipeline.pipeline_id] = rank
                return True
        return False

    def _by_contention(self, one: _Open, among: int) -> list[int]:
        maps = [other.spec.mask for other in self._opens.values() if other is not one]
        ranks = [rank for rank, mask in enumerate(one.spec.masks) if mask & ~among == 0 and not one.taken >> rank & 1]

        def wanted(rank: int) -> tuple[bool, bool, int, int]:
            mask = one.spec.masks[rank]
            return (mask & ~self._room.free != 0, not mask & one.own, sum(bool(m & mask) for m in maps), rank)

        return sorted(ranks, key=wanted)

    def _choose(self, one: _Open, among: int) -> int | None:
        """A rank that it does not have and whose GPUs are all among these: on its own training GPUs if possible, then
        where the fewest others could go."""
        reach = one.spec.mask & among
        if not reach:
            return None
        for part in (
            reach & self._room.free & one.own,
            reach & one.own,
            self._least_wanted(one, reach & self._room.free),
            reach,
        ):
            if part and (rank := self._first_rank(one, part, among)) is not None:
                return rank
        return None

    def _least_wanted(self, one: _Open, reach: int) -> int:
        """Of these GPUs, those that no narrower open pipeline could use and on which nobody else trains soon."""
        if not reach:
            return 0
        best = reach
        for other in self._rivals(one):
            spared = best & ~other
            if spared:
                best = spared
        return best

    def _rivals(self, one: _Open) -> Iterator[int]:
        """Masks to stay away from, the most important first: maps that are narrower, then GPUs others train on."""
        if self._narrow is None:
            everything = self._avail
            maps = {other.spec.mask & everything for other in self._opens.values() if other.count < other.most}
            self._narrow = sorted(
                (mask for mask in maps if mask != everything), key=lambda mask: (mask.bit_count(), mask)
            )
            ends = sorted(self._opens.values(), key=lambda other: (other.remaining, other.pipeline.pipeline_id))
            self._soon = [other.own for other in ends if other.own][:SOON]
        mine = one.spec.mask & self._avail
        for mask in self._narrow:
            if mask != mine and mask.bit_count() < mine.bit_count():
                yield mask
        for mask in self._soon:
            if mask != one.own:
                yield mask

    _narrow: list[int] | None = None
    _soon: list[int] = []  # noqa: RUF012 - set with _narrow

    def _first_rank(self, one: _Open, part: int, among: int) -> int | None:
        spec = one.spec
        while part:
            low = part & -part
            rank = spec.rank_at[low.bit_length() - 1]
            mask = spec.masks[rank]
            if mask & ~among == 0 and not one.taken >> rank & 1:
                return rank
            part &= ~mask
        return None

    def _give(self, one: _Open, rank: int) -> None:
        """That rank is to be expanded; whatever is still on its GPUs goes."""
        mask = one.spec.masks[rank]
        for gpu in gpus_of(mask & self._yielded & ~self._vacant):
            lease = self._yields[gpu]
            if lease.bundle not in self._shrinks:
                self._shrinks[lease.bundle] = (
                    f"{lease.bundle.pipeline} has nothing left to do, {one.pipeline.pipeline_id} has"
                )
                self._vacant |= lease.mask & self._avail
                self._yielded &= ~lease.mask
        self._vacant &= ~mask
        one.count += 1
        one.taken |= 1 << rank
        self._expands.append((Bundle(one.pipeline.pipeline_id, GENERATION_CLUSTER, rank), mask))

    # Between busy pipelines

    def _move(self) -> None:
        """Calmly: to one that has nothing, or is a whole bundle short, from one that has more than its due."""
        queue = [(one.order(), one.pipeline.pipeline_id) for one in self._opens.values() if self._is_short(one)]
        heapq.heapify(queue)
        donors = self._donors()
        while queue:
            _, pipeline_id = heapq.heappop(queue)
            one = self._opens[pipeline_id]
            found = self._find_move(one, donors)
            if found is None:
                continue
            rank, leases = found
            self._take(one, rank, leases)
            for each in (one, *(self._opens[lease.bundle.pipeline] for lease in leases)):
                if self._is_short(each):
                    heapq.heappush(queue, (each.order(), each.pipeline.pipeline_id))

    def _is_short(self, one: _Open) -> bool:
        if one.count >= one.most:
            return False
        return one.count == 0 or one.lacks >= 1.0

    def _donors(self) -> list[_Open]:
        """Those furthest from their end first: the others are nearly done."""
        found = [one for one in self._opens.values() if one.kept]
        for one in found:
            one.kept = dict(sorted(one.kept.items()))
        return sorted(found, key=lambda one: (-one.remaining / max(1, one.count), one.pipeline.pipeline_id))

    def _may_give(self, donor: _Open, receiver: _Open, count: int = 1) -> bool:
        if donor is receiver or len(donor.kept) < count:
            return False
        if receiver.count == 0:
            return donor.count - count >= 1
        return donor.count - count >= 1 and donor.count - count + 1 > donor.due

    def _find_move(self, one: _Open, donors: list[_Open]) -> tuple[int, list[Lease]] | None:
        """From one that keeps its due, else from one that has more than its due, else from anybody who may give."""
        for least in (1.0, 2 * TINY, -math.inf):
            for donor in donors:
                if donor.count - donor.due < least - TINY or not self._may_give(donor, one):
                    continue
                if self._outlasts(one, donor) and (found := self._best_of(donor, one)) is not None:
                    return found
        return self._find_composed_move(one)

    def _best_of(self, donor: _Open, one: _Open) -> tuple[int, list[Lease]] | None:
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

    def _as_mine(self, one: _Open, lease: Lease) -> int | None:
        """The rank of its own that has exactly the GPUs of that lease."""
        if lease.mask & ~(one.spec.mask & self._avail):
            return None
        mine = one.spec.rank_at[(lease.mask & -lease.mask).bit_length() - 1]
        return mine if one.spec.masks[mine] == lease.mask and not one.taken >> mine & 1 else None

    def _find_composed_move(self, one: _Open) -> tuple[int, list[Lease]] | None:
        """A bundle that is not exactly somebody else's: parts of it may be vacant, or several must give way."""
        tp = one.spec.tp_size
        if all(other.spec.tp_size == tp for other in self._opens.values() if other is not one) and tp == 1:
            return None
        at = {
            gpu: lease for other in self._opens.values() for lease in other.kept.values() for gpu in gpus_of(lease.mask)
        }
        best: tuple[tuple[int, int], int, list[Lease]] | None = None
        for rank, mask in enumerate(one.spec.masks):
            if mask & ~self._avail or one.taken >> rank & 1:
                continue
            blocked = gpus_of(mask & ~self._vacant)
            if not all(gpu in at for gpu in blocked):
                continue
            leases = list({at[gpu].bundle: at[gpu] for gpu in blocked}.values())
            wanted: dict[PipelineId, int] = {}
            for lease in leases:
                wanted[lease.bundle.pipeline] = wanted.get(lease.bundle.pipeline, 0) + 1
            if all(self._may_give(self._opens[name], one, count) for name, count in wanted.items()):
                key = (len(leases), rank)
                if best is None or key < best[0]:
                    best = (key, rank, leases)
        return None if best is None else (best[1], best[2])

    def _outlasts(self, one: _Open, donor: _Open) -> bool:
        """What remains must need the bundle for longer than the switch takes."""
        shrink, expand = donor.pipeline.shrink_s, one.pipeline.expand_s
        return shrink is None or expand is None or self._still_wants(one, WORTH_IT, shrink + expand)

    def _still_wants(self, one: _Open, times: float, switch_s: float | None) -> bool:
        """Whether it will need one more bundle after so many switches, at its present rate; until that can be told, it
        will."""
        if switch_s is None or one.rate is None or one.count == 0:
            return True
        left = one.remaining - one.rate * one.count * times * switch_s
        return left > one.count * (one.spec.slots_per_bundle or 1)

    def _take(self, one: _Open, rank: int, leases: Iterable[Lease], why: str = "") -> None:
        receiver = one.pipeline.pipeline_id
        for lease in leases:
            donor = self._opens[lease.bundle.pipeline]
            mine, theirs = f"{one.count} of {one.due:.1f}", f"{donor.count} of {donor.due:.1f}"
            told = why or f"{receiver} has {mine} due bundles, {donor.pipeline.pipeline_id} has {theirs}"
            self._shrinks[lease.bundle] = told
            del donor.kept[lease.bundle.rank]
            donor.count -= 1
            self._vacant |= lease.mask & self._avail
        mask = one.spec.masks[rank]
        self._vacant &= ~mask
        one.count += 1
        one.taken |= 1 << rank
        self._expands.append((Bundle(receiver, GENERATION_CLUSTER, rank), mask))

    # Turns

    def _take_turns(self) -> None:
        """Somebody has nothing, and nobody can spare what it needs: what has been held longest moves on."""
        waiting = sorted(
            (one for one in self._opens.values() if one.count == 0 and one.most > 0),
            key=lambda one: (one.waiting_since, one.pipeline.pipeline_id),
        )
        if not waiting:
            return
        at = {gpu: lease for one in self._opens.values() for lease in one.kept.values() for gpu in gpus_of(lease.mask)}
        for one in waiting:
            for _, rank, leases in self._reachable(one, at):
                over = max(lease.held_since + self._turn_s(lease, one) for lease in leases)
                if self._now >= over:
                    waited = self._now - one.waiting_since
                    self._take(one, rank, leases, f"{one.pipeline.pipeline_id} has waited {waited:.1f} s for a turn")
                    for lease in leases:
                        for gpu in gpus_of(lease.mask):
                            del at[gpu]
                    break
                self._recheck = min(self._recheck, over)

    def _reachable(self, one: _Open, at: Mapping[Gpu, Lease]) -> list[tuple[float, int, list[Lease]]]:
        """Its bundles that others would have to leave, and whom: the longest-held first."""
        found = []
        for rank in {one.spec.rank_at[gpu] for gpu in at if gpu in one.spec.rank_at}:
            mask = one.spec.masks[rank]
            blocked = gpus_of(mask & ~self._vacant)
            if mask & ~self._avail or one.taken >> rank & 1 or not all(gpu in at for gpu in blocked):
                continue
            leases = list({at[gpu].bundle: at[gpu] for gpu in blocked}.values())
            if leases:
                found.append((max(lease.held_since for lease in leases), rank, leases))
        return sorted(found, key=lambda item: item[:2])

    def _turn_s(self, lease: Lease, one: _Open) -> float:
        return max(self._shares.min_turn_s, TURN * self._switch_s(lease, one))

    def _switch_s(self, lease: Lease, one: _Open) -> float:
        donor = self._opens[lease.bundle.pipeline].pipeline
        return (donor.shrink_s or 0.0) + (one.pipeline.expand_s or 0.0)

    def _explain_waiting(self, one: _Open) -> None:
        pipeline_id = one.pipeline.pipeline_id
        for request in self._shares.requests:
            if request.pipeline == pipeline_id and request.priority is Priority.GENERATION:
                told = "no bundle that it can use is free" if one.most else "all GPUs of its map are in other hands"
                blocked = one.spec.mask & (self._room.fixed | self._room.frozen)
                if blocked:
                    told += f"; {holders(self._shares, blocked)} holds GPU {listed(blocked)}"
                self._reasons[f"#{request.seq}"] = told


SOON = 4  # of the pipelines nearest to their end, whose training GPUs others are kept off


def _union(masks: Iterable[int]) -> int:
    whole = 0
    for mask in masks:
        whole |= mask
    return whole

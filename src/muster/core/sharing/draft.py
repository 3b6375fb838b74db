"""What is known and decided while a plan is made? Open pipelines with their dues, what is vacant, and what is given."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from muster.core.sharing import due
from muster.core.sharing.fixed import FixedRequests
from muster.core.sharing.hands import Hand, Hands, places
from muster.core.sharing.room import room_of
from muster.types.sharing import (
    GENERATION_CLUSTER,
    WORKERS,
    Bundle,
    ClusterSpec,
    Crew,
    Lease,
    LeaseState,
    Pipeline,
    PipelineId,
    Priority,
    Shares,
    WorkerLease,
    gpus_of,
)

TURN = 4.0  # a turn lasts at least so many times as long as a switch takes


@dataclass
class OpenPipeline:
    """A pipeline that wants generation bundles, or a training that wants workers above its minimum."""

    pipeline: Pipeline
    spec: ClusterSpec
    remaining: int
    waiting_since: float
    rate: float | None
    overdue: bool  # it has waited longer than a turn
    own: int  # GPUs on which it trains itself: nobody else will want them back before it is done here
    due: float = 0.0  # in bundles
    most: int = 0  # bundles that it can use
    count: int = 0  # bundles that it has or is given by this plan
    kept: dict[int, Lease] = field(default_factory=dict)  # rank → lease that may be taken away
    taken: int = 0  # mask of ranks, by rank number, that it has already
    crew: Crew | None = None  # of a training: it has its minimum, which is not spoken of here

    @property
    def name(self) -> PipelineId:
        return self.pipeline.pipeline_id

    @property
    def starves(self) -> bool:
        """It has nothing at all."""
        return self.count == 0 and self.crew is None

    @property
    def least(self) -> int:
        """What it keeps when it gives."""
        return 1 if self.crew is None else 0

    @property
    def lacks(self) -> float:
        return round(self.due - self.count, 9)  # equal shares are equal, however they were computed

    def order(self) -> tuple[bool, float, float, PipelineId]:
        """Whoever has nothing first, of those whoever has waited too long; then whoever is furthest below its due."""
        waits = self.waiting_since if self.overdue and self.starves else math.inf
        return (not self.starves, waits, -self.lacks, self.name)

    @property
    def loose(self) -> int:
        """Bundles that it cannot fill with work any more, once all that it has are at work."""
        if self.crew is not None or len(self.kept) < self.count:
            return 0
        return max(0, self.count - self.useful)

    @property
    def useful(self) -> int:
        """Bundles that it has work for."""
        return max(1, math.ceil(self.remaining / (self.spec.slots_per_bundle or 1)))

    def will_fill(self, bundles: int, after_s: float) -> bool:
        """Whether it will have work for so many bundles then, at its present rate; until that can be told, it will."""
        if self.rate is None or self.count == 0:
            return True
        left = self.remaining - self.rate * self.count * after_s
        return left > (bundles - 1) * (self.spec.slots_per_bundle or 1)


class Draft:
    """It never touches what it was given."""

    def __init__(self, shares: Shares, now: float) -> None:
        self.shares, self.now = shares, now
        self.room = room = room_of(shares)
        self.hands = Hands(shares)
        self.fixed = FixedRequests(shares, room, self.hands, now)
        self.shrinks = self.fixed.shrinks
        self.expands: list[tuple[Bundle, int]] = []
        self.avail = shares.pool.mask & ~(room.lost | room.fixed | room.frozen | self.fixed.promised)
        self.opens = _open_pipelines(shares, now)
        self._yields: dict[int, Lease] = {}  # GPU → lease of a holder that has nothing left to do
        self._workers: dict[Bundle, WorkerLease] = {}  # those of them, and of what is open, that are trainings'
        self._sort_generating()
        self.hands.asked_for = self._wide_bundles()
        for hand in self.hands:
            self._sort_workers(hand)
        self._set_dues()
        self.vacant = (room.free | room.draining) & self.avail
        self.yielded = _union(lease.mask for lease in self._yields.values()) & self.avail

    def _sort_generating(self) -> None:
        """Bundles that stay with an open pipeline, and those that a holder without demand yields."""
        for lease in self.room.generating:
            if lease.mask & self.fixed.promised:
                continue  # a fixed request takes it, now or as soon as it is granted
            one = self.opens.get(lease.bundle.pipeline)
            if one is None:
                if lease.state is LeaseState.HELD:
                    self._yields.update(dict.fromkeys(gpus_of(lease.mask), lease))
                continue
            one.count += 1
            one.taken |= 1 << lease.bundle.rank
            if lease.state is LeaseState.HELD:
                one.kept[lease.bundle.rank] = lease
        for bundle, lease in self.shares.leases.items():
            if lease.state is LeaseState.DRAINING and (one := self.opens.get(bundle.pipeline)) is not None:
                one.taken |= 1 << bundle.rank  # it cannot be woken before it is down

    def _wide_bundles(self) -> int:
        """For each pipeline that has nothing and needs several GPUs at once, one bundle that no minimum needs: which
        workers are a training's minimum is chosen around it."""
        asked = 0
        for one in self.opens.values():
            if one.starves and one.spec.tp_size > 1 and self.hands.by_training:
                fits = (
                    m for m in one.spec.masks if not m & ~self.avail and self.hands.in_the_way(asked | m) is not None
                )
                asked |= next(fits, 0)
        return asked

    def _sort_workers(self, hand: Hand) -> None:
        """A training's minimum stays with it; up to what it wants it has a claim like others; what fills is yielded."""
        crew = hand.crew
        if not crew.lends:
            self.avail &= ~_union(hand.held)
            return
        spec = places(self.shares.pool, crew.gpus_each)
        known = [*hand.held, *(seat.mask for seat in hand.given)]
        where = {mask: rank for mask in known if (rank := spec.rank_of(mask)) is not None}
        ordered = self.hands.protected_first(hand)
        ordered.sort(key=lambda lease: lease.mask in where)  # what fits nowhere else has to stay
        firm, lent = min(crew.min, len(ordered)), min(crew.wanted, len(ordered))
        self.avail &= ~_union(lease.mask for lease in ordered[:firm])
        one = _open_crew(crew, spec)
        for lease in ordered:
            one.taken |= 1 << where[lease.mask] if lease.mask in where else 0
        for lease in ordered[firm:lent]:
            self._stands(one, lease, where)
        one.count += max(0, len(hand.given) - max(0, crew.min - len(ordered)))  # what was found for it beyond that
        for seat in hand.given:
            one.taken |= 1 << where[seat.mask] if seat.mask in where else 0
        for lease in ordered[lent:]:
            self._yields.update(dict.fromkeys(gpus_of(lease.mask), self._as_lease(crew, lease, where)))
        if crew.wanted > crew.min and not hand.lacks:
            self.opens[one.name] = one

    def _stands(self, one: OpenPipeline, lease: WorkerLease, where: dict[int, int]) -> None:
        assert one.crew is not None
        if lease.mask not in where:
            self.avail &= ~lease.mask
            return
        one.count += 1
        one.kept[where[lease.mask]] = self._as_lease(one.crew, lease, where)

    def _as_lease(self, crew: Crew, lease: WorkerLease, where: dict[int, int]) -> Lease:
        bundle = Bundle(crew.shown, WORKERS, where.get(lease.mask, -1))
        self._workers[bundle] = lease
        return Lease(bundle, lease.mask, lease.state, 0, Priority.GENERATION, lease.since, lease.held_since)

    def _set_dues(self) -> None:
        claims = []
        asked = wanted = 0.0
        for one in self.opens.values():
            spec, tp = one.spec, one.spec.tp_size
            reach = spec.mask & self.avail
            bundles = reach.bit_count() if tp == 1 else 0
            if tp > 1:
                whole = [mask for mask in spec.masks if mask & ~reach == 0]
                bundles, reach = len(whole), _union(whole)
            one.most = min(bundles, math.ceil(one.remaining / (spec.slots_per_bundle or 1)))
            weight = one.pipeline.weight * one.remaining * tp
            if one.crew is None:
                asked, wanted = asked + weight, wanted + one.pipeline.weight * one.most * tp
            claims.append(due.ShareClaim(one.name, weight, reach, float(one.most * tp)))
        if wanted:  # a GPU that a training wants counts as much as one that a pipeline wants, on the average
            claims = [
                claim if self.opens[claim.pipeline].crew is None else replace(claim, claim=claim.claim * asked / wanted)
                for claim in claims
            ]
        for name, gpus in due.shares(claims).items():
            self.opens[name].due = gpus / self.opens[name].spec.tp_size

    def give(self, one: OpenPipeline, rank: int) -> None:
        """Vacant or yielded GPUs; whatever is still on them goes."""
        self.clear(one.spec.masks[rank], one.name)
        self._expand(one, rank)

    def clear(self, mask: int, name: str) -> None:
        """What holders that have nothing left to do still have of these GPUs goes, for somebody of that name."""
        for gpu in gpus_of(mask & self.yielded & ~self.vacant):
            lease = self._yields[gpu]
            if lease.mask & self.yielded:
                why = "only fills" if lease.bundle.cluster == WORKERS else "has nothing left to do"
                self._end(lease, f"{lease.bundle.pipeline} {why}, {name} has")
                self.yielded &= ~lease.mask

    def left_over(self) -> int:
        """GPUs of pipelines that have nothing left to do, and that nobody wants."""
        return _union(lease.mask for lease in self._yields.values() if lease.bundle.cluster != WORKERS) & self.yielded

    def left_since(self, gpu: int) -> float | None:
        """Since when its holder has had nothing to do there, at the latest."""
        lease = self._yields.get(gpu)
        return None if lease is None or lease.bundle.cluster == WORKERS else lease.since

    def take_slack(self, one: OpenPipeline, lease: Lease, why: str) -> None:
        """A bundle that its pipeline has no work for."""
        self._end(lease, why)
        del one.kept[lease.bundle.rank]
        one.count -= 1

    def take(self, one: OpenPipeline, rank: int, leases: Iterable[Lease], why: str = "") -> None:
        """From other open pipelines, and what else is on its GPUs from those that have nothing left to do."""
        self.clear(one.spec.masks[rank], one.name)
        for lease in leases:
            donor = self.opens[lease.bundle.pipeline]
            mine, theirs = f"{one.count} of {one.due:.1f}", f"{donor.count} of {donor.due:.1f}"
            self._end(lease, why or f"{one.name} has {mine} due bundles, {donor.name} has {theirs}")
            del donor.kept[lease.bundle.rank]
            donor.count -= 1
        self._expand(one, rank)

    def _end(self, lease: Lease, why: str) -> None:
        if lease.bundle.cluster == WORKERS:
            self.hands.take(self._workers[lease.bundle], why)
        else:
            self.shrinks[lease.bundle] = why
        self.vacant |= lease.mask & self.avail

    def _expand(self, one: OpenPipeline, rank: int) -> None:
        mask = one.spec.masks[rank]
        self.vacant &= ~mask
        one.count += 1
        one.taken |= 1 << rank
        self.expands.append((Bundle(one.name, GENERATION_CLUSTER if one.crew is None else WORKERS, rank), mask))


def _open_pipelines(shares: Shares, now: float) -> dict[PipelineId, OpenPipeline]:
    found = {}
    for name, rollout in shares.rollouts.items():
        pipeline = shares.pipelines[name]
        if not pipeline.admitted or not pipeline.movable or rollout.remaining <= 0:
            continue
        since = rollout.opened_at if rollout.waiting_since is None else rollout.waiting_since
        overdue = rollout.waiting_since is not None and now - since > shares.min_turn_s
        own = _union(spec.mask for spec in pipeline.fixed)
        found[name] = OpenPipeline(pipeline, pipeline.infer, rollout.remaining, since, rollout.rate, overdue, own)
    return found


def _open_crew(crew: Crew, spec: ClusterSpec) -> OpenPipeline:
    """What it asks for above its minimum, and never comes to the end of."""
    alike = Pipeline(
        crew.shown, {GENERATION_CLUSTER: spec}, crew.weight, True, shrink_s=crew.vacate_s, expand_s=crew.return_s
    )
    return OpenPipeline(alike, spec, crew.wanted - crew.min, crew.asked_at, None, False, crew.parked, crew=crew)


def _union(masks: Iterable[int]) -> int:
    whole = 0
    for mask in masks:
        whole |= mask
    return whole

"""What is known and decided while a plan is made? Open pipelines with their dues, what is vacant, and what is given."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from muster.core.sharing import due
from muster.core.sharing.fixed import FixedRequests
from muster.core.sharing.room import room_of
from muster.types.sharing import (
    GENERATION_CLUSTER,
    Bundle,
    ClusterSpec,
    Lease,
    LeaseState,
    Pipeline,
    PipelineId,
    Shares,
    gpus_of,
)

TURN = 4.0  # a turn lasts at least so many times as long as a switch takes


@dataclass
class OpenPipeline:
    """A pipeline that wants generation bundles."""

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

    @property
    def name(self) -> PipelineId:
        return self.pipeline.pipeline_id

    @property
    def lacks(self) -> float:
        return round(self.due - self.count, 9)  # equal shares are equal, however they were computed

    def order(self) -> tuple[bool, float, float, PipelineId]:
        """Whoever has nothing first, of those whoever has waited too long; then whoever is furthest below its due."""
        waits = self.waiting_since if self.overdue and self.count == 0 else math.inf
        return (self.count > 0, waits, -self.lacks, self.name)

    def still_wants(self, times: float, switch_s: float | None) -> bool:
        """Whether it will need one more bundle after so many switches, at its present rate; until that can be told, it
        will."""
        if switch_s is None or self.rate is None or self.count == 0:
            return True
        left = self.remaining - self.rate * self.count * times * switch_s
        return left > self.count * (self.spec.slots_per_bundle or 1)


class Draft:
    """It never touches what it was given."""

    def __init__(self, shares: Shares, now: float) -> None:
        self.shares, self.now = shares, now
        self.room = room = room_of(shares)
        self.fixed = FixedRequests(shares, room, now)
        self.shrinks = self.fixed.shrinks
        self.expands: list[tuple[Bundle, int]] = []
        self.avail = shares.pool.mask & ~(room.lost | room.fixed | room.frozen | self.fixed.promised)
        self.opens = _open_pipelines(shares, now)
        self._yields: dict[int, Lease] = {}  # GPU → lease of a holder that has nothing left to do
        self._sort_generating()
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

    def _set_dues(self) -> None:
        claims = []
        for one in self.opens.values():
            spec, tp = one.spec, one.spec.tp_size
            reach = spec.mask & self.avail
            bundles = reach.bit_count() if tp == 1 else 0
            if tp > 1:
                whole = [mask for mask in spec.masks if mask & ~reach == 0]
                bundles, reach = len(whole), _union(whole)
            one.most = min(bundles, math.ceil(one.remaining / (spec.slots_per_bundle or 1)))
            weight = one.pipeline.weight * one.remaining * tp
            claims.append(due.ShareClaim(one.name, weight, reach, float(one.most * tp)))
        for name, gpus in due.shares(claims).items():
            self.opens[name].due = gpus / self.opens[name].spec.tp_size

    def give(self, one: OpenPipeline, rank: int) -> None:
        """Vacant or yielded GPUs; whatever is still on them goes."""
        for gpu in gpus_of(one.spec.masks[rank] & self.yielded & ~self.vacant):
            lease = self._yields[gpu]
            if lease.bundle not in self.shrinks:
                self.shrinks[lease.bundle] = f"{lease.bundle.pipeline} has nothing left to do, {one.name} has"
                self.vacant |= lease.mask & self.avail
                self.yielded &= ~lease.mask
        self._expand(one, rank)

    def take(self, one: OpenPipeline, rank: int, leases: Iterable[Lease], why: str = "") -> None:
        """From other open pipelines."""
        for lease in leases:
            donor = self.opens[lease.bundle.pipeline]
            mine, theirs = f"{one.count} of {one.due:.1f}", f"{donor.count} of {donor.due:.1f}"
            self.shrinks[lease.bundle] = why or f"{one.name} has {mine} due bundles, {donor.name} has {theirs}"
            del donor.kept[lease.bundle.rank]
            donor.count -= 1
            self.vacant |= lease.mask & self.avail
        self._expand(one, rank)

    def _expand(self, one: OpenPipeline, rank: int) -> None:
        mask = one.spec.masks[rank]
        self.vacant &= ~mask
        one.count += 1
        one.taken |= 1 << rank
        self.expands.append((Bundle(one.name, GENERATION_CLUSTER, rank), mask))


def _open_pipelines(shares: Shares, now: float) -> dict[PipelineId, OpenPipeline]:
    found = {}
    for name, rollout in shares.rollouts.items():
        pipeline = shares.pipelines[name]
        if not pipeline.admitted or not pipeline.movable or rollout.remaining <= 0:
            continue
        since = rollout.opened_at if rollout.waiting_since is None else rollout.waiting_since
        overdue = rollout.waiting_since is not None and now - since > shares.min_turn_s
        own = _union(spec.mask for cluster, spec in pipeline.clusters.items() if cluster != GENERATION_CLUSTER)
        found[name] = OpenPipeline(pipeline, pipeline.infer, rollout.remaining, since, rollout.rate, overdue, own)
    return found


def _union(masks: Iterable[int]) -> int:
    whole = 0
    for mask in masks:
        whole |= mask
    return whole

"""Which whole-cluster requests can be granted now, and what do the others wait for?

By priority and age. One that cannot be granted moves nothing, and reserves its GPUs: against younger ones of equal or
lower priority at once, against all when it has waited long. Not against a pipeline whose own fixed lease it waits for,
directly or by way of others: that one has to get on first.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from muster.core.sharing.plans import ClusterGrant
from muster.core.sharing.room import Room, holders, listed
from muster.types.sharing import Bundle, LeaseState, Pipeline, PipelineId, Priority, Request, Shares


@dataclass(frozen=True)
class _Waiting:
    """A fixed request that cannot be granted now, and reserves its GPUs."""

    request: Request
    need: int
    waits_for: frozenset[PipelineId]


class FixedRequests:
    """The decision, as it is made: `promised` is the mask of all that is granted."""

    def __init__(self, shares: Shares, room: Room, now: float) -> None:
        self._shares, self._room, self._now = shares, room, now
        self.grants: list[ClusterGrant] = []
        self.shrinks: dict[Bundle, str] = {}
        self.reasons: dict[str, str] = {}
        self.recheck = math.inf
        self.promised = 0
        self._decide()

    def _decide(self) -> None:
        waiting: list[_Waiting] = []
        for request in self._in_order():
            pipeline = self._shares.pipelines[request.pipeline]
            need = pipeline.clusters[request.cluster].mask
            obstacle = self._obstacle(request, need, waiting)
            if obstacle:
                self.reasons[f"#{request.seq}"] = obstacle
                waiting.append(_Waiting(request, need, self._waits_for(request, need, waiting)))
                if not self._is_old(request):
                    self.recheck = min(self.recheck, request.since + self._shares.reserve_after_s)
                continue
            self._grant(request, pipeline, need)

    def _in_order(self) -> list[Request]:
        """Those that have waited long come first; then priority, then age."""
        wanted = [
            request
            for request in self._shares.requests
            if request.priority is not Priority.GENERATION
            and self._shares.pipelines[request.pipeline].admitted
            and not self._shares.pipelines[request.pipeline].quarantined
        ]
        return sorted(
            wanted,
            key=lambda one: (0, 0, one.seq) if self._is_old(one) else (1, int(one.priority), one.seq),
        )

    def _is_old(self, request: Request) -> bool:
        return self._now - request.since >= self._shares.reserve_after_s

    def _obstacle(self, request: Request, need: int, waiting: list[_Waiting]) -> str:
        """Why it cannot be granted now; empty if it can."""
        if self._shares.pipelines[request.pipeline].detached_since is not None:
            return f"{request.pipeline} is detached: it waits for its hooks"
        if request.absent:
            return "its caller has not asked again since a restart"
        if need & self._room.lost:
            return f"GPU {listed(need & self._room.lost)} is lost"
        if blocked := need & (self._room.fixed | self._room.frozen):
            return f"waits for {holders(self._shares, blocked)}"
        if need & self.promised:
            return f"GPU {listed(need & self.promised)} goes to an earlier request"
        for other in self._reserving(request, need, waiting):
            who = f"{other.request.pipeline}/{other.request.cluster}"
            return f"GPU {listed(need & other.need)} is reserved for {who}, which waits longer"
        return ""

    def _reserving(self, request: Request, need: int, waiting: list[_Waiting]) -> Iterator[_Waiting]:
        """Waiting requests that keep these GPUs from it: not those that wait for it themselves."""
        for other in waiting:
            before = other.request.seq < request.seq and other.request.priority <= request.priority
            if (
                need & other.need
                and (before or self._is_old(other.request))
                and request.pipeline not in other.waits_for
            ):
                yield other

    def _waits_for(self, request: Request, need: int, waiting: list[_Waiting]) -> frozenset[PipelineId]:
        """Whose fixed leases stand between this request and its GPUs, also by way of earlier requests."""
        holders = {
            bundle.pipeline
            for bundle, lease in self._shares.leases.items()
            if need & lease.mask and lease.priority is not Priority.GENERATION
        }
        return frozenset(holders).union(*(other.waits_for for other in self._reserving(request, need, waiting)))

    def _grant(self, request: Request, pipeline: Pipeline, need: int) -> None:
        self.promised |= need
        spec = pipeline.clusters[request.cluster]
        bundles = tuple(Bundle(request.pipeline, request.cluster, rank) for rank in range(len(spec.bundles)))
        ready = need & ~self._room.free == 0
        self.grants.append(ClusterGrant(request.seq, bundles, need, ready))
        if ready:
            return
        for lease in self._room.generating:
            if lease.mask & need and lease.state is LeaseState.HELD:
                self.shrinks[lease.bundle] = f"{request.pipeline}/{request.cluster} gets its GPUs"
        self.reasons[f"#{request.seq}"] = f"GPU {listed(need & ~self._room.free)} is being vacated for it"

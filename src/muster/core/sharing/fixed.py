"""Which claims that are never taken back can be met now, and what do the others wait for?

These are requests of pipelines for whole clusters, and what trainings lack of their minima: by priority, then age. One
that cannot be met moves nothing, and reserves its GPUs: against younger ones of equal or lower priority at once,
against all when it has waited long. Not against a pipeline whose own fixed lease it waits for, directly or by way of
others: that one has to get on first.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from muster.core.sharing.hands import Hand, Hands, by_training, fitting, places, seat_of, trained_on
from muster.core.sharing.plans import ClusterGrant, Seat
from muster.core.sharing.room import Room, holders, listed
from muster.types.sharing import (
    Bundle,
    Crew,
    LeaseState,
    Pipeline,
    PipelineId,
    Priority,
    Request,
    Shares,
    WorkerLease,
    gpus_of,
)


@dataclass(frozen=True)
class _Claim:
    """Somebody who asks for GPUs that will be its own."""

    who: Request | Crew
    level: tuple[int, int]  # lower comes first
    since: float
    seq: int
    old: bool  # it has waited long
    pipeline: PipelineId | None

    def comes_before(self, other: _Claim) -> bool:
        return (self.since, self.seq) < (other.since, other.seq) and self.level <= other.level

    def __str__(self) -> str:
        return self.who.shown if isinstance(self.who, Crew) else f"{self.who.pipeline}/{self.who.cluster}"


@dataclass(frozen=True)
class _Waiting:
    """A claim that cannot be met now, and reserves its GPUs."""

    claim: _Claim
    need: int
    waits_for: frozenset[PipelineId]
    for_trainings: bool = False  # what it lacks is other trainings': stages, which are short, do not delay it


class FixedRequests:
    """The decision, as it is made: `promised` is the mask of all that is granted."""

    def __init__(self, shares: Shares, room: Room, hands: Hands, now: float) -> None:
        self._shares, self._room, self._hands, self._now = shares, room, hands, now
        self.grants: list[ClusterGrant] = []
        self.seats: list[Seat] = []
        self.shrinks: dict[Bundle, str] = {}
        self.reasons: dict[str, str] = {}
        self.recheck = math.inf
        self.promised = 0
        self.reserved = 0  # what claims wait for that cannot be met
        self.first_waiting: Crew | None = None  # the first training that waits for GPUs, whichever they are
        self._decide()

    def _decide(self) -> None:
        waiting: list[_Waiting] = []
        for claim in self._in_order():
            met = self._seat(claim, waiting) if isinstance(claim.who, Crew) else self._meet(claim, waiting)
            if met is None:
                continue
            waiting.append(met)
            self.reserved |= met.need
            if not claim.old:
                self.recheck = min(self.recheck, claim.since + self._shares.reserve_after_s)

    def _in_order(self) -> list[_Claim]:
        """Those that have waited long come first; then priority, then age."""
        shares = self._shares
        found = [
            _Claim(one, (0, int(one.priority)), one.since, one.seq, self._is_old(one.since), one.pipeline)
            for one in shares.requests
            if one.priority is not Priority.GENERATION
            and shares.pipelines[one.pipeline].admitted
            and not shares.pipelines[one.pipeline].quarantined
        ]
        for hand in self._hands:
            crew = hand.crew
            if hand.lacks:
                old = self._is_old(crew.asked_at)
                found.append(_Claim(crew, (-crew.priority, 0), crew.asked_at, 0, old, None))
        return sorted(found, key=_order)

    def _is_old(self, since: float) -> bool:
        return self._now - since >= self._shares.reserve_after_s

    # Pipelines

    def _meet(self, claim: _Claim, waiting: list[_Waiting]) -> _Waiting | None:
        request = claim.who
        assert isinstance(request, Request)
        pipeline = self._shares.pipelines[request.pipeline]
        need = pipeline.clusters[request.cluster].mask
        if obstacle := self._obstacle(claim, request, need, waiting):
            self.reasons[f"#{request.seq}"] = obstacle
            return _Waiting(claim, need, self._waits_for(claim, need, waiting))
        self._grant(request, pipeline, need)
        return None

    def _obstacle(self, claim: _Claim, request: Request, need: int, waiting: list[_Waiting]) -> str:
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
        for other in self._reserving(claim, need, waiting):
            return f"GPU {listed(need & other.need)} is reserved for {other.claim}, which waits longer"
        if self._hands.in_the_way(need) is None:
            moves = self._move_out(need, claim, waiting)
            return f"waits for {self._hands.keepers(need)}" + (", which moves to other GPUs" if moves else "")
        return ""

    def _move_out(self, need: int, claim: _Claim, waiting: list[_Waiting]) -> bool:
        """Trainings whose minima are in the way get places elsewhere, where there are any; when their workers have
        joined there, they can leave here."""
        usable = self._usable() & ~need
        for other in self._reserving(claim, usable, waiting):
            usable &= ~other.need
        there = {lease.training for gpu in gpus_of(need & self._room.working) if (lease := self._hands.at(gpu))}
        moved = False
        for uid in sorted(there):
            hand = self._hands.by_training[uid]
            here = [mask for mask in hand.held if mask & need]
            more = len(here) - (len(hand.held) - hand.crew.min)
            coming = sum(not hand.is_ready(mask) for mask in hand.held)
            if not hand.crew.lends or more <= 0:
                moved = moved or coming > 0
                continue
            usable &= ~self.promised  # what the one before it gets
            found = self._places(hand, more, usable & ~sum(hand.held))  # it has its own already
            room = self._room_to_move(hand, here, more, f"{claim} waits for it") if found is not None else 0
            self._give(hand, (found or [])[:room], f"{claim} waits for other GPUs of it")
            moved = moved or room > 0 or coming > 0
        return moved

    def _room_to_move(self, hand: Hand, here: list[int], more: int, why: str) -> int:
        """How many of these places it may have beside what it has. One that has all that it can use first leaves what
        is in the way and not of its minimum."""
        room = hand.crew.most - hand.count
        going = [one for one in reversed(self._hands.protected_first(hand)) if one.mask in here][: max(0, more - room)]
        while going and not hand.may_give([one.mask for one in going]):
            going.pop()
        for lease in going:
            self._hands.take(lease, why)
        return max(0, min(more, room + len(going)))

    def _reserving(self, claim: _Claim, need: int, waiting: Iterable[_Waiting]) -> Iterator[_Waiting]:
        """Waiting claims that keep these GPUs from it: not those that wait for it themselves."""
        for other in waiting:
            if other.for_trainings and claim.pipeline is not None:
                continue
            first = other.claim.comes_before(claim) or (other.claim.old and other.claim.level[0] <= claim.level[0])
            if need & other.need and first and (claim.pipeline is None or claim.pipeline not in other.waits_for):
                yield other

    def _waits_for(self, claim: _Claim, need: int, waiting: list[_Waiting]) -> frozenset[PipelineId]:
        """Whose fixed leases stand between this claim and its GPUs, also by way of earlier claims."""
        holders = {
            bundle.pipeline
            for bundle, lease in self._shares.leases.items()
            if need & lease.mask and lease.priority is not Priority.GENERATION
        }
        return frozenset(holders).union(*(other.waits_for for other in self._reserving(claim, need, waiting)))

    def _grant(self, request: Request, pipeline: Pipeline, need: int) -> None:
        self.promised |= need
        spec = pipeline.clusters[request.cluster]
        bundles = tuple(Bundle(request.pipeline, request.cluster, rank) for rank in range(len(spec.bundles)))
        ready = need & ~self._room.free == 0
        self.grants.append(ClusterGrant(request.seq, bundles, need, ready))
        if ready:
            return
        self._clear(need, f"{request.pipeline}/{request.cluster} gets its GPUs")
        self.reasons[f"#{request.seq}"] = f"GPU {listed(need & ~self._room.free)} is being vacated for it"

    def _clear(self, need: int, why: str) -> None:
        for lease in self._room.generating:
            if lease.mask & need and lease.state is LeaseState.HELD:
                self.shrinks[lease.bundle] = why
        for worker in self._hands.in_the_way(need) or ():
            self._hands.take(worker, why)

    # Trainings

    def _seat(self, claim: _Claim, waiting: list[_Waiting]) -> _Waiting | None:
        crew = claim.who
        assert isinstance(crew, Crew)
        hand = self._hands.by_training[crew.training]
        usable = self._usable()
        for other in self._reserving(claim, usable, waiting):
            usable &= ~other.need
        found = self._places(hand, hand.lacks, usable)
        if found is None:
            if self._fits_at_all(crew):
                self.first_waiting = self.first_waiting or crew
                return _Waiting(claim, usable, frozenset(), self._waits_for_trainings(hand))
            return None
        self._give(hand, found)
        return None

    def _give(self, hand: Hand, found: list[int], why: str = "") -> None:
        for mask in found:
            self._clear(mask, f"{hand.crew.shown} gets its minimum")
            self.promised |= mask
            seat = seat_of(self._shares.crews, hand.crew.training, mask, self._room.free, why)
            hand.given.append(seat)
            self.seats.append(seat)

    def _waits_for_trainings(self, hand: Hand) -> bool:
        """Whether it could not have its minimum if all stages of pipelines were over now."""
        kept = sum(
            one.crew.gpus_each * (min(one.crew.min, len(one.held)) if one.crew.lends else len(one.held))
            for one in self._hands
            if one is not hand
        )
        out = (self._room.lost | self._room.frozen).bit_count() + kept
        return self._shares.pool.gpus - out < hand.crew.min * hand.crew.gpus_each

    def _usable(self) -> int:
        room = self._room
        return self._shares.pool.mask & ~(room.lost | room.fixed | room.frozen | self.promised)

    def _places(self, hand: Hand, count: int, usable: int) -> list[int] | None:
        """As many places as are lacking: vacant ones first, then those that somebody has to leave for it."""
        spec = places(self._shares.pool, hand.crew.gpus_each)
        chosen: list[int] = []
        taken: dict[str, WorkerLease] = {}
        for among in self._by_cost(hand, usable):
            for mask in fitting(spec, among, chosen):
                if len(chosen) == count:
                    return chosen
                if self._may_take(mask, taken):
                    chosen.append(mask)
        if len(chosen) < count and not hand.crew.lends:
            chosen += _anywhere(usable & (self._room.free | self._room.draining), hand.crew.gpus_each, chosen)
        return chosen[:count] if len(chosen) >= count else None

    def _by_cost(self, hand: Hand, usable: int) -> Iterator[int]:
        room = self._room
        elsewhere = ~trained_on(self._shares)
        yield usable & room.free & hand.crew.parked
        yield usable & room.free & elsewhere
        yield usable & room.free
        yield usable & (room.free | room.draining)
        generating = 0
        for lease in room.generating:
            generating |= lease.mask
        yield usable & (room.free | room.draining | generating)
        yield usable

    def _may_take(self, mask: int, taken: dict[str, WorkerLease]) -> bool:
        """Whether workers on these GPUs may be taken, beside those that are to be."""
        here = [lease for gpu in gpus_of(mask & self._room.working) if (lease := self._hands.at(gpu)) is not None]
        all_of_them = taken | {lease.key: lease for lease in here}
        for uid, masks in by_training(all_of_them.values()).items():
            if here and not self._hands.by_training[uid].may_give(masks):
                return False
        taken |= all_of_them
        return True

    def _fits_at_all(self, crew: Crew) -> bool:
        room = self._shares.pool.gpus if not crew.lends else len(places(self._shares.pool, crew.gpus_each).gpus)
        return crew.min * crew.gpus_each <= room


def _order(claim: _Claim) -> tuple[bool, int, bool, int, float, int, float, str]:
    """Who was here before comes first; then by priority, and of one priority those that have waited long."""
    crew = claim.who if isinstance(claim.who, Crew) else None
    rank, stage = claim.level
    last = (crew.created, crew.name) if crew is not None else (0.0, "")
    return (not (crew and crew.admitted), rank, not claim.old, 0 if claim.old else stage, claim.since, claim.seq, *last)


def _anywhere(among: int, size: int, chosen: Iterable[int]) -> list[int]:
    """Wherever there is room, for those that are placed once and stay."""
    for mask in chosen:
        among &= ~mask
    left = gpus_of(among)
    return [sum(1 << gpu for gpu in left[at : at + size]) for at in range(0, len(left) - size + 1, size)]

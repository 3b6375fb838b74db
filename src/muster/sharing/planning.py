"""When is a pool planned upon, and what is done with a plan? One pass for all that happens in a turn of the loop.

A pass puts what the planner decides in place, answers those whom it grants something, and has hooks called. The plan
says when time alone changes the answer: there is no poll.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from muster.core.sharing import demand, leases, planner, workers
from muster.core.sharing.plans import Seat, SharePlan
from muster.errors import JournalUnusable, WouldDeadlock
from muster.sharing.pool_state import PoolState
from muster.types.sharing import WORKERS, PipelineId, Request, Shares, gpus_of

log = logging.getLogger("muster.sharing")

Planner = Callable[[Shares, float], SharePlan]

SHORTEST_RECHECK_S = 0.001  # a planner that asks for "now" must not keep the loop busy
AGAIN_S = 1.0  # before a pass that failed is made again


class Planning:
    def __init__(self, state: PoolState, planner_: Planner | None, reattach_timeout_s: float) -> None:
        self._state = state
        self._planner = planner_ or planner.plan
        self._reattach_timeout_s = reattach_timeout_s
        self._pass: asyncio.Handle | None = None
        self._recheck: asyncio.TimerHandle | None = None
        self._reattach: asyncio.TimerHandle | None = None
        state.changed = self.wake
        state.plan_now = self.now

    def start(self) -> None:
        if self._state.shares.pipelines:
            loop = asyncio.get_running_loop()
            self._reattach = loop.call_later(self._reattach_timeout_s, self._end_reattaching)

    def stop(self) -> None:
        for timer in (self._pass, self._recheck, self._reattach):
            if timer is not None:
                timer.cancel()
        self._pass = self._recheck = self._reattach = None

    def now(self) -> None:
        """Without waiting for what else happens in this turn of the loop."""
        if self._state.running:
            if self._pass is not None:
                self._pass.cancel()
            self._plan()

    def wake(self) -> None:
        if self._state.running and self._pass is None:
            self._pass = asyncio.get_running_loop().call_soon(self._plan)

    def _plan(self) -> None:
        self._pass = None
        if self._recheck is not None:
            self._recheck.cancel()
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._recheck = loop.call_later(AGAIN_S, self.wake)  # stands if what follows raises
        plan = self._planner(self._state.shares, now)
        try:
            self._apply(plan, now)
        except JournalUnusable as error:
            log.error("nothing is decided: %s", error.message)
            return
        self._recheck.cancel()
        self._recheck = None
        if plan.recheck_at is not None:
            self._recheck = loop.call_at(max(plan.recheck_at, now + SHORTEST_RECHECK_S), self.wake)

    def _apply(self, plan: SharePlan, now: float) -> None:
        state = self._state
        shares = state.shares
        shrinks = [bundle for bundle in plan.shrinks if self._may_move(bundle.pipeline)]
        shares = leases.draining(shares, shrinks, now, plan.reasons)
        shares = workers.leaving(shares, plan.leaves, now)
        freed = plan.leaves.keys() - shares.workers.keys()  # where nobody was yet: free, which this plan does not know
        granted = []
        for grant in plan.grants:
            request = leases.request_of(shares, grant.seq)
            if grant.ready and request is not None and grant.seq in state.waiters and self._may_move(request.pipeline):
                shares = leases.granted(shares, grant.seq, now)
                granted.append(request)
        expands = [one.bundle for one in plan.expands if one.ready and self._may_move(one.bundle.pipeline)]
        shares = leases.expanding(shares, expands, now, plan.reasons)
        seats = [one for one in plan.seats if one.ready]
        shares = workers.seated(shares, seats, now)
        promised = tuple(one.bundle for one in plan.expands if not one.ready)
        awaited = tuple((one.training, one.mask) for one in plan.seats if not one.ready)
        if (promised, awaited) != (shares.promised, shares.promised_seats):
            shares = replace(shares, promised=promised, promised_seats=awaited)
        state.commit(shares, planned=True)
        state.reasons = {one.seq: plan.reasons.get(f"#{one.seq}") or self._reason(one) for one in shares.requests}
        state.tell("shrinking", shrinks, plan.reasons)
        for request in granted:
            state.grant(request)
        state.tell("expanding", expands, plan.reasons)
        self._tell_of_trainings(plan, seats)
        for name in dict.fromkeys(bundle.pipeline for bundle in [*shrinks, *expands]):
            state.kick(name)
        for name in dict.fromkeys(request.pipeline for request in granted):
            self._break_deadlock(name)
        if freed:
            self.wake()

    def _tell_of_trainings(self, plan: SharePlan, seats: Sequence[Seat]) -> None:
        state = self._state
        for key, why in plan.leaves.items():
            if (lease := state.shares.workers.get(key)) is not None and lease.training in state.shares.crews:
                name, gpus = state.shares.crews[lease.training].shown, tuple(gpus_of(lease.mask))
                state.note("leaving", name, why, cluster=WORKERS, gpus=gpus)
        for seat in seats:
            name = state.shares.crews[seat.training].shown
            state.note("seated", name, seat.why, cluster=WORKERS, gpus=tuple(gpus_of(seat.mask)))
        if plan.standings != state.standings:
            changed = [uid for uid, one in plan.standings.items() if state.standings.get(uid) != one]
            state.standings = plan.standings
            for uid in changed:
                asyncio.get_running_loop().call_soon(state.workers_changed, uid)

    def _break_deadlock(self, name: PipelineId) -> None:
        """A grant can close a cycle too, if its pipeline waits for something else as well: that wait is refused."""
        state = self._state
        while (found := demand.deadlocked(state.shares, name)) is not None:
            request, loop = found
            state.commit(demand.withdrawn(state.shares, request.seq))
            state.waiters.refuse(request.seq, WouldDeadlock(f"would wait forever: {loop}"))
            state.note("refused", name, f"would wait forever: {loop}", cluster=request.cluster)

    def _reason(self, request: Request) -> str:
        """Why a request waits of which the planner says nothing."""
        there = self._state.shares.pipelines[request.pipeline]
        if there.detached_since is not None:
            return f"{request.pipeline} is detached: it waits for its hooks"
        if request.seq not in self._state.waiters:
            return "its caller has not asked again since a restart"
        return "its GPUs are being made ready"

    def _may_move(self, name: PipelineId) -> bool:
        there = self._state.shares.pipelines.get(name)
        return there is not None and there.movable

    def _end_reattaching(self) -> None:
        """Whoever has not come back by now does not count any more, nor do places that nobody took again."""
        state = self._state
        self._reattach = asyncio.get_running_loop().call_later(AGAIN_S, self._end_reattaching)  # if this raises
        for name, one in state.shares.pipelines.items():
            if one.detached_since is not None and not one.quarantined:
                state.quarantine(name, f"it did not attach within {self._reattach_timeout_s:g} s of a restart")
        shares = state.shares
        for request in shares.requests:
            if request.seq not in state.waiters:
                shares = demand.withdrawn(shares, request.seq)
                state.note("withdrawn", request.pipeline, "nobody asked again after a restart", cluster=request.cluster)
        state.commit(shares)
        self._reattach.cancel()
        self._reattach = None

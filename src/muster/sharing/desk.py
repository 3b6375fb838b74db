"""How is what was decided carried out? The state's one place: written, put in place, planned upon, acted upon.

The state is one value. Every change is computed by a pure function, goes to the journal, is put in place and asks for
a planning pass; the pass does the same with what the planner decides. Only then are hooks called and waiters
answered. Between two awaits nothing else runs, so there is no lock. `scheduler` adds what pipelines may ask for.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from muster.core.sharing import demand, leases
from muster.core.sharing.plans import Plan
from muster.errors import (
    JournalUnusable,
    PipelineQuarantined,
    SchedulerStopped,
    WouldDeadlock,
)
from muster.sharing import execution
from muster.sharing.hooks import PipelineHooks
from muster.sharing.journal import Journal
from muster.sharing.waiters import Waiters
from muster.types.sharing import (
    GENERATION_CLUSTER,
    Bundle,
    Gpu,
    Holder,
    Pending,
    PipelineId,
    Pool,
    Priority,
    ProgressReport,
    Request,
    Shares,
    SharingEvent,
    Snapshot,
    gpus_of,
)

log = logging.getLogger("muster.sharing")

Planner = Callable[[Shares, float], Plan]
OnEvent = Callable[[SharingEvent], None]

EVENTS_KEPT = 10_000
VACATED_POLL_S = 0.05
SHORTEST_RECHECK_S = 0.001  # a planner that asks for "now" must not keep the loop busy
AGAIN_S = 1.0  # before a pass that failed is made again


class Desk:
    """The state of a pool, and what is going on with it. Belongs to the event loop on which it was started."""

    def __init__(
        self,
        pool: Pool,
        journal: Path | str | None = None,
        hook_timeout_s: float = 120.0,
        min_turn_s: float = 2.0,
        *,
        reserve_after_s: float = 30.0,
        reattach_timeout_s: float = 60.0,
        vacated_poll_s: float = VACATED_POLL_S,
        planner: Planner | None = None,
        on_event: OnEvent | None = None,
    ) -> None:
        self._shares = Shares(pool, min_turn_s=min_turn_s, reserve_after_s=reserve_after_s)
        self._journal = None if journal is None else Journal(journal)
        self._limits = execution.Limits(hook_timeout_s, vacated_poll_s)
        self._reattach_timeout_s = reattach_timeout_s
        self._planner = planner or _default_planner
        self._on_event = on_event
        self._running = False
        self._waiters = Waiters()
        self._hooks: dict[PipelineId, PipelineHooks] = {}
        self._runners: dict[PipelineId, execution.Runner] = {}
        self._proving: dict[PipelineId, asyncio.Task[str]] = {}  # quarantined, and new hooks are being tried
        self._reasons: dict[int, str] = {}
        self._reports: dict[str, ProgressReport] = {}
        self._events: deque[SharingEvent] = deque(maxlen=EVENTS_KEPT)
        self._pass: asyncio.Handle | None = None
        self._recheck: asyncio.TimerHandle | None = None
        self._reattach: asyncio.TimerHandle | None = None

    # Life

    async def start(self) -> None:
        """Take up the journal's state. Pipelines in it are detached until they are registered again."""
        if self._running:
            return
        loop = asyncio.get_running_loop()
        now = loop.time()
        shares = self._shares
        if self._journal is not None:
            kept = self._journal.open(
                Shares(shares.pool, min_turn_s=shares.min_turn_s, reserve_after_s=shares.reserve_after_s)
            )
            shares = leases.shifted(kept.shares, now - kept.at)
            self._reasons = dict(kept.reasons or {})
            shares = leases.detached(shares, now, unsure=kept.may_lack_its_end)
            try:
                self._journal.rewrite(shares, now, self._reasons)
            except JournalUnusable:
                self._journal.close()
                raise
        else:
            shares = leases.detached(shares, now)
        self._shares, self._running = shares, True
        if shares.pipelines:
            self._reattach = loop.call_later(self._reattach_timeout_s, self._end_reattaching)
        self._note("started", "", f"{shares.pool.gpus} GPUs, {len(shares.pipelines)} pipelines from before")

    async def stop(self) -> None:
        """Waiters fail, hook calls end; leases, demand and places in the queue stay as they are."""
        if not self._running:
            return
        self._running = False
        for timer in (self._pass, self._recheck, self._reattach):
            if timer is not None:
                timer.cancel()
        self._pass = self._recheck = self._reattach = None
        self._waiters.fail_all(SchedulerStopped("the scheduler has stopped"))
        ending: list[asyncio.Task[Any]] = [*self._proving.values()]
        for proof in self._proving.values():
            proof.cancel()
        ending += [task for runner in self._runners.values() for task in runner.cancel()]
        if ending:
            await asyncio.wait(ending)
        self._runners.clear()
        self._hooks.clear()
        self._note("stopped", "", "")
        if self._journal is not None:
            try:
                self._journal.note(self._shares, asyncio.get_running_loop().time(), self._reasons)
            finally:
                self._journal.close()

    # What is

    def snapshot(self) -> Snapshot:
        shares = self._shares
        held = {
            gpu: Holder(bundle.pipeline, bundle.cluster, bundle.rank, lease.state.value, lease.epoch)
            for bundle, lease in shares.leases.items()
            for gpu in gpus_of(lease.mask)
        }
        out: dict[str, str] = {name: one.quarantined for name, one in shares.pipelines.items() if one.quarantined}
        return Snapshot(
            leases=dict(sorted(held.items())),
            idle=leases.free_gpus(shares),
            pending=tuple(
                Pending(one.pipeline, one.cluster, one.priority, self._reasons.get(one.seq, ""))
                for one in shares.requests
            ),
            open_rollouts={name: one.target for name, one in sorted(shares.rollouts.items())},
            quarantined={**out, **{f"gpu {gpu}": why for gpu, why in sorted(shares.lost_gpus.items())}},
        )

    @property
    def shares(self) -> Shares:
        """The whole state, for those who check or draw it."""
        return self._shares

    def events(self) -> list[SharingEvent]:
        return list(self._events)

    def reports(self) -> dict[str, ProgressReport]:
        """The latest report of each pipeline, counted or not."""
        return dict(self._reports)

    # Planning

    def _wake(self) -> None:
        """One pass for all that happens in this turn of the loop."""
        if self._running and self._pass is None:
            self._pass = asyncio.get_running_loop().call_soon(self._plan)

    def _plan(self) -> None:
        self._pass = None
        if self._recheck is not None:
            self._recheck.cancel()
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._recheck = loop.call_later(AGAIN_S, self._wake)  # stands if what follows raises
        plan = self._planner(self._shares, now)
        try:
            self._apply(plan, now)
        except JournalUnusable as error:
            log.error("nothing is decided: %s", error.message)
            return
        self._recheck.cancel()
        self._recheck = None
        if plan.recheck_at is not None:
            self._recheck = loop.call_at(max(plan.recheck_at, now + SHORTEST_RECHECK_S), self._wake)

    def _apply(self, plan: Plan, now: float) -> None:
        shares = self._shares
        shrinks = [bundle for bundle in plan.shrinks if self._may_move(bundle.pipeline)]
        shares = leases.draining(shares, shrinks, now, plan.reasons)
        granted = []
        for grant in plan.grants:
            request = leases.request_of(shares, grant.seq)
            if grant.ready and request is not None and grant.seq in self._waiters and self._may_move(request.pipeline):
                shares = leases.granted(shares, grant.seq, now)
                granted.append(request)
        expands = [one.bundle for one in plan.expands if one.ready and self._may_move(one.bundle.pipeline)]
        shares = leases.expanding(shares, expands, now, plan.reasons)
        promised = tuple(one.bundle for one in plan.expands if not one.ready)
        if promised != shares.promised:
            shares = replace(shares, promised=promised)
        self._commit(shares, planned=True)
        self._reasons = {one.seq: plan.reasons.get(f"#{one.seq}") or self._reason(one) for one in shares.requests}
        self._tell("shrinking", shrinks, plan.reasons)
        for request in granted:
            self._grant(request)
        self._tell("expanding", expands, plan.reasons)
        for name in dict.fromkeys(bundle.pipeline for bundle in [*shrinks, *expands]):
            self._kick(name)
        for name in dict.fromkeys(request.pipeline for request in granted):
            self._break_deadlock(name)

    def _grant(self, request: Request) -> None:
        gpus = demand.held_gpus(self._shares, request.pipeline, request.cluster)
        self._waiters.answer(request.seq, gpus)
        self._note("granted", request.pipeline, request.priority.name, cluster=request.cluster, gpus=gpus)

    def _break_deadlock(self, name: PipelineId) -> None:
        """A grant can close a cycle too, if its pipeline waits for something else as well: that wait is refused."""
        while (found := demand.deadlocked(self._shares, name)) is not None:
            request, loop = found
            self._commit(demand.withdrawn(self._shares, request.seq))
            self._waiters.refuse(request.seq, WouldDeadlock(f"would wait forever: {loop}"))
            self._note("refused", name, f"would wait forever: {loop}", cluster=request.cluster)

    def _reason(self, request: Request) -> str:
        """Why a request waits of which the planner says nothing."""
        there = self._shares.pipelines[request.pipeline]
        if there.detached_since is not None:
            return f"{request.pipeline} is detached: it waits for its hooks"
        if request.seq not in self._waiters:
            return "its caller has not asked again since a restart"
        return "its GPUs are being made ready"

    def _may_move(self, name: PipelineId) -> bool:
        there = self._shares.pipelines.get(name)
        return there is not None and there.movable

    def _end_reattaching(self) -> None:
        """Whoever has not come back by now does not count any more, nor do places that nobody took again."""
        self._reattach = asyncio.get_running_loop().call_later(AGAIN_S, self._end_reattaching)  # if this raises
        for name, one in self._shares.pipelines.items():
            if one.detached_since is not None and not one.quarantined:
                self._quarantine(name, f"it did not attach within {self._reattach_timeout_s:g} s of a restart")
        shares = self._shares
        for request in shares.requests:
            if request.seq not in self._waiters:
                shares = demand.withdrawn(shares, request.seq)
                self._note("withdrawn", request.pipeline, "nobody asked again after a restart", cluster=request.cluster)
        self._commit(shares)
        self._reattach.cancel()
        self._reattach = None

    # Hook calls

    def hooks_of(self, pipeline: PipelineId) -> PipelineHooks | None:
        return self._hooks.get(pipeline)

    def called(self, pipeline: PipelineId, kind: execution.Kind, epochs: leases.Epochs, took_s: float) -> None:
        """A hook call has succeeded."""
        now = asyncio.get_running_loop().time()
        shares = self._shares
        if kind == "shrink":
            shares = leases.measured(leases.vacated(shares, epochs, now), pipeline, shrink_s=took_s)
            self._commit(shares)
            self._tell("vacated", epochs, {})
            return
        shares = leases.measured(leases.expanded(shares, epochs, now), pipeline, expand_s=took_s)
        waiting = demand.pending(shares, pipeline, GENERATION_CLUSTER)
        gpus = demand.held_gpus(shares, pipeline, GENERATION_CLUSTER)
        answers = waiting is not None and waiting.priority is Priority.GENERATION and bool(gpus)
        if waiting is not None and answers:
            shares = demand.answered(shares, waiting.seq)
        self._commit(shares)
        self._tell("expanded", [bundle for bundle in epochs if bundle in shares.leases], {})
        if waiting is not None and answers:
            self._grant(waiting)

    def call_failed(self, pipeline: PipelineId, kind: execution.Kind, why: str, *, again: bool) -> None:
        self._note("hook-failed", pipeline, f"{kind} {why}" + ("; it is called again" if again else ""))
        if not again:
            self._quarantine(pipeline, f"{kind} {why}")

    def _quarantine(self, name: PipelineId, why: str) -> None:
        if self._shares.pipelines[name].quarantined:
            return
        self._commit(leases.quarantined(self._shares, name, why))
        self._drop_hooks(name)
        self._waiters.fail_pipeline(name, PipelineQuarantined(f"{name} is quarantined: {why}"))
        self._note("quarantined", name, why)

    def _drop_hooks(self, name: PipelineId) -> None:
        self._hooks.pop(name, None)
        runner = self._runners.pop(name, None)
        if runner is not None:
            runner.cancel()

    def _kick(self, name: PipelineId) -> None:
        runner = self._runners.get(name)
        if runner is not None:
            runner.kick()

    # Parts

    def _begin(self) -> float:
        if not self._running:
            raise SchedulerStopped("the scheduler does not run: call start")
        return asyncio.get_running_loop().time()

    def _commit(self, shares: Shares, *, planned: bool = False) -> None:
        """The next state: written first, then in place."""
        if shares is self._shares:
            return
        if self._journal is not None:
            self._journal.append(self._shares, shares, asyncio.get_running_loop().time())
        self._shares = shares
        self._waiters.settle(shares)
        if not planned:
            self._wake()

    def _tell(self, kind: str, bundles: Iterable[Bundle], reasons: Mapping[str, str]) -> None:
        """One event per pipeline and reason."""
        told: dict[tuple[PipelineId, str], list[Bundle]] = {}
        for bundle in bundles:
            told.setdefault((bundle.pipeline, reasons.get(str(bundle), "")), []).append(bundle)
        for (name, why), some in told.items():
            gpus = self._gpus_of(some)
            self._note(kind, name, why, cluster=GENERATION_CLUSTER, ranks=ranks_of(some), gpus=gpus)

    def _gpus_of(self, bundles: Iterable[Bundle]) -> tuple[Gpu, ...]:
        mask = 0
        for bundle in bundles:
            there = self._shares.pipelines.get(bundle.pipeline)
            mask |= there.clusters[bundle.cluster].masks[bundle.rank] if there else 0
        return tuple(gpus_of(mask))

    def _note(
        self,
        kind: str,
        pipeline: str,
        text: str,
        *,
        cluster: str = "",
        ranks: tuple[int, ...] = (),
        gpus: tuple[Gpu, ...] = (),
    ) -> None:
        loop = asyncio.get_running_loop()
        event = SharingEvent(loop.time(), kind, pipeline, text, cluster, ranks, gpus)
        self._events.append(event)
        if self._on_event is not None:
            loop.call_soon(self._on_event, event)  # what it raises is its own


def ranks_of(bundles: Iterable[Bundle]) -> tuple[int, ...]:
    return tuple(sorted(bundle.rank for bundle in bundles))


def _default_planner(shares: Shares, now: float) -> Plan:
    from muster.core.sharing.planner import plan

    return plan(shares, now)

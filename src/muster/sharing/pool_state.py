"""What is the state of a pool, and how does it change? One value: written, put in place, then acted upon.

Every change is computed by a pure function, goes to the journal, is put in place and asks for a planning pass. Hooks
are called and callers answered once it is written. Between two awaits nothing else runs, so there is no lock.
`scheduler` says what pipelines may ask for, `planning` what follows by itself.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from muster.core.sharing import demand, leases, usage, workers
from muster.core.sharing.plans import Standing
from muster.errors import JournalUnusable, PipelineQuarantined, RequestRefused, SchedulerStopped
from muster.sharing import execution
from muster.sharing.hooks import PipelineHooks
from muster.sharing.journal import Journal
from muster.sharing.waiters import Waiters
from muster.types.codec import readable
from muster.types.sharing import (
    GENERATION_CLUSTER,
    Bundle,
    Gpu,
    Holder,
    Pending,
    PipelineId,
    Priority,
    ProgressReport,
    Request,
    Shares,
    SharingEvent,
    Snapshot,
    WorkerHolder,
    gpus_of,
)

OnEvent = Callable[[SharingEvent], None]

EVENTS_KEPT = 10_000
LAST_WRITE_S = 5.0  # how long a stop waits for a store that is full or away

log = logging.getLogger("muster.sharing")


class PoolState:
    """Belongs to the event loop on which it was started."""

    def __init__(
        self,
        shares: Shares,
        journal: Journal | None,
        limits: execution.HookLimits,
        on_event: OnEvent | None,
        metered: Callable[[], float] | None = None,
    ) -> None:
        """`metered`: seconds on a clock that goes on over restarts, to count GPU time with."""
        self.shares = shares
        self.running = False
        self.waiters = Waiters()
        self.hooks: dict[PipelineId, PipelineHooks] = {}
        self.runners: dict[PipelineId, execution.Runner] = {}
        self.reasons: Mapping[int, str] = {}
        self.reports: dict[str, ProgressReport] = {}
        self.events: deque[SharingEvent] = deque(maxlen=EVENTS_KEPT)
        self.standings: Mapping[str, Standing] = {}  # of trainings, as the last plan left them
        self.changed: Callable[[], None] = lambda: None
        self.workers_changed: Callable[[str], None] = lambda training: None
        self.plan_now: Callable[[], None] = lambda: None
        self.limits = limits
        self._journal = journal
        self._on_event = on_event
        self._metered = metered

    # Life

    async def start(self) -> None:
        """Take up the journal's state. Pipelines in it are detached until they are registered again."""
        now = asyncio.get_running_loop().time()
        if self._metered is None:  # the time of day is looked at once: who sets it changes no sum
            ahead = time.time() - now
            self._metered = lambda: asyncio.get_running_loop().time() + ahead
        if self._journal is None:
            self.shares = usage.begun(leases.detached(self.shares, now), self.metered())
        else:
            kept = self._journal.open(self.shares)
            shares = leases.shifted(kept.shares, now - kept.at)
            self.shares = usage.begun(leases.detached(shares, now, unsure=kept.may_lack_its_end), self.metered())
            self.reasons = kept.reasons
            try:
                self._journal.rewrite(self.shares, now, self.reasons)
                await self._journal.written()
            except JournalUnusable:
                self._journal.close()
                raise
        self.running = True
        self.note("started", "", f"{self.shares.pool.gpus} GPUs, {len(self.shares.pipelines)} pipelines from before")

    async def stop(self, ending: Iterable[asyncio.Task[Any]]) -> None:
        """Waiters fail, hook calls end; leases, demand and places in the queue stay as they are."""
        self.running = False
        self.waiters.fail_all(SchedulerStopped("the scheduler has stopped"))
        tasks = [*ending, *(task for runner in self.runners.values() for task in runner.cancel())]
        if tasks:
            await asyncio.wait(tasks)
        self.runners.clear()
        self.hooks.clear()
        self.note("stopped", "", "")
        if self._journal is not None:
            try:
                now = asyncio.get_running_loop().time()
                self._journal.append(self.shares, self.shares, now, self.reasons)
                async with asyncio.timeout(LAST_WRITE_S):
                    await self._journal.written()
            except TimeoutError:
                log.error("the store takes nothing: what was decided last may be lost, and nobody was told of it")
            finally:
                self._journal.close()

    def begin(self) -> float:
        """The time, for an operation."""
        if not self.running:
            raise SchedulerStopped("the scheduler does not run: call start")
        return asyncio.get_running_loop().time()

    def metered(self) -> float:
        """The time that GPU time is counted with."""
        assert self._metered is not None
        return self._metered()

    # Changing

    def commit(self, shares: Shares, *, planned: bool = False) -> None:
        """The next state: given to the journal first, then in place."""
        if shares is self.shares:
            return
        now, before = asyncio.get_running_loop().time(), self.shares
        shares = usage.metered(before, workers.dated(before, shares, now), self.metered())
        if self._journal is not None:
            self._journal.append(before, shares, now)
        self.shares = shares
        self.waiters.settle(shares)
        if before.workers is not shares.workers:
            self._tell_trainings(before, shares)
        if not planned:
            self.changed()

    def _tell_trainings(self, before: Shares, after: Shares) -> None:
        """Whoever runs trainings looks at what is theirs by itself: it hears only whose has changed."""
        changed = [
            one.training
            for old, new in ((before.workers, after.workers), (after.workers, before.workers))
            for key, one in old.items()
            if new.get(key) is not one
        ]
        for training in dict.fromkeys(changed):
            asyncio.get_running_loop().call_soon(self.workers_changed, training)

    async def written(self) -> None:
        """Until nothing that was decided can be lost with this process."""
        if self._journal is not None:
            await self._journal.written()

    def quarantine(self, name: PipelineId, why: str, *, again: bool = False) -> None:
        why = readable(why) or "no reason was given"
        there = self.shares.pipelines[name]
        if there.quarantined and (there.killed or not again or there.quarantined == why):
            return
        self.commit(leases.quarantined(self.shares, name, why))
        self.drop_hooks(name)
        self.waiters.fail_pipeline(name, PipelineQuarantined(f"{name} is quarantined: {why}"))
        self.note("quarantined", name, why)

    def bury(self, name: PipelineId, why: str) -> tuple[Gpu, ...]:
        """A pipeline is no more; what it held is free."""
        held = [lease.bundle for lease in self.shares.leases.values() if lease.bundle.pipeline == name]
        freed = self.gpus_of(held)
        self.commit(leases.unregistered(self.shares, name))
        self.drop_hooks(name)
        self.reports.pop(name, None)
        self.waiters.fail_pipeline(name, RequestRefused(f"{name} was unregistered{f': {why}' if why else ''}"))
        self.note("unregistered", name, why, gpus=freed)
        return freed

    def refuse_lost(self, name: PipelineId, why: str) -> None:
        """Fail the calls of this pipeline whose place in the queue is no more."""
        there = {one.seq for one in self.shares.requests}
        for seq in self.waiters.seqs_of(name):
            if seq not in there:
                self.waiters.refuse(seq, RequestRefused(f"{name}: {why}"))

    def grant(self, request: Request) -> None:
        gpus = demand.held_gpus(self.shares, request.pipeline, request.cluster)
        self.waiters.answer(request.seq, gpus)
        self.note("granted", request.pipeline, request.priority.name, cluster=request.cluster, gpus=gpus)

    # Hook calls

    def attach(self, name: PipelineId, hooks: PipelineHooks) -> None:
        self.hooks[name] = hooks
        self.runners.setdefault(name, execution.Runner(self, name, self.limits))

    def drop_hooks(self, name: PipelineId) -> None:
        self.hooks.pop(name, None)
        runner = self.runners.pop(name, None)
        if runner is not None:
            runner.cancel()

    def kick(self, name: PipelineId) -> None:
        if (runner := self.runners.get(name)) is not None:
            runner.kick()

    def hooks_of(self, pipeline: PipelineId) -> PipelineHooks | None:
        return self.hooks.get(pipeline)

    def called(self, pipeline: PipelineId, kind: execution.Kind, epochs: leases.Epochs, took_s: float) -> None:
        """A hook call has succeeded."""
        now = asyncio.get_running_loop().time()
        if kind == "shrink":
            shares = leases.vacated(self.shares, epochs, now)
            self.commit(leases.measured(shares, pipeline, shrink_s=took_s))
            self.tell("vacated", epochs, {})
            return
        shares = leases.measured(leases.expanded(self.shares, epochs, now), pipeline, expand_s=took_s)
        waiting = demand.pending(shares, pipeline, GENERATION_CLUSTER)
        if waiting is not None and waiting.priority is not Priority.GENERATION:
            waiting = None
        if waiting is not None and demand.held_gpus(shares, pipeline, GENERATION_CLUSTER):
            shares = demand.answered(shares, waiting.seq)
        else:
            waiting = None
        self.commit(shares)
        self.tell("expanded", [bundle for bundle in epochs if bundle in shares.leases], {})
        if waiting is not None:
            self.grant(waiting)

    def call_failed(self, pipeline: PipelineId, kind: execution.Kind, why: str, *, again: bool) -> None:
        self.note("hook-failed", pipeline, f"{kind} {why}" + ("; it is called again" if again else ""))
        if not again:
            self.quarantine(pipeline, f"{kind} {why}")

    # What is

    def snapshot(self) -> Snapshot:
        shares = self.shares
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
                Pending(one.pipeline, one.cluster, one.priority, self.reasons.get(one.seq, ""))
                for one in shares.requests
            ),
            open_rollouts={name: one.target for name, one in sorted(shares.rollouts.items())},
            quarantined={**out, **{f"gpu {gpu}": why for gpu, why in sorted(shares.lost_gpus.items())}},
            workers={
                gpu: WorkerHolder(shares.crews[one.training].name, one.state.value)
                for one in shares.workers.values()
                if one.training in shares.crews
                for gpu in gpus_of(one.mask)
            },
        )

    def gpus_of(self, bundles: Iterable[Bundle]) -> tuple[Gpu, ...]:
        mask = 0
        for bundle in bundles:
            there = self.shares.pipelines.get(bundle.pipeline)
            mask |= there.clusters[bundle.cluster].masks[bundle.rank] if there else 0
        return tuple(gpus_of(mask))

    def tell(self, kind: str, bundles: Iterable[Bundle], reasons: Mapping[str, str]) -> None:
        """One event per pipeline and reason."""
        told: dict[tuple[PipelineId, str], list[Bundle]] = {}
        for bundle in bundles:
            told.setdefault((bundle.pipeline, reasons.get(str(bundle), "")), []).append(bundle)
        for (name, why), some in told.items():
            gpus = self.gpus_of(some)
            self.note(kind, name, why, cluster=GENERATION_CLUSTER, ranks=ranks_of(some), gpus=gpus)

    def note(
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
        self.events.append(event)
        if self._on_event is not None:
            loop.call_soon(self._on_event, event)  # what it raises is its own


def ranks_of(bundles: Iterable[Bundle]) -> tuple[int, ...]:
    return tuple(sorted(bundle.rank for bundle in bundles))

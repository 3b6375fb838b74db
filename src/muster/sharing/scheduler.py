"""What may a pipeline ask of the scheduler, and what happens then?

Each operation checks everything first and computes the next state with a pure function; `pool_state` puts it in place,
`planning` decides what follows. Nobody is answered before what he hears is written.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path

from muster.core.sharing import demand, leases, usage
from muster.errors import (
    GrantTimeout,
    InvalidRequest,
    RequestRefused,
)
from muster.sharing import execution, pool_log
from muster.sharing import hooks as pipeline_hooks
from muster.sharing.hooks import PipelineHooks
from muster.sharing.journal import FileJournal, Journal
from muster.sharing.killing import Kills
from muster.sharing.planning import Planner, Planning
from muster.sharing.pool_state import OnEvent, PoolState, ranks_of
from muster.sharing.proving import Proofs
from muster.sharing.requests import Requests
from muster.sharing.trainings import Trainings
from muster.types import plural
from muster.types.codec import MOST, is_text, readable
from muster.types.sharing import (
    GENERATION_CLUSTER,
    Bundle,
    ClusterSpec,
    Gpu,
    PipelineId,
    Pool,
    Priority,
    ProgressReport,
    Released,
    Shares,
    SharingEvent,
    Snapshot,
    Tenant,
    Used,
    named,
)

VACATED_POLL_S = 0.05


class Scheduler:
    """Moves GPUs of a pool between pipelines. The same object runs embedded, behind HTTP and as a Ray actor.

    Belongs to the event loop on which it was started.
    """

    def __init__(
        self,
        pool: Pool,
        journal: Path | str | Journal | None = None,
        hook_timeout_s: float = 120.0,
        min_turn_s: float = 2.0,
        *,
        reserve_after_s: float = 30.0,
        reattach_timeout_s: float = 60.0,
        vacated_poll_s: float = VACATED_POLL_S,
        planner: Planner | None = None,
        on_event: OnEvent | None = None,
        metered: Callable[[], float] | None = None,
        logs_grants: bool = True,
    ) -> None:
        """Log grants and long waits if `logs_grants`: set it if the callers are in this process."""
        empty = Shares(pool, min_turn_s=min_turn_s, reserve_after_s=reserve_after_s)
        kept = FileJournal(journal) if isinstance(journal, Path | str) else journal
        limits = execution.HookLimits(hook_timeout_s, vacated_poll_s)
        self._state = PoolState(empty, kept, limits, on_event, metered)
        self._planning = Planning(self._state, planner, reattach_timeout_s)
        self._requests = Requests(self._state)
        self._proofs = Proofs(self._state)
        self.trainings = Trainings(self._state)
        self._kills = Kills(self._state)
        self._logs_grants = logs_grants

    # Life

    async def start(self) -> None:
        """Take up the journal's state. Pipelines in it are detached until they are registered again."""
        if not self._state.running:
            await self._state.start()
            self._planning.start()

    async def stop(self) -> None:
        """Waiters fail, hook calls end; leases, demand and places in the queue stay as they are."""
        if not self._state.running:
            return
        self._planning.stop()
        await self._state.stop([*self._proofs.cancel(), *self._kills.cancel()])

    # What is

    @property
    def shares(self) -> Shares:
        """The whole state, for those who check or draw it."""
        return self._state.shares

    def snapshot(self) -> Snapshot:
        return self._state.snapshot()

    @property
    def reasons(self) -> Mapping[int, str]:
        """Why requests wait, by their numbers."""
        return self._state.reasons

    def metered(self) -> float:
        """The time that GPU time is counted with."""
        return self._state.metered()

    def used(self) -> list[Used]:
        """What everybody used up to now, and what nobody did."""
        return usage.totals(self._state.shares, self._state.metered())

    async def events(self) -> list[SharingEvent]:
        return list(self._state.events)

    async def reports(self) -> dict[str, ProgressReport]:
        """The latest report of each pipeline, counted or not."""
        return dict(self._state.reports)

    # Pipelines

    async def register_pipeline(
        self,
        pipeline: str,
        clusters: Mapping[str, ClusterSpec],
        hooks: PipelineHooks | None = None,
        weight: float = 1.0,
        *,
        tenant: Tenant | None = None,
    ) -> None:
        """Make a pipeline known, or attach new hooks to one that is.

        With a `tenant` it is known which process that was. What a process before it held ends, once that is gone and
        the new hooks have shrunk all ranks; while its hooks are attached, another process is refused.
        """
        now = self._state.begin()
        problems = pipeline_hooks.problems(hooks)
        if hooks is None or problems:
            raise InvalidRequest(f"hooks of {pipeline!r}: {problems[0].message}", problems=problems)
        _check_tenant(tenant)
        name = PipelineId(pipeline)
        leases.check_not_killed(self._state.shares, name, tenant or Tenant())
        shares = leases.registered(self._state.shares, name, clusters, weight)
        if tenant is None or (tenant.process is None and name in self._state.shares.pipelines):
            tenant = shares.pipelines[name].tenant  # who does not say who he is changes nothing about that
        if name in self._state.shares.pipelines and tenant.is_another_than(shares.pipelines[name].tenant):
            self._proofs.supersede(name)
            shares = self._state.shares
        if shares.pipelines[name].quarantined or shares.pipelines[name].unsure:
            await self._proofs.prove(name, hooks, tenant)
            return
        new = name not in self._state.shares.pipelines
        self._state.attach(name, hooks)
        self._state.commit(leases.attached(leases.occupied(shares, name, tenant), name, now))
        self._state.note("registered" if new else "attached", name, "")
        self._state.kick(name)
        await self._state.written()

    async def admit_pipeline(self, pipeline: str) -> None:
        self._state.begin()
        before = self._state.shares
        self._state.commit(leases.admitted(before, PipelineId(pipeline)))
        if before is not self._state.shares:
            self._state.note("admitted", pipeline, "")
        await self._state.written()

    async def unregister_pipeline(self, pipeline: str, why: str = "") -> None:
        self._state.begin()
        name = PipelineId(pipeline)
        if name not in self._state.shares.pipelines:
            return
        self._kills.forget(name)
        self._state.bury(name, why)
        await self._state.written()

    async def kill_pipeline(self, pipeline: str, why: str = "", force: bool = False) -> Released:
        """End somebody else's pipeline: its calls are refused from now on, its hooks are asked to shrink.

        GPUs that it does not give back stay quarantined until its process is known to be gone; with `force` they are
        free at once, whoever uses them. What was freed, and what was not.
        """
        self._state.begin()
        return await self._kills.kill(PipelineId(pipeline), why, force=force)

    async def bar_process(self, pipeline: str, process: str, why: str) -> None:
        """For those who know better than a tenant's name which process is being killed: it is not registered again."""
        self._state.begin()
        demand.known(self._state.shares, PipelineId(pipeline))
        self._state.commit(leases.barred(self._state.shares, PipelineId(pipeline), process, readable(why)))
        await self._state.written()

    async def quarantine_pipeline(self, pipeline: str, why: str) -> None:
        """For those who see that a pipeline is dead or silent."""
        await self._quarantine(PipelineId(pipeline), why, again=False)

    async def renew_quarantine(self, pipeline: str, why: str) -> None:
        """Quarantine a pipeline, or replace the reason of its quarantine."""
        await self._quarantine(PipelineId(pipeline), why, again=True)

    async def _quarantine(self, name: PipelineId, why: str, *, again: bool) -> None:
        self._state.begin()
        demand.known(self._state.shares, name)
        self._state.quarantine(name, why, again=again)
        await self._state.written()

    async def lose_node(self, node: int, why: str = "node-lost") -> None:
        """A node's GPUs are out of use; bundles on them are dropped without hooks."""
        now, why = self._state.begin(), readable(why)
        self._state.commit(leases.node_lost(self._state.shares, node, why, now))
        for runner in self._state.runners.values():
            runner.interrupt()
        self._state.note("node-lost", "", f"node {node}: {why}")
        await self._state.written()

    async def restore_node(self, node: int) -> None:
        self._state.begin()
        self._state.commit(leases.node_back(self._state.shares, node))
        self._state.note("node-back", "", f"node {node}")
        await self._state.written()

    # Requests

    async def request_gpus(
        self,
        pipeline: str,
        cluster: str,
        priority: Priority,
        step_target_estimate: int | None = None,
        timeout: float | None = None,
        *,
        rollout_id: str | None = None,
    ) -> list[Gpu]:
        """Wait for GPUs; which ones, sorted."""
        now = self._state.begin()
        _check_timeout(timeout)
        wish = demand.Wish(PipelineId(pipeline), cluster, _priority(priority), step_target_estimate, named(rollout_id))
        return await self._grant(self._requests.ask(self._state.shares, wish, now), wish, timeout)

    async def notify_release_then_request_gpus(
        self,
        pipeline: str,
        release: str,
        request: str,
        priority: Priority,
        step_target_estimate: int | None = None,
        timeout: float | None = None,
    ) -> list[Gpu]:
        """Release one cluster and ask for another in one step: nobody comes in between."""
        now = self._state.begin()
        _check_timeout(timeout)
        name = PipelineId(pipeline)
        wish = demand.Wish(name, request, _priority(priority), step_target_estimate)
        shares, going, text, freed = self._without(name, release, now)
        asked = self._requests.ask(shares, wish, now)
        self._state.refuse_lost(name, "its rollout was closed while it waited")
        self._state.note("released", name, text, cluster=release, gpus=freed)
        gone = self._state.waiters.for_departure(name, going)
        self._state.kick(name)
        return await self._grant(asked, wish, timeout, gone)

    async def _grant(
        self, request: demand.Asked, wish: demand.Wish, timeout: float | None, gone: asyncio.Future[None] | None = None
    ) -> list[Gpu]:
        """Return the granted GPUs. Log the grant and a long wait if the caller is in this process."""
        if not self._logs_grants:
            return await self._requests.granted(request, wish, timeout, gone)
        async with pool_log.logged_wait(self.snapshot, wish.pipeline, wish.cluster):
            gpus = await self._requests.granted(request, wish, timeout, gone)
        pool_log.log_grant(wish.pipeline, wish.cluster, gpus)
        return gpus

    # Releases

    async def notify_release_gpus(self, pipeline: str, cluster: str) -> Released:
        """Give a cluster back. Returns when bundles that were being granted or drained are down too."""
        now = self._state.begin()
        name = PipelineId(pipeline)
        shares, going, text, freed = self._without(name, cluster, now)
        self._settle_release(name, shares)
        self._state.note("released", name, text, cluster=cluster, gpus=freed)
        gone = self._state.waiters.for_departure(name, going)
        self._state.kick(name)
        async with self._logged_release(name, cluster):
            await gone
        self._kills.bury_if_empty(name)
        await self._state.written()
        return Released(freed, text)

    def _logged_release(self, name: PipelineId, cluster: str) -> contextlib.AbstractAsyncContextManager[None]:
        """Log a long wait for a release if the caller is in this process."""
        if not self._logs_grants:
            return contextlib.nullcontext()
        return pool_log.logged_wait(self.snapshot, name, cluster, is_release=True)

    async def await_release_gpus(
        self, pipeline: str, cluster: str = GENERATION_CLUSTER, timeout: float | None = None
    ) -> Released:
        """Close the rollout and drain every generation bundle; returns when all are really vacated."""
        now = self._state.begin()
        _check_timeout(timeout)
        name = PipelineId(pipeline)
        demand.known(self._state.shares, name)
        if cluster != GENERATION_CLUSTER:
            raise RequestRefused(f"await_release_gpus is for {GENERATION_CLUSTER}, not {cluster}")
        before = list(demand.leases_of(self._state.shares, name, cluster))
        self._settle_release(name, leases.suspended(self._state.shares, name, now, dispatched=self._dispatched(name)))
        epochs = {lease.bundle: lease.epoch for lease in demand.leases_of(self._state.shares, name, cluster)}
        gone = self._state.waiters.for_departure(name, epochs)
        self._state.note("draining", name, "its owner awaits its release", cluster=cluster, ranks=ranks_of(epochs))
        self._state.kick(name)
        async with self._logged_release(name, cluster):
            await asyncio.wait({gone}, timeout=timeout)
        if not gone.done():
            gone.cancel()
            raise GrantTimeout(f"{name}/{cluster} was not vacated within {timeout:g} s; it goes on draining")
        gone.result()
        await self._state.written()
        freed = self._state.gpus_of(lease.bundle for lease in before)
        return Released(freed, f"{plural.counted(len(before), 'bundle')} vacated" if before else "nothing was held")

    def _without(
        self, name: PipelineId, cluster: str, now: float
    ) -> tuple[Shares, dict[Bundle, int], str, tuple[Gpu, ...]]:
        """The state after a release, what will still be drained for it, and what is to be said of it."""
        before = self._state.shares
        shares = leases.released(before, name, cluster, now, dispatched=self._dispatched(name))
        there = list(demand.leases_of(before, name, cluster))
        freed = self._state.gpus_of(lease.bundle for lease in there if lease.bundle not in shares.leases)
        going = {one.bundle: shares.leases[one.bundle].epoch for one in there if one.bundle in shares.leases}
        text = (
            f"{plural.counted(len(freed), 'GPU')} freed"
            if freed
            else f"{name}/{cluster} holds nothing: nothing was freed"
        )
        if going:
            text += f"; {len(going)} bundles were still being granted or drained, and are vacated first"
        return shares, going, text, freed

    def _settle_release(self, name: PipelineId, shares: Shares) -> None:
        """Put it in place; whoever waited for the rollout that this closes is told."""
        self._state.commit(shares)
        self._state.refuse_lost(name, "its rollout was closed while it waited")

    def _dispatched(self, name: PipelineId) -> set[Bundle]:
        runner = self._state.runners.get(name)
        return runner.dispatched() if runner else set()

    # Progress

    async def report_progress(self, report: ProgressReport) -> str:
        """Say how far a rollout is. Why that was not counted, "" if it was."""
        now = self._state.begin()
        shares, uncounted = demand.reported(self._state.shares, report, now)
        self._state.reports[report.pipeline] = report
        name = PipelineId(report.pipeline)
        rollout = shares.rollouts.get(name)
        waiting = demand.pending(shares, name, GENERATION_CLUSTER)
        if waiting is not None and waiting.priority is Priority.GENERATION and rollout and not rollout.remaining:
            shares = demand.answered(shares, waiting.seq)
        self._state.commit(shares)
        self._state.refuse_lost(name, "nothing is left to generate")
        text = f"{report.completed} of {report.target}"
        self._state.note("progress", name, f"{text}, not counted: {uncounted}" if uncounted else text)
        await self._state.written()
        return uncounted

    async def clear_progress(self, pipeline: str) -> None:
        self._state.begin()
        name = PipelineId(pipeline)
        self._state.commit(demand.cleared(self._state.shares, name))
        self._state.refuse_lost(name, "its progress was cleared while it waited")
        self._state.note("cleared", name, "")
        await self._state.written()


def _check_timeout(value: object) -> None:
    """Before anything has changed. One that is over already is as good as 0."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and (not number or value != value):
        raise InvalidRequest(f"timeout is a number of seconds or None, not {value!r}")


def _check_tenant(value: object) -> None:
    """It is written into the journal, so it has to be what it should be."""
    if value is None:
        return
    if not isinstance(value, Tenant):
        raise InvalidRequest(f"a tenant is a Tenant or None, not {value!r}")
    names = [name for name in (value.process, value.training) if name is not None]
    known = isinstance(value.round, int) and not isinstance(value.round, bool) and 0 <= value.round < MOST
    if not all(is_text(name) and name for name in names) or not (value.round is None or known):
        raise InvalidRequest(f"a tenant has texts for names and a number for its round, not {value!r}")


def _priority(value: Priority | int) -> Priority:
    try:
        return Priority(value)
    except ValueError:
        raise InvalidRequest(f"{value!r} is not a priority: {', '.join(one.name for one in Priority)} are") from None

"""What may a pipeline ask of the scheduler, and what happens then?

Each operation checks everything first and computes the next state with a pure function; the desk puts it in place,
has it planned upon and carries out what follows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from muster.core.sharing import demand, leases
from muster.errors import (
    AlreadyExists,
    GrantTimeout,
    InvalidRequest,
    PipelineQuarantined,
    RequestRefused,
)
from muster.sharing import execution
from muster.sharing import hooks as pipeline_hooks
from muster.sharing.desk import Desk, ranks_of
from muster.sharing.hooks import PipelineHooks
from muster.types.sharing import (
    GENERATION_CLUSTER,
    Bundle,
    ClusterSpec,
    Gpu,
    PipelineId,
    Priority,
    ProgressReport,
    Released,
    Shares,
    Tenant,
    named,
)


class Scheduler(Desk):
    """Moves GPUs of a pool between pipelines. The same object runs embedded, behind HTTP and as a Ray actor."""

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
        now = self._begin()
        problems = pipeline_hooks.problems(hooks)
        if hooks is None or problems:
            raise InvalidRequest(f"hooks of {pipeline!r}: {problems[0].message}", problems=problems)
        _check_tenant(tenant)
        name = PipelineId(pipeline)
        shares = leases.registered(self._shares, name, clusters, weight)
        if tenant is None or tenant.process is None:
            tenant = shares.pipelines[name].tenant  # who does not say who he is changes nothing about that
        if name in self._shares.pipelines and tenant.is_another_than(shares.pipelines[name].tenant):
            self._supersede(name)
            shares = self._shares
        if shares.pipelines[name].quarantined or shares.pipelines[name].unsure:
            await self._prove(name, hooks, tenant)
            return
        new = name not in self._shares.pipelines
        self._hooks[name] = hooks
        self._runners.setdefault(name, execution.Runner(self, name, self._limits))
        self._commit(leases.attached(leases.occupied(shares, name, tenant), name, now))
        self._note("registered" if new else "attached", name, "")
        self._runners[name].kick()

    def _supersede(self, name: PipelineId) -> None:
        """Another process comes for it. The one before must be gone: its hooks were lost, or do not count any more."""
        if self._shares.pipelines[name].movable:
            raise AlreadyExists(
                f"{name} is registered by another process, whose hooks are attached",
                hint="end that process, or unregister the pipeline first",
            )
        self._quarantine(name, "another process has taken its place")

    async def _prove(self, name: PipelineId, hooks: PipelineHooks, tenant: Tenant) -> None:
        """New hooks for a pipeline of which nobody knows what is awake count once they have shrunk all its ranks."""
        if name in self._proving:
            raise RequestRefused(f"{name} is being registered by somebody else", retryable=True)
        there = self._shares.pipelines[name]
        ranks = {rank: list(bundle) for rank, bundle in enumerate(there.infer.bundles)}
        proof = asyncio.create_task(execution.shrink_all(hooks, ranks, self._limits))
        self._proving[name] = proof
        try:
            await asyncio.wait({proof})
        finally:
            proof.cancel()
            self._proving.pop(name, None)
        now = self._begin()
        failure = proof.result()
        after = self._shares.pipelines.get(name)
        if after is None or not (after.quarantined or after.unsure) or after.clusters != there.clusters:
            raise RequestRefused(f"{name} was changed by somebody else meanwhile", retryable=True)
        if failure:
            self._quarantine(name, f"shrink {failure}")
            raise PipelineQuarantined(f"{name} stays quarantined: shrink {failure}")
        self._hooks[name] = hooks
        self._runners[name] = execution.Runner(self, name, self._limits)
        self._commit(leases.reinstated(leases.occupied(self._shares, name, tenant), name, now))
        self._note("attached", name, "its new hooks have shrunk all its ranks")

    async def admit_pipeline(self, pipeline: str) -> None:
        self._begin()
        before = self._shares
        self._commit(leases.admitted(before, PipelineId(pipeline)))
        if before is not self._shares:
            self._note("admitted", pipeline, "")

    async def unregister_pipeline(self, pipeline: str, why: str = "") -> None:
        self._begin()
        name = PipelineId(pipeline)
        if name not in self._shares.pipelines:
            return
        freed = self._gpus_of(lease.bundle for lease in self._shares.leases.values() if lease.bundle.pipeline == name)
        self._commit(leases.unregistered(self._shares, name))
        self._drop_hooks(name)
        self._reports.pop(name, None)
        self._waiters.fail_pipeline(name, RequestRefused(f"{name} was unregistered{f': {why}' if why else ''}"))
        self._note("unregistered", name, why, gpus=freed)

    async def quarantine_pipeline(self, pipeline: str, why: str) -> None:
        """For those who see that a pipeline is dead or silent: a remote desk, a Ray cluster."""
        self._begin()
        demand.known(self._shares, PipelineId(pipeline))
        self._quarantine(PipelineId(pipeline), why)

    async def lose_node(self, node: int, why: str = "node-lost") -> None:
        """A node's GPUs are out of use; bundles on them are dropped without hooks."""
        now = self._begin()
        self._commit(leases.node_lost(self._shares, node, why, now))
        for runner in self._runners.values():
            runner.interrupt()
        self._note("node-lost", "", f"node {node}: {why}")

    async def restore_node(self, node: int) -> None:
        self._begin()
        self._commit(leases.node_back(self._shares, node))
        self._note("node-back", "", f"node {node}")

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
        now = self._begin()
        _check_timeout(timeout)
        wish = demand.Wish(PipelineId(pipeline), cluster, _priority(priority), step_target_estimate, named(rollout_id))
        return await self._granted(self._ask(self._shares, wish, now), wish, timeout)

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
        now = self._begin()
        _check_timeout(timeout)
        name = PipelineId(pipeline)
        wish = demand.Wish(name, request, _priority(priority), step_target_estimate)
        shares, going, text, freed = self._without(name, release, now)
        asked = self._ask(shares, wish, now)
        self._refuse_lost(name, "its rollout was closed while it waited")
        self._note("released", name, text, cluster=release, gpus=freed)
        gone = self._waiters.for_departure(name, going)
        self._kick(name)
        return await self._granted(asked, wish, timeout, gone)

    def _ask(self, shares: Shares, wish: demand.Wish, now: float) -> demand.Asked:
        orphans = {one.seq for one in shares.requests if one.seq not in self._waiters}
        asked = demand.requested(shares, wish, now, orphans=orphans)
        self._commit(asked.shares)
        told = "" if wish.estimate is None else f"estimate {wish.estimate}"
        self._note("requested", wish.pipeline, f"{wish.priority.name} {told}".strip(), cluster=wish.cluster)
        return asked

    async def _granted(
        self,
        asked: demand.Asked,
        wish: demand.Wish,
        timeout: float | None,
        gone: asyncio.Future[None] | None = None,
    ) -> list[Gpu]:
        """The answer, once what was to be `gone` before is gone too."""
        if asked.request is None:
            if gone is not None:
                await gone
            return list(asked.gpus)
        seq = asked.request.seq
        answer = self._waiters.for_grant(seq, wish.pipeline)
        awaited: set[asyncio.Future[Any]] = {answer} if gone is None else {answer, gone}
        try:
            _, missing = await asyncio.wait(awaited, timeout=timeout)
        except asyncio.CancelledError:
            self._gone(wish, seq, answer)
            raise
        if not missing:
            if gone is not None:
                gone.result()
            return answer.result()
        why = "what was released is still being vacated" if answer.done() else self._reasons.get(seq, "")
        self._gone(wish, seq, answer)
        told = f": {why}" if why else ""
        raise GrantTimeout(f"{wish.pipeline}/{wish.cluster} was not granted within {timeout:g} s{told}")

    def _gone(self, wish: demand.Wish, seq: int, answer: asyncio.Future[list[Gpu]]) -> None:
        """Nobody hears the answer any more. A fixed grant that came in the same moment is given back."""
        self._waiters.leave(seq)
        if not self._running:
            return
        now = asyncio.get_running_loop().time()
        unheard = answer.done() and answer.exception() is None and wish.priority is not Priority.GENERATION
        answer.cancel()
        if unheard and wish.pipeline in self._shares.pipelines:
            self._commit(leases.released(self._shares, wish.pipeline, wish.cluster, now))
        elif leases.request_of(self._shares, seq) is not None:
            self._commit(demand.withdrawn(self._shares, seq))
        self._note("withdrawn", wish.pipeline, f"request #{seq}", cluster=wish.cluster)

    # Releases

    async def notify_release_gpus(self, pipeline: str, cluster: str) -> Released:
        """Give a cluster back. Returns when bundles that were being granted or drained are down too."""
        now = self._begin()
        name = PipelineId(pipeline)
        shares, going, text, freed = self._without(name, cluster, now)
        self._settle_release(name, shares)
        self._note("released", name, text, cluster=cluster, gpus=freed)
        gone = self._waiters.for_departure(name, going)
        self._kick(name)
        await gone
        return Released(freed, text)

    async def await_release_gpus(
        self, pipeline: str, cluster: str = GENERATION_CLUSTER, timeout: float | None = None
    ) -> Released:
        """Close the rollout and drain every generation bundle; returns when all are really vacated."""
        now = self._begin()
        _check_timeout(timeout)
        name = PipelineId(pipeline)
        demand.known(self._shares, name)
        if cluster != GENERATION_CLUSTER:
            raise RequestRefused(f"await_release_gpus is for {GENERATION_CLUSTER}, not {cluster}")
        before = list(demand.leases_of(self._shares, name, cluster))
        self._settle_release(name, leases.suspended(self._shares, name, now, dispatched=self._dispatched(name)))
        epochs = {lease.bundle: lease.epoch for lease in demand.leases_of(self._shares, name, cluster)}
        gone = self._waiters.for_departure(name, epochs)
        self._note("draining", name, "its owner awaits its release", cluster=cluster, ranks=ranks_of(epochs))
        self._kick(name)
        await asyncio.wait({gone}, timeout=timeout)
        if not gone.done():
            gone.cancel()
            raise GrantTimeout(f"{name}/{cluster} was not vacated within {timeout:g} s; it goes on draining")
        gone.result()
        freed = self._gpus_of(lease.bundle for lease in before)
        return Released(freed, f"{len(before)} bundles vacated" if before else "nothing was held")

    def _without(
        self, name: PipelineId, cluster: str, now: float
    ) -> tuple[Shares, dict[Bundle, int], str, tuple[Gpu, ...]]:
        """The state after a release, what will still be drained for it, and what is to be said of it."""
        before = self._shares
        shares = leases.released(before, name, cluster, now, dispatched=self._dispatched(name))
        there = list(demand.leases_of(before, name, cluster))
        freed = self._gpus_of(lease.bundle for lease in there if lease.bundle not in shares.leases)
        going = {one.bundle: shares.leases[one.bundle].epoch for one in there if one.bundle in shares.leases}
        text = f"{len(freed)} GPUs freed" if freed else f"{name}/{cluster} holds nothing: nothing was freed"
        if going:
            text += f"; {len(going)} bundles were still being granted or drained, and are vacated first"
        return shares, going, text, freed

    def _settle_release(self, name: PipelineId, shares: Shares) -> None:
        """Put it in place; whoever waited for the rollout that this closes is told."""
        self._commit(shares)
        self._refuse_lost(name, "its rollout was closed while it waited")

    def _dispatched(self, name: PipelineId) -> set[Bundle]:
        runner = self._runners.get(name)
        return runner.dispatched() if runner else set()

    # Progress

    async def report_progress(self, report: ProgressReport) -> str:
        """Say how far a rollout is. Why that was not counted, "" if it was."""
        now = self._begin()
        shares, uncounted = demand.reported(self._shares, report, now)
        self._reports[report.pipeline] = report
        name = PipelineId(report.pipeline)
        rollout = shares.rollouts.get(name)
        waiting = demand.pending(shares, name, GENERATION_CLUSTER)
        if waiting is not None and waiting.priority is Priority.GENERATION and rollout and not rollout.remaining:
            shares = demand.answered(shares, waiting.seq)
        self._commit(shares)
        self._refuse_lost(name, "nothing is left to generate")
        text = f"{report.completed} of {report.target}"
        self._note("progress", name, f"{text}, not counted: {uncounted}" if uncounted else text)
        return uncounted

    async def clear_progress(self, pipeline: str) -> None:
        self._begin()
        name = PipelineId(pipeline)
        self._commit(demand.cleared(self._shares, name))
        self._refuse_lost(name, "its progress was cleared while it waited")
        self._note("cleared", name, "")

    def _refuse_lost(self, name: PipelineId, why: str) -> None:
        """Fail the calls of this pipeline whose place in the queue is no more."""
        there = {one.seq for one in self._shares.requests}
        for seq in self._waiters.seqs_of(name):
            if seq not in there:
                self._waiters.refuse(seq, RequestRefused(f"{name}: {why}"))


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
    if not all(isinstance(name, str) and name for name in names) or not isinstance(value.round, int | None):
        raise InvalidRequest(f"a tenant has texts for names and a number for its round, not {value!r}")


def _priority(value: Priority | int) -> Priority:
    try:
        return Priority(value)
    except ValueError:
        raise InvalidRequest(f"{value!r} is not a priority: {', '.join(one.name for one in Priority)} are") from None

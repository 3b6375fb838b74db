"""How does a pool serve pipelines that live in other processes?

A `PoolService` owns a scheduler and speaks for pipelines that come and go over a network. What takes long is an
errand that outlives the call which began it; hook calls are actions that the pipeline fetches; a pipeline that has
not been heard for a while is quarantined. Nothing here speaks HTTP: `server.routes.pools` does.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from muster.core.sharing import demand, planner
from muster.errors import (
    AlreadyExists,
    Conflict,
    InvalidRequest,
    NotFound,
    PipelineQuarantined,
    SchedulerStopped,
)
from muster.sharing.actions import Actions, hooks_for
from muster.sharing.errands import Errands
from muster.sharing.messages import (
    Action,
    ActionAnswer,
    GpuRequest,
    PipelineView,
    PoolEvent,
    ProgressForm,
    Registration,
    ReleaseOrder,
    priority_problems,
    progress_problems,
    read_priority,
    show_snapshot,
)
from muster.sharing.scheduler import Scheduler
from muster.types.codec import Problem, show_time, to_wire
from muster.types.sharing import (
    GENERATION_CLUSTER,
    ClusterSpec,
    Gpu,
    LeaseState,
    Pipeline,
    PipelineId,
    Pool,
    Priority,
    ProgressReport,
    Released,
    SharingEvent,
)

PIPELINE_TTL_S = 30.0
EVENTS_KEPT = 10_000
VACATED_POLL_S = 0.25  # over a network, asking is not free
AT_ONCE_S = 0.05  # how long a call that does not wait may still take to end


@dataclass(frozen=True)
class Granted:
    gpus: tuple[Gpu, ...]
    text: str = ""


@dataclass(frozen=True)
class NotYet:
    """Asking again with the same key goes on where this left off."""

    reason: str


@dataclass(eq=False)
class _Remote:
    """A pipeline in another process, as this one knows it."""

    actions: Actions
    heard: float
    attached: bool = False  # its hooks are these actions
    tells: bool = False  # they ask it whether its GPUs are vacated
    session: str | None = None  # of the process that registered it last: others of that name speak no more
    form: Registration | None = None
    registering: asyncio.Task[None] | None = None
    errands: Errands[Granted] = field(default_factory=Errands)


class PoolService:
    """One pool. Belongs to the event loop on which it was started."""

    def __init__(
        self,
        name: str,
        pool: Pool,
        journal: Path | None = None,
        *,
        devices: Sequence[str] = (),
        pipeline_ttl_s: float = PIPELINE_TTL_S,
        vacated_poll_s: float = VACATED_POLL_S,
        **options: Any,
    ) -> None:
        self.name = name
        self.pool = pool
        self.devices = tuple(devices)
        self.scheduler = Scheduler(pool, journal, vacated_poll_s=vacated_poll_s, on_event=self._hear, **options)
        self._ttl_s = pipeline_ttl_s
        self._remotes: dict[str, _Remote] = {}
        self._running = False
        self._watching: asyncio.Task[None] | None = None
        # Both grow over a restart as well: whoever remembers one from before must not take a new one for old.
        self._epochs: Iterator[int] = itertools.count(time.time_ns() // 1000)
        self._event_ids: Iterator[int] = itertools.count(time.time_ns() // 1000)
        self._events: deque[PoolEvent] = deque(maxlen=EVENTS_KEPT)

    async def start(self) -> None:
        await self.scheduler.start()
        self._running = True
        self._watching = asyncio.create_task(self._watch(), name=f"silence in pool {self.name}")

    async def stop(self) -> None:
        """Calls that wait are told; leases, demand and places in the queue stay."""
        self._running = False
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait({self._watching})
        await self.scheduler.stop()
        for remote in self._remotes.values():
            remote.actions.wake()

    # What is

    def view(self) -> dict[str, Any]:
        """The pool as JSON."""
        shares = self.scheduler.shares
        due = planner.dues(shares, self._now())
        return {
            "name": self.name,
            "gpus": self.pool.gpus,
            "gpusPerNode": self.pool.gpus_per_node,
            "devices": list(self.devices),
            "pipelines": [to_wire(self._pipeline(one, due)) for one in shares.pipelines.values()],
            **show_snapshot(self.scheduler.snapshot()),
        }

    def _pipeline(self, one: Pipeline, due: Mapping[PipelineId, float]) -> PipelineView:
        shares, name = self.scheduler.shares, one.pipeline_id
        rollout = shares.rollouts.get(name)
        held = sorted(gpu for cluster in one.clusters for gpu in demand.held_gpus(shares, name, cluster))
        remote = self._remotes.get(name)
        silent = None if remote is None or not remote.attached else round(self._now() - remote.heard, 3)
        return PipelineView(
            id=name,
            state="quarantined" if one.quarantined else "detached" if one.detached_since is not None else "attached",
            admitted=one.admitted,
            weight=one.weight,
            held=tuple(held),
            remaining=rollout.remaining if rollout else None,
            target=rollout.target if rollout else None,
            due=round(due[name], 3) if name in due else None,
            quarantine=one.quarantined,
            silent_seconds=silent,
        )

    def events(self, after: int = 0) -> list[PoolEvent]:
        return [event for event in self._events if event.id > after]

    def _hear(self, event: SharingEvent) -> None:
        at = datetime.fromtimestamp(time.time() - (self._now() - event.at), UTC)
        shown = PoolEvent(
            next(self._event_ids),
            show_time(at),
            event.kind,
            event.pipeline,
            event.text,
            event.cluster,
            event.ranks,
            event.gpus,
        )
        self._events.append(shown)
        if event.kind in ("quarantined", "unregistered") and event.pipeline in self._remotes:
            self._remotes[event.pipeline].actions.wake()  # whoever fetches its actions should know

    # Coming and going

    async def register(
        self, pipeline: str, form: Registration, wait_s: float, session: str | None = None
    ) -> NotYet | None:
        """None once it is registered. One that is quarantined has to shrink all its ranks first."""
        self._must_run()
        if form.only_attach:
            self._check_attach(pipeline, session)
        remote = self._remotes.get(pipeline)
        if remote is None:
            remote = self._remotes[pipeline] = _Remote(Actions(self._epochs), self._now())
        task = self._registering(pipeline, remote, form)
        before, remote.session = remote.session, session
        await asyncio.wait({task}, timeout=self._hold(wait_s))
        if not task.done():
            return NotYet(f"{pipeline} has to shrink all its ranks first")
        remote.registering = None
        if task.exception() is not None:
            remote.session = before
            if PipelineId(pipeline) not in self.scheduler.shares.pipelines:
                self._remotes.pop(pipeline, None)
        task.result()
        return None

    def _check_attach(self, pipeline: str, session: str | None) -> None:
        there = demand.known(self.scheduler.shares, PipelineId(pipeline))
        if there.quarantined:
            raise _is_quarantined(there)
        self._must_be_current(pipeline, session)

    def _must_be_current(self, pipeline: str, session: str | None) -> None:
        """A process that was taken for dead and is not must not speak for the one that came after it."""
        remote = self._remotes.get(pipeline)
        if remote is not None and session is not None and remote.session not in (None, session):
            raise AlreadyExists(
                f"{pipeline} was registered by another process since",
                hint="this one holds nothing any more; register it again to take over",
            )

    def _registering(self, pipeline: str, remote: _Remote, form: Registration) -> asyncio.Task[None]:
        """The registration under way; a repeated call joins it."""
        running = remote.registering
        if running is not None and not running.done() and remote.form != form:
            raise Conflict(f"{pipeline} is being registered with other values")
        failed = running is not None and running.done() and running.exception() is not None
        if running is not None and remote.form == form and (failed or not running.done()):
            return running  # a failure that nobody came to hear is told now
        remote.form = form
        remote.registering = asyncio.create_task(self._register(pipeline, remote, form))
        remote.registering.add_done_callback(lambda task: task.cancelled() or task.exception())
        return remote.registering

    async def _register(self, pipeline: str, remote: _Remote, form: Registration) -> None:
        if not self._is_as(pipeline, remote, form):
            infer = form.specs.get(GENERATION_CLUSTER, ClusterSpec())
            hooks = hooks_for(remote.actions, infer, vacated=form.vacated)
            await self.scheduler.register_pipeline(pipeline, form.specs, hooks, form.weight)
            remote.attached, remote.tells = True, form.vacated
        if form.admit:
            await self.scheduler.admit_pipeline(pipeline)

    def _is_as(self, pipeline: str, remote: _Remote, form: Registration) -> bool:
        """Whether it is registered just so, with its actions as hooks: then there is nothing to do."""
        there = self.scheduler.shares.pipelines.get(PipelineId(pipeline))
        if there is None or not there.movable or not remote.attached or remote.tells != form.vacated:
            return False
        return dict(there.clusters) == form.specs and there.weight == form.weight

    async def unregister(self, pipeline: str) -> None:
        self._must_run()
        await self.scheduler.unregister_pipeline(pipeline)
        remote = self._remotes.pop(pipeline, None)
        if remote is not None:
            remote.errands.cancel_all()
            remote.actions.wake()

    # Requests

    async def request(self, pipeline: str, key: str, form: GpuRequest, wait_s: float) -> Granted | NotYet:
        remote = self._known(pipeline)
        priority = _priority(form)
        had = self._holds(pipeline, form.cluster, priority)
        errand = remote.errands.begin(key, form, lambda: self._request(pipeline, form, priority), had=had)
        found = await remote.errands.outcome(errand, self._hold(wait_s))
        return found or NotYet(self._reason(pipeline, form.cluster))

    async def _request(self, pipeline: str, form: GpuRequest, priority: Priority) -> Granted:
        estimate = form.step_target_estimate
        if form.release is None:
            gpus = await self.scheduler.request_gpus(
                pipeline, form.cluster, priority, estimate, rollout_id=form.rollout_id
            )
        else:
            gpus = await self.scheduler.notify_release_then_request_gpus(
                pipeline, form.release, form.cluster, priority, estimate
            )
        return Granted(tuple(gpus))

    async def withdraw(self, pipeline: str, key: str) -> None:
        """Its caller will not hear the answer. A fixed grant that came meanwhile is given back."""
        remote = self._known(pipeline)
        errand = await remote.errands.withdraw(key)
        if errand is None or errand.had or not isinstance(errand.asked, GpuRequest):
            return
        form, priority = errand.asked, _priority(errand.asked)
        if priority is not Priority.GENERATION and self._holds(pipeline, form.cluster, priority):
            await self.scheduler.notify_release_gpus(pipeline, form.cluster)

    async def release(self, pipeline: str, key: str | None, form: ReleaseOrder, wait_s: float) -> Granted | NotYet:
        remote = self._known(pipeline)
        name = f"release {form.cluster} {form.wait}" if key is None else key
        errand = remote.errands.begin(name, form, lambda: self._release(pipeline, form), replay=key is not None)
        found = await remote.errands.outcome(errand, self._hold(wait_s))
        return found or NotYet(f"{pipeline}/{form.cluster} is still being vacated")

    async def _release(self, pipeline: str, form: ReleaseOrder) -> Granted:
        call = self.scheduler.await_release_gpus if form.wait else self.scheduler.notify_release_gpus
        released: Released = await call(pipeline, form.cluster)
        return Granted(released.gpus, released.text)

    def _holds(self, pipeline: str, cluster: str, priority: Priority) -> bool:
        shares = self.scheduler.shares
        there = shares.pipelines.get(PipelineId(pipeline))
        if there is None or cluster not in there.clusters:
            return False
        found = demand.leases_of(shares, PipelineId(pipeline), cluster)
        return any(lease.priority is priority and lease.state is LeaseState.HELD for lease in found)

    def _reason(self, pipeline: str, cluster: str) -> str:
        found = [
            one.reason
            for one in self.scheduler.snapshot().pending
            if (one.pipeline, one.cluster) == (pipeline, cluster)
        ]
        return found[0] if found else ""

    async def progress(self, pipeline: str, form: ProgressForm) -> str:
        """Why a report was not counted; "" if it was."""
        self._known(pipeline)
        if problems := progress_problems(form):
            raise _invalid(problems)
        if form.clear:
            await self.scheduler.clear_progress(pipeline)
            return ""
        report = ProgressReport(pipeline, form.completed or 0, form.target or 0, form.stream, form.rollout_id)
        return await self.scheduler.report_progress(report)

    # Actions

    async def next_action(self, pipeline: str, after: int, wait_s: float) -> Action | None:
        """The oldest unanswered one, or None if there is none for that long."""
        deadline = self._now() + self._hold(wait_s)
        while True:
            remote = self._attended(pipeline)
            found = remote.actions.next(after)
            left = deadline - self._now()
            if found is not None or left <= 0:
                return found
            await remote.actions.news(left)

    def answer(self, pipeline: str, action_id: str, answer: ActionAnswer) -> None:
        self._known(pipeline).actions.answer(action_id, answer)

    def _attended(self, pipeline: str) -> _Remote:
        """The pipeline, if its actions are fetched here; what to do about it if not."""
        remote = self._known(pipeline)
        if remote.registering is not None and not remote.registering.done():
            return remote
        there = demand.known(self.scheduler.shares, PipelineId(pipeline))
        if there.quarantined:
            raise _is_quarantined(there)
        if there.detached_since is not None or not remote.attached:
            raise Conflict(f"{pipeline} has no hooks here since a restart", hint="register it again")
        return remote

    # Silence

    def heard(self, pipeline: str, session: str | None = None) -> None:
        """A call of that pipeline has come, whatever it was. Raises AlreadyExists for one of a former process."""
        self._must_be_current(pipeline, session)
        remote = self._remotes.get(pipeline)
        if remote is not None:
            remote.heard = self._now()

    async def _watch(self) -> None:
        """Quarantine whoever is silent for too long. A time at which nobody could be heard does not count."""
        step = self._ttl_s / 4
        while True:
            before = self._now()
            await asyncio.sleep(step)
            lost = self._now() - before - step
            for pipeline, remote in list(self._remotes.items()):
                if lost > step:
                    remote.heard = max(remote.heard, self._now() - step)
                there = self.scheduler.shares.pipelines.get(PipelineId(pipeline))
                silent = self._now() - remote.heard > self._ttl_s
                if silent and remote.attached and there is not None and not there.quarantined:
                    remote.attached = False
                    with contextlib.suppress(SchedulerStopped, NotFound):
                        await self.scheduler.quarantine_pipeline(pipeline, f"nothing was heard for {self._ttl_s:g} s")

    def _hold(self, wait_s: float) -> float:
        """How long a call may be held: a pipeline that waits inside one is silent, so not for longer than half."""
        return max(AT_ONCE_S, min(wait_s, self._ttl_s / 2))

    # Parts

    def _must_run(self) -> None:
        if not self._running:
            raise SchedulerStopped("the scheduler has stopped")

    def _known(self, pipeline: str) -> _Remote:
        self._must_run()
        remote = self._remotes.get(pipeline)
        if remote is None:
            demand.known(self.scheduler.shares, PipelineId(pipeline))
            remote = self._remotes[pipeline] = _Remote(Actions(self._epochs), self._now())
        return remote

    def _now(self) -> float:
        return asyncio.get_running_loop().time()


def _priority(form: GpuRequest) -> Priority:
    problems = list(priority_problems(form.priority))
    if form.release is not None and form.rollout_id is not None:
        problems.append(Problem("rolloutId", "does not go with release"))
    priority = read_priority(form.priority)
    if problems or priority is None:
        raise _invalid(problems)
    return priority


def _invalid(problems: Sequence[Problem]) -> InvalidRequest:
    told = "; ".join(f"{problem.field}: {problem.message}" for problem in problems)
    return InvalidRequest(f"the body is not valid: {told}", problems=tuple(problems))


def _is_quarantined(there: Pipeline) -> PipelineQuarantined:
    return PipelineQuarantined(
        f"{there.pipeline_id} is quarantined: {there.quarantined}",
        hint="register it again: it then has to shrink all its ranks",
    )

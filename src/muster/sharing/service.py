"""How does a pool serve pipelines that live in other processes?

A `PoolService` owns a scheduler and speaks for pipelines that come and go over a network (`tenants`). What takes long
is a pending call that outlives the request which began it; hook calls are actions that the pipeline fetches. Nothing
here speaks HTTP: `server.routes.pools` does.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from muster.core.sharing import demand, overview, planner
from muster.errors import Conflict, InvalidRequest
from muster.sharing.journal import Journal
from muster.sharing.pending_calls import PendingCalls
from muster.sharing.scheduler import Scheduler
from muster.sharing.tenants import Granted, Remote, Rounds, StillWaiting, Tenants, is_killed
from muster.types.codec import Problem, show_time, to_wire
from muster.types.pools import (
    Action,
    ActionAnswer,
    GpuRequest,
    KillOrder,
    PipelineView,
    PoolEvent,
    ProgressForm,
    ReleaseOrder,
    priority_problems,
    progress_problems,
    read_priority,
    show_snapshot,
)
from muster.types.sharing import (
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


class PoolService:
    """One pool. Belongs to the event loop on which it was started."""

    def __init__(
        self,
        name: str,
        pool: Pool,
        journal: Journal | Path | None = None,
        *,
        devices: Sequence[str] = (),
        pipeline_ttl_s: float = PIPELINE_TTL_S,
        vacated_poll_s: float = VACATED_POLL_S,
        rounds: Rounds | None = None,
        workers: overview.Named = lambda training: {},
        **options: Any,
    ) -> None:
        """`workers`: the names of a training's workers, by GPU."""
        self.scheduler = Scheduler(
            pool, journal, vacated_poll_s=vacated_poll_s, on_event=self._hear, logs_grants=False, **options
        )
        self.tenants = Tenants(self.scheduler, pipeline_ttl_s, rounds, devices)
        self.name = name
        self.pool = pool
        self.devices = tuple(devices)
        self._workers = workers
        # It grows over a restart as well: whoever remembers one from before must not take a new one for old.
        self._event_ids: Iterator[int] = itertools.count(time.time_ns() // 1000)
        self._events: deque[PoolEvent] = deque(maxlen=EVENTS_KEPT)
        self._kills: PendingCalls[Granted] = PendingCalls()

    async def start(self) -> None:
        await self.scheduler.start()
        self.tenants.start()

    async def stop(self) -> None:
        """Calls that wait are told; leases, demand and places in the queue stay."""
        await self.tenants.stop()
        await self.scheduler.stop()
        self.tenants.wake()

    # What is

    def view(self) -> dict[str, Any]:
        """The pool as JSON."""
        shares = self.scheduler.shares
        due = planner.dues(shares, _now())
        return {
            "name": self.name,
            "gpus": self.pool.gpus,
            "gpusPerNode": self.pool.gpus_per_node,
            "devices": list(self.devices),
            "pipelines": [to_wire(self._pipeline(one, due)) for one in shares.pipelines.values()],
            **show_snapshot(self.scheduler.snapshot()),
            **self._overview(),
        }

    def _overview(self) -> dict[str, Any]:
        """Every GPU, everybody who waits, and who used how much."""
        scheduler, now = self.scheduler, overview.Moment(_now(), datetime.now(UTC))
        waiting = overview.waiting(scheduler.shares, scheduler.reasons, scheduler.trainings.standings, now)
        ahead = now.shown.timestamp() - scheduler.metered()  # of the clock that GPU time is counted with
        used = overview.used(scheduler.used(), lambda at: datetime.fromtimestamp(at + ahead, UTC))
        return {
            "holders": [to_wire(one) for one in overview.gpus(scheduler.shares, self.devices, self._workers, now)],
            "waiting": [to_wire(one) for one in waiting[: overview.MOST_WAITING]],
            "waitingCount": len(waiting),
            "usage": [to_wire(one) for one in used],
        }

    def returning(self, training: str) -> str:
        """Where the GPUs are that a training has lent, and when they come back; "" if it has lent none."""
        return overview.returning(self.scheduler.shares, training, _now())

    def _pipeline(self, one: Pipeline, due: Mapping[PipelineId, float]) -> PipelineView:
        shares, name = self.scheduler.shares, one.pipeline_id
        rollout = shares.rollouts.get(name)
        held = sorted(gpu for cluster in one.clusters for gpu in demand.held_gpus(shares, name, cluster))
        remote = self.tenants.find(name)
        silent = None if remote is None or not remote.attached else round(_now() - remote.heard, 3)
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
            training=one.tenant.training,
            round=one.tenant.round,
            process=one.tenant.processes[0].pid if one.tenant.processes else None,
        )

    def events(self, after: int = 0) -> list[PoolEvent]:
        return [event for event in self._events if event.id > after]

    def _hear(self, event: SharingEvent) -> None:
        at = datetime.fromtimestamp(time.time() - (_now() - event.at), UTC)
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
        if event.kind == "quarantined":
            self.tenants.vacated(event.pipeline)
        elif event.kind == "unregistered":
            self.tenants.forget(event.pipeline)

    # Requests

    async def request(self, pipeline: str, key: str, form: GpuRequest, wait_s: float) -> Granted | StillWaiting:
        remote = self.tenants.known(pipeline)
        priority = _priority(form)
        had = self._holds(pipeline, form.cluster, priority)
        call = remote.calls.begin(key, form, lambda: self._request(pipeline, form, priority), had=had)
        found = await remote.calls.outcome(call, self.tenants.hold(wait_s))
        return found or StillWaiting(self._reason(pipeline, form.cluster))

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
        remote = self.tenants.known(pipeline)
        call = await remote.calls.withdraw(key)
        if call is None or call.had or not isinstance(call.asked, GpuRequest):
            return
        form, priority = call.asked, _priority(call.asked)
        if priority is not Priority.GENERATION and self._holds(pipeline, form.cluster, priority):
            await self.scheduler.notify_release_gpus(pipeline, form.cluster)

    async def release(
        self, pipeline: str, key: str | None, form: ReleaseOrder, wait_s: float
    ) -> Granted | StillWaiting:
        remote = self.tenants.known(pipeline)
        name = f"release {form.cluster} {form.wait}" if key is None else key
        call = remote.calls.begin(name, form, lambda: self._release(pipeline, form), replay=key is not None)
        found = await remote.calls.outcome(call, self.tenants.hold(wait_s))
        return found or StillWaiting(f"{pipeline}/{form.cluster} is still being vacated")

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

    # Ends

    async def kill(
        self, pipeline: str, key: str | None, form: KillOrder, by: str, wait_s: float
    ) -> Granted | StillWaiting:
        """End it, in somebody's name. It may have to shrink first."""
        why = f"by {by}: {form.why or 'no reason was given'}"
        name = key or f"kill {pipeline} {form.force}"
        call = self._kills.begin(
            name, (pipeline, form), lambda: self._kill(pipeline, why, form), replay=key is not None, caller=by
        )
        found = await self._kills.outcome(call, self.tenants.hold(wait_s))
        return found or StillWaiting(f"{pipeline} was asked to shrink what it generates on")

    async def _kill(self, pipeline: str, why: str, form: KillOrder) -> Granted:
        released = await self.scheduler.kill_pipeline(pipeline, why, form.force)
        return Granted(released.gpus, released.text)

    async def progress(self, pipeline: str, form: ProgressForm) -> str:
        """Why a report was not counted; "" if it was."""
        self.tenants.known(pipeline)
        if problems := progress_problems(form):
            raise _invalid(problems)
        if form.clear:
            await self.scheduler.clear_progress(pipeline)
            return ""
        report = ProgressReport(pipeline, form.completed or 0, form.target or 0, form.stream, form.rollout_id)
        return await self.scheduler.report_progress(report)

    # Actions

    async def next_action(self, pipeline: str, after: int, wait_s: float, session: str | None = None) -> Action | None:
        """The oldest unanswered one, or None if there is none for that long."""
        deadline = _now() + self.tenants.hold(wait_s)
        self.tenants.heard(pipeline, session, fetching=True)
        while True:
            remote = self._attended(pipeline)
            waiting = remote.arrival is not None and remote.arrival.waits
            if is_killed(self.scheduler.shares, pipeline) and not remote.is_arriving(session):
                waiting = False  # it is asked to go, and being heard keeps its GPUs from others
            if not waiting:
                self.tenants.must_be_current(pipeline, session)  # another may have come while this one waited here
            found = None if waiting else remote.actions.next(after)
            asked_anew = waiting and not remote.is_arriving(session)  # whoever lives fetches again, and is heard
            left = deadline - _now()
            if found is not None or asked_anew or left <= 0:
                return found
            await remote.actions.news(left)

    def answer(self, pipeline: str, action_id: str, answer: ActionAnswer) -> None:
        self.tenants.known(pipeline).actions.answer(action_id, answer)

    def _attended(self, pipeline: str) -> Remote:
        """The pipeline, if its actions are fetched here; what to do about it if not."""
        remote = self.tenants.known(pipeline)
        if remote.arrival is not None and not remote.arrival.task.done():
            return remote
        there = demand.known(self.scheduler.shares, PipelineId(pipeline))
        if there.killed:
            return remote
        if there.quarantined:
            raise demand.frozen(there)
        if there.detached_since is not None or not remote.attached:
            raise Conflict(f"{pipeline} has no hooks here since a restart", hint="register it again")
        return remote


def _now() -> float:
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

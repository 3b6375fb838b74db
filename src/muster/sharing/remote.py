"""How does a pipeline reach a scheduler in another process? With `connect`, over HTTP.

A `RemoteScheduler` has the methods of a `Scheduler`; hooks given to it are called here, by a hook runner. Calls that
wait are repeated under one key, so that a lost connection or a restart of the server is only a delay.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import math
import os
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any
from urllib.parse import quote

from muster.background import Tasks
from muster.errors import (
    AlreadyExists,
    GrantTimeout,
    InvalidRequest,
    MusterError,
    RequestRefused,
    SchedulerStopped,
    Unavailable,
)
from muster.sdk import flows
from muster.sdk.drive import AsyncDriver, Link
from muster.sdk.effects import HttpRequest, Response
from muster.sdk.find import Search
from muster.sharing import families, pool_log
from muster.sharing import hooks as pipeline_hooks
from muster.sharing.hook_runner import AWAY, HookRunner
from muster.sharing.hooks import PipelineHooks
from muster.types.codec import Problem, from_wire, to_wire
from muster.types.pools import (
    NAME,
    Action,
    ActionAnswer,
    ClusterForm,
    GpuRequest,
    KillOrder,
    NodeState,
    PoolEvent,
    ProgressForm,
    Registration,
    ReleaseOrder,
    Why,
    priority_problems,
    read_priority,
    read_snapshot,
)
from muster.types.sharing import (
    GENERATION_CLUSTER,
    MOST_PROCESSES,
    ClusterSpec,
    Gpu,
    Priority,
    ProgressReport,
    Released,
    SharingEvent,
    Snapshot,
    Tenant,
)

SESSION = "Pipeline-Session"  # the header that says which registration speaks
PROCESS, TRAINING, ROUND = "Pipeline-Process", "Pipeline-Training", "Pipeline-Round"  # and who that is
PIDS = "Pipeline-Pids"  # the processes that must be gone before the pipeline's GPUs are free
LONG_POLL_S = 20.0
SILENCE_S = 10.0  # how much later than promised an answer may come before the connection counts as lost
PATIENCE_S = 60.0  # how long a server that was there before may be away
WITHDRAW_S = 5.0  # how long a cancelled request may take to be withdrawn


async def connect(url: str | None = None, token: str | None = None, pool: str = "default") -> RemoteScheduler:
    """A handle on a pool of that control plane; by default the one that the environment or this machine names."""
    scheduler = RemoteScheduler(Link(Search.of(url, token)), pool)
    await scheduler.start()
    return scheduler


class RemoteScheduler:
    """A scheduler elsewhere. Belongs to the event loop on which it is used."""

    def __init__(self, link: Link, pool: str, tenant: Tenant | None = None) -> None:
        self._link = link
        self._tenant = tenant or tenant_of(os.environ)
        self._pids: tuple[int, ...] = (os.getpid(),)
        self._driver = AsyncDriver(link)
        self._root = f"/v1/pools/{quote(pool, safe='')}"
        self._forms: dict[str, Registration] = {}
        self._sessions: dict[str, str] = {}  # what this process calls itself when it speaks for a pipeline
        self._hook_runners: dict[str, HookRunner] = {}
        self._withdrawing = Tasks()

    # Life

    async def start(self) -> None:
        """Whether the pool is there."""
        await self._get("")

    async def stop(self) -> None:
        """End this handle. The pool goes on; pipelines that nobody attends any more are quarantined after a while."""
        for runner in self._hook_runners.values():
            await runner.stop()
        self._hook_runners.clear()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._withdrawing.finish(), WITHDRAW_S)
        await self._driver.close()

    async def __aenter__(self) -> RemoteScheduler:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.stop()

    # Pipelines

    async def register_pipeline(
        self,
        pipeline: str,
        clusters: Mapping[str, ClusterSpec],
        hooks: PipelineHooks | None = None,
        weight: float = 1.0,
    ) -> None:
        """Make a pipeline known, or attach new hooks to one that is. From then on its hooks are called here."""
        problems = pipeline_hooks.problems(hooks)
        if hooks is None or problems:
            raise InvalidRequest(f"hooks of {pipeline!r}: {problems[0].message}", problems=problems)
        form = _form(clusters, weight, vacated=getattr(hooks, "vacated", None) is not None)
        session = uuid.uuid4().hex
        if self.process:
            families.mark_this_process(self.process)
        answer = await self._put(pipeline, form, 0.0, session)
        self._forms[pipeline], self._sessions[pipeline] = form, session
        await self._attend(pipeline, hooks)
        try:
            while answer.status != 200:  # its runner shrinks all its ranks meanwhile, if that is asked of it
                if self._hook_runners[pipeline].over:
                    await self._attend(pipeline, hooks)
                answer = await self._put(pipeline, form, LONG_POLL_S, session)
        except AlreadyExists:  # another process has it, and lives
            await self._hook_runners.pop(pipeline).stop()
            del self._forms[pipeline], self._sessions[pipeline]
            raise

    @property
    def process(self) -> str:
        """Return the name of this process, which is the mark of its family."""
        return self._tenant.process or ""

    def name_ranks(self, pids: Sequence[int]) -> None:
        """Set the processes to register, this process first. Without any, their end cannot be proved."""
        self._pids = tuple(pids)

    def _shown_pids(self) -> dict[str, str]:
        return {PIDS: ",".join(map(str, self._pids))} if 0 < len(self._pids) <= MOST_PROCESSES else {}

    async def _attend(self, pipeline: str, hooks: PipelineHooks) -> None:
        if pipeline in self._hook_runners:
            await self._hook_runners.pop(pipeline).stop()
        self._hook_runners[pipeline] = HookRunner(self, pipeline, hooks)

    async def admit_pipeline(self, pipeline: str) -> None:
        form = self._forms.get(pipeline)
        if form is None:
            raise RequestRefused(f"{pipeline} is not registered through this handle", hint="call register_pipeline")
        admitted = Registration(form.clusters, form.weight, admit=True, vacated=form.vacated)
        await self._put(pipeline, _attaching(admitted), 0.0, self._sessions[pipeline])
        self._forms[pipeline] = admitted

    async def unregister_pipeline(self, pipeline: str, why: str = "") -> None:
        self._forms.pop(pipeline, None)
        runner = self._hook_runners.pop(pipeline, None)
        if runner is not None:
            await runner.stop()
        params = {"why": why} if why else {}
        await self._call(HttpRequest("DELETE", self._path(pipeline), params, headers=self._session(pipeline)))
        self._sessions.pop(pipeline, None)

    async def kill_pipeline(self, pipeline: str, why: str = "", force: bool = False) -> Released:
        """End somebody else's pipeline; see `Scheduler.kill_pipeline`."""
        order = to_wire(KillOrder(why, force))
        answer, _ = await self._settled(pipeline, "kill", order, uuid.uuid4().hex, None)
        assert answer is not None  # it was waited for
        return Released(tuple(answer["gpus"]), str(answer["text"]))

    async def quarantine_pipeline(self, pipeline: str, why: str) -> None:
        """For those who see that a pipeline is dead or silent."""
        await self._post(pipeline, "quarantine", to_wire(Why(why)), uuid.uuid4().hex)

    async def lose_node(self, node: int, why: str = "node-lost") -> None:
        """A node's GPUs are out of use; bundles on them are dropped without hooks."""
        await self._call(HttpRequest("PUT", f"{self._root}/nodes/{node}", json=to_wire(NodeState("lost", why))))

    async def restore_node(self, node: int) -> None:
        await self._call(HttpRequest("PUT", f"{self._root}/nodes/{node}", json=to_wire(NodeState("present"))))

    async def _put(self, pipeline: str, form: Registration, wait_s: float, session: str) -> Response:
        return await self._call(
            HttpRequest(
                "PUT",
                self._path(pipeline),
                {"wait": f"{wait_s:g}"},
                json=to_wire(form),
                headers={SESSION: session, **_shown_tenant(self._tenant), **self._shown_pids()},
                timeout_s=wait_s + SILENCE_S,
            )
        )

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
        form = GpuRequest(cluster, _shown(priority), step_target_estimate, None, rollout_id)
        return await self._grant(pipeline, form, timeout)

    async def notify_release_then_request_gpus(
        self,
        pipeline: str,
        release: str,
        request: str,
        priority: Priority,
        step_target_estimate: int | None = None,
        timeout: float | None = None,
    ) -> list[Gpu]:
        """Release one cluster and ask for another in one step."""
        form = GpuRequest(request, _shown(priority), step_target_estimate, release)
        return await self._grant(pipeline, form, timeout)

    async def _grant(self, pipeline: str, form: GpuRequest, timeout: float | None) -> list[Gpu]:
        """Return the granted GPUs; log the grant, and a long wait."""
        async with pool_log.logged_wait(self.snapshot, pipeline, form.cluster):
            gpus = await self._granted(pipeline, form, timeout)
        pool_log.log_grant(pipeline, form.cluster, gpus)
        return gpus

    async def _granted(self, pipeline: str, form: GpuRequest, timeout: float | None) -> list[Gpu]:
        key = uuid.uuid4().hex
        try:
            answer, reason = await self._settled(pipeline, "requests", to_wire(form), key, timeout)
        except asyncio.CancelledError:
            await self._withdraw(pipeline, key)
            raise
        if answer is None:
            await self._withdraw(pipeline, key)
            told = f": {reason}" if reason else ""
            raise GrantTimeout(f"{pipeline}/{form.cluster} was not granted within {timeout:g} s{told}")
        return list(answer["gpus"])

    async def _withdraw(self, pipeline: str, key: str) -> None:
        """Tell the server that nobody waits, and do not wait for long: the caller is on its way out."""
        task = self._withdrawing.start(self._tell_withdrawn(pipeline, key))
        await asyncio.wait({task}, timeout=WITHDRAW_S)

    async def _tell_withdrawn(self, pipeline: str, key: str) -> None:
        path = f"{self._path(pipeline)}/requests/{key}"
        try:
            await self._call(HttpRequest("DELETE", path, headers=self._session(pipeline)))
        except MusterError:
            return  # the pipeline is gone, or the server is: then so is the request, or nobody takes its place again

    # Releases

    async def notify_release_gpus(self, pipeline: str, cluster: str) -> Released:
        return await self._released(pipeline, ReleaseOrder(cluster), None)

    async def await_release_gpus(
        self, pipeline: str, cluster: str = GENERATION_CLUSTER, timeout: float | None = None
    ) -> Released:
        """Close the rollout and drain every generation bundle; returns when all are really vacated."""
        return await self._released(pipeline, ReleaseOrder(cluster, wait=True), timeout)

    async def _released(self, pipeline: str, order: ReleaseOrder, timeout: float | None) -> Released:
        async with pool_log.logged_wait(self.snapshot, pipeline, order.cluster, is_release=True):
            answer, _ = await self._settled(pipeline, "release", to_wire(order), uuid.uuid4().hex, timeout)
        if answer is None:
            raise GrantTimeout(f"{pipeline}/{order.cluster} was not vacated within {timeout:g} s; it goes on draining")
        return Released(tuple(answer["gpus"]), str(answer["text"]))

    async def _settled(
        self, pipeline: str, what: str, body: Mapping[str, Any], key: str, timeout: float | None
    ) -> tuple[Mapping[str, Any] | None, str]:
        """Ask under one key until it is done, or None and why not when time is over."""
        clock = asyncio.get_running_loop().time
        until = math.inf if timeout is None else clock() + timeout
        try:
            async with asyncio.timeout(None if timeout is None else timeout + SILENCE_S):
                while True:
                    wait = max(0.0, min(LONG_POLL_S, until - clock()))
                    answer = await self._post(pipeline, what, body, key, wait)
                    if answer.status == 200:
                        return answer.json, ""
                    if clock() >= until:
                        return None, str(answer.json.get("reason", ""))
        except TimeoutError:
            return None, "the server does not answer"

    # Progress

    async def report_progress(self, report: ProgressReport) -> str:
        """Say how far a rollout is. Why that was not counted, "" if it was."""
        form = ProgressForm(report.completed, report.target, report.stream, report.rollout_id)
        answer = (await self._post(report.pipeline, "progress", to_wire(form), uuid.uuid4().hex)).json
        return str(answer.get("reason") or "")

    async def clear_progress(self, pipeline: str) -> None:
        await self._post(pipeline, "progress", {"clear": True}, uuid.uuid4().hex)

    # What is

    async def view(self) -> dict[str, Any]:
        """The pool as JSON: what a snapshot has, its pipelines and its devices."""
        found: dict[str, Any] = (await self._get("")).json
        return found

    async def snapshot(self) -> Snapshot:
        return read_snapshot((await self._get("")).json)

    async def events(self) -> list[SharingEvent]:
        """What the scheduler decided and saw, oldest first; times are seconds since 1970."""
        found = [from_wire(PoolEvent, one, strict=False) for one in (await self._get("/events")).json["items"]]
        return [
            SharingEvent(
                datetime.fromisoformat(one.at).timestamp(),
                *(one.kind, one.pipeline, one.text, one.cluster, one.ranks, one.gpus),
            )
            for one in found
        ]

    async def reports(self) -> dict[str, ProgressReport]:
        """The latest report of each pipeline, counted or not."""
        found = (await self._get("/reports")).json["items"]
        return {one["pipeline"]: flows.read(ProgressReport, one) for one in found}

    # What hook runners need

    async def next_action(self, pipeline: str, after: int) -> Action | None:
        params = {"wait": f"{LONG_POLL_S:g}", "after": str(after)}
        path, headers = f"{self._path(pipeline)}/actions", self._session(pipeline)
        request = HttpRequest("GET", path, params, headers=headers, timeout_s=LONG_POLL_S + SILENCE_S)
        answer = await self._driver.run(flows.call(request))
        return None if answer.status == 204 else flows.read(Action, answer.json)

    async def answer(self, pipeline: str, action: Action, answer: ActionAnswer) -> None:
        await self._post(pipeline, f"actions/{quote(action.id, safe='')}", to_wire(answer), uuid.uuid4().hex)

    async def attach(self, pipeline: str) -> None:
        await self._put(pipeline, _attaching(self._forms[pipeline]), 0.0, self._sessions[pipeline])

    # Calls

    def _path(self, pipeline: str) -> str:
        return f"{self._root}/pipelines/{quote(pipeline, safe='')}"

    async def _get(self, path: str) -> Response:
        return await self._call(HttpRequest("GET", self._root + path))

    def _session(self, pipeline: str) -> dict[str, str]:
        return {SESSION: self._sessions[pipeline]} if pipeline in self._sessions else {}

    async def _post(
        self, pipeline: str, what: str, body: Mapping[str, Any], key: str, wait_s: float | None = None
    ) -> Response:
        params = {} if wait_s is None else {"wait": f"{wait_s:.3f}"}
        # The key also where the server ignores it: it says that repeating does no harm.
        headers = {"Idempotency-Key": key, **self._session(pipeline)}
        path, timeout_s = f"{self._path(pipeline)}/{what}", (wait_s or 0.0) + SILENCE_S
        return await self._call(HttpRequest("POST", path, params, json=body, headers=headers, timeout_s=timeout_s))

    async def _call(self, request: HttpRequest) -> Response:
        """One call, repeated while a server that was there before is away."""
        clock: Callable[[], float] = asyncio.get_running_loop().time
        until = clock() + PATIENCE_S
        for failures in itertools.count(1):
            try:
                return await self._driver.run(flows.call(request))
            except (Unavailable, SchedulerStopped):
                if not self._link.answered or clock() >= until:
                    raise
            await asyncio.sleep(AWAY.after(failures))
        raise AssertionError("it goes on until it returns")


@functools.cache
def _process(pid: int) -> str:
    """What this process calls itself; a forked child is another one."""
    return uuid.uuid4().hex


def tenant_of(env: Mapping[str, str]) -> Tenant:
    """This process, and the training and the round of which it is a rank, as whoever started it says."""
    process = _process(os.getpid())
    training, number = env.get("MUSTER_RUN_ID", ""), env.get("MUSTER_ROUND", "")
    if not re.fullmatch(NAME, training) or not re.fullmatch("[0-9]{1,9}", number):
        return Tenant(process)
    return Tenant(process, training, int(number))


def _shown_tenant(tenant: Tenant) -> dict[str, str]:
    """As headers: a server of an earlier version ignores them."""
    said = {PROCESS: tenant.process, TRAINING: tenant.training, ROUND: tenant.round}
    return {header: str(value) for header, value in said.items() if value is not None}


def _form(clusters: Mapping[str, ClusterSpec], weight: float, *, vacated: bool) -> Registration:
    wrong = [
        Problem(f"clusters.{name}", "must be a ClusterSpec") for name, one in clusters.items() if not _is_spec(one)
    ]
    if wrong:
        raise InvalidRequest(f"{wrong[0].field}: {wrong[0].message}", problems=tuple(wrong))
    forms = {name: ClusterForm.of(spec) for name, spec in clusters.items()}
    return Registration(forms, weight, admit=False, vacated=vacated)


def _is_spec(value: object) -> bool:
    return isinstance(value, ClusterSpec)


def _attaching(form: Registration) -> Registration:
    """The same pipeline, but only if it is still there: what it holds must not be taken back unnoticed."""
    return Registration(form.clusters, form.weight, form.admit, form.vacated, only_attach=True)


def _shown(priority: Priority | int) -> str:
    problems = priority_problems(priority)
    found = read_priority(priority)
    if problems or found is None:
        raise InvalidRequest(f"{priority!r} is not a priority", problems=problems)
    return found.name

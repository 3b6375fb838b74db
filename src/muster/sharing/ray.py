"""How is a scheduler reached from anywhere in a Ray cluster? By name: it is a detached actor on the head node.

`connect` finds it or creates it. The handle has the methods of `Scheduler`; each may be made again without harm, so
a call that a crash of the actor has cut off is repeated once Ray has restarted it. What runs inside the actor is in
`ray_actor`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Mapping
from pathlib import Path
from typing import Any

from muster.errors import GrantTimeout, InvalidRequest, SchedulerStopped, Unavailable, how_to_install

try:
    import ray
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"muster.sharing.ray needs Ray: {how_to_install('ray')}") from error
from ray.exceptions import ActorDiedError, ActorUnavailableError

from muster.sharing import pool_log, ray_actor, ray_notes
from muster.sharing.ray_actor import Reply, SchedulerActor
from muster.sharing.ray_notes import NodeSlot, RaySettings
from muster.types.sharing import (
    GENERATION_CLUSTER,
    ClusterSpec,
    Gpu,
    Pool,
    Priority,
    ProgressReport,
    Released,
    SharingEvent,
    Snapshot,
    Tenant,
)

__all__ = ["NAME", "NAMESPACE", "NodeSlot", "SchedulerHandle", "connect"]

NAMESPACE = "muster"
NAME = "scheduler"
MAX_WAITING = 10_000  # calls inside the actor at once; each request that waits is one
FIND_ATTEMPTS = 10  # a killed actor keeps its name for a moment
RETRY_S = 0.1
RETRIES = 300  # in a row, before a scheduler that Ray keeps restarting counts as gone
LONG_S = 5.0  # a call that lasted so long had reached the scheduler: its failure is a new one


def connect(
    pool: Pool | None = None,
    address: str | None = None,
    journal: Path | str | None = None,
    *,
    name: str = NAME,
    hook_timeout_s: float | None = None,
    min_turn_s: float | None = None,
    reattach_timeout_s: float | None = None,
) -> SchedulerHandle:
    """Find the scheduler of that name in the cluster, or create it from its journal.

    Without a pool the cluster's own GPUs make one. Without a journal it is in MUSTER_HOME on the head node. What it
    was made with stays for as long as the Ray cluster does; asking for another pool or journal then is an error.
    Blocks: inside an async actor use `await asyncio.to_thread(connect)`.
    """
    _join(address)
    path = None if journal is None else str(Path(journal).expanduser().absolute())
    wanted = RaySettings(pool, path, hook_timeout_s, min_turn_s, reattach_timeout_s)
    return SchedulerHandle(name, _found_or_created(name, wanted))


class SchedulerHandle:
    """A scheduler elsewhere in the cluster. May be handed to tasks and actors."""

    def __init__(self, name: str, actor: Any) -> None:
        self.name = name
        self._actor = actor

    # Life

    async def start(self) -> None:
        """After a stop or a kill: have it again, from its journal."""
        self._actor = await asyncio.to_thread(_found_or_created, self.name, RaySettings())

    async def stop(self) -> None:
        """Stop the scheduler and end its actor, for everybody. Its journal stays."""
        await self._call("stop")
        ray.kill(self._actor)
        with contextlib.suppress(ActorDiedError):
            while True:  # Ray ends it a moment later: until then it would still answer others
                with contextlib.suppress(ActorUnavailableError):
                    await ray_actor.finished(self._actor.settings.remote())
                await asyncio.sleep(RETRY_S)

    # Pipelines

    async def register_pipeline(
        self,
        pipeline: str,
        clusters: Mapping[str, ClusterSpec],
        hooks: Any = None,
        weight: float = 1.0,
        *,
        tenant: Tenant | None = None,
    ) -> None:
        """`hooks` is the handle of an actor with `shrink` and `expand`, and `vacated` if it can tell."""
        problems = ray_actor.hook_problems(hooks)
        if problems:
            raise InvalidRequest(f"hooks of {pipeline!r}: {problems[0].message}", problems=problems)
        await self._call("register_pipeline", pipeline, dict(clusters), hooks, weight, tenant=tenant)

    async def admit_pipeline(self, pipeline: str) -> None:
        await self._call("admit_pipeline", pipeline)

    async def unregister_pipeline(self, pipeline: str, why: str = "") -> None:
        await self._call("unregister_pipeline", pipeline, why)

    async def kill_pipeline(self, pipeline: str, why: str = "", force: bool = False) -> Released:
        released: Released = await self._call("kill_pipeline", pipeline, why, force)
        return released

    async def quarantine_pipeline(self, pipeline: str, why: str) -> None:
        await self._call("quarantine_pipeline", pipeline, why)

    async def lose_node(self, node: int, why: str = "node-lost") -> None:
        await self._call("lose_node", node, why)

    async def restore_node(self, node: int) -> None:
        await self._call("restore_node", node)

    # Requests and releases

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
        more = {"step_target_estimate": step_target_estimate, "timeout": timeout, "rollout_id": rollout_id}
        return await self._grant(pipeline, cluster, self._call("request_gpus", pipeline, cluster, priority, **more))

    async def notify_release_then_request_gpus(
        self,
        pipeline: str,
        release: str,
        request: str,
        priority: Priority,
        step_target_estimate: int | None = None,
        timeout: float | None = None,
    ) -> list[Gpu]:
        more = {"step_target_estimate": step_target_estimate, "timeout": timeout}
        call = self._call("notify_release_then_request_gpus", pipeline, release, request, priority, **more)
        return await self._grant(pipeline, request, call)

    async def _grant(self, pipeline: str, cluster: str, call: Awaitable[list[Gpu]]) -> list[Gpu]:
        """Return the granted GPUs; log the grant, and a long wait."""
        async with pool_log.logged_wait(self.snapshot, pipeline, cluster):
            gpus = await call
        pool_log.log_grant(pipeline, cluster, gpus)
        return gpus

    async def notify_release_gpus(self, pipeline: str, cluster: str) -> Released:
        return await self._released(pipeline, cluster, self._call("notify_release_gpus", pipeline, cluster))

    async def await_release_gpus(
        self, pipeline: str, cluster: str = GENERATION_CLUSTER, timeout: float | None = None
    ) -> Released:
        call = self._call("await_release_gpus", pipeline, cluster, timeout=timeout)
        return await self._released(pipeline, cluster, call)

    async def _released(self, pipeline: str, cluster: str, call: Awaitable[Released]) -> Released:
        """Return the released GPUs; log a long wait."""
        async with pool_log.logged_wait(self.snapshot, pipeline, cluster, is_release=True):
            return await call

    # Progress

    async def report_progress(self, report: ProgressReport) -> str:
        """Say how far a rollout is. Why that was not counted, "" if it was."""
        uncounted: str = await self._call("report_progress", report)
        return uncounted

    async def clear_progress(self, pipeline: str) -> None:
        await self._call("clear_progress", pipeline)

    # What is

    async def snapshot(self) -> Snapshot:
        snapshot: Snapshot = await self._call("snapshot")
        return snapshot

    async def events(self) -> list[SharingEvent]:
        events: list[SharingEvent] = await self._call("events")
        return events

    async def reports(self) -> dict[str, ProgressReport]:
        reports: dict[str, ProgressReport] = await self._call("reports")
        return reports

    async def nodes(self) -> tuple[NodeSlot, ...]:
        """Which Ray node has which GPUs, for placing a pipeline's workers."""
        slots: tuple[NodeSlot, ...] = await self._call("nodes")
        return slots

    # Calls

    async def _call(self, operation: str, *arguments: Any, **named: Any) -> Any:
        """Ask, and ask again when a crash of the actor has cut the call off."""
        clock = asyncio.get_running_loop().time
        timeout: float | None = named.get("timeout")
        until = None if timeout is None else clock() + timeout
        failed = 0
        while True:
            began = clock()
            try:
                answer: Reply = await ray_actor.finished(self._actor.call.remote(operation, arguments, named))
            except ActorUnavailableError:
                failed = failed + 1 if clock() - began < LONG_S else 1
                if failed > RETRIES:
                    raise SchedulerStopped(f"scheduler {self.name!r} does not come back after a crash") from None
            except ActorDiedError:
                self._actor = await asyncio.to_thread(self._successor)
            else:
                if answer.error is not None:
                    raise answer.error
                return answer.value
            if until is not None:
                named["timeout"] = until - clock()
                if named["timeout"] <= 0:
                    raise GrantTimeout(f"the scheduler was restarting, and did not answer within {timeout:g} s")
            await asyncio.sleep(RETRY_S)

    def _successor(self) -> Any:
        """The actor that has taken a killed one's place."""
        found = _found(self.name)
        if found is None or found == self._actor:
            raise SchedulerStopped(f"scheduler {self.name!r} was killed", hint="connect again: it has its journal")
        return found


# Parts -------------------------------------------------------------------------------------------


def _join(address: str | None) -> None:
    """Be part of the cluster."""
    if address is not None and address.startswith("ray://"):
        raise InvalidRequest("Ray's client protocol cannot wait for calls: connect from a process inside the cluster")
    if not ray.is_initialized():
        try:
            ray.init(address=address or "auto")
        except ConnectionError as error:
            raise Unavailable(f"no Ray cluster at {address or 'the default address'}: {error}") from error
        return
    there = ray.get_runtime_context().gcs_address
    if address not in (None, "auto", there):
        raise InvalidRequest(f"this process is part of the Ray cluster at {there}, not of {address}")


def _found(name: str) -> Any:
    try:
        return ray.get_actor(name, namespace=NAMESPACE)
    except ValueError:
        return None


def _found_or_created(name: str, wanted: RaySettings) -> Any:
    """Ray gives a name to one actor only, so two who come at once get the same one."""
    died: Exception | None = None
    for _ in range(FIND_ATTEMPTS):
        actor = _found(name) or _created(name, wanted)
        try:
            answer: Reply = ray.get(actor.settings.remote())
        except (ActorDiedError, ActorUnavailableError) as error:
            died = error
            continue
        if answer.error is not None:
            ray.kill(actor)  # it could not start: the next one may
            raise answer.error
        ray_notes.merged(answer.value, wanted)
        return actor
    raise SchedulerStopped(f"scheduler {name!r} died {FIND_ATTEMPTS} times while it started: {died}")


def _created(name: str, wanted: RaySettings) -> Any:
    remote: Any = ray.remote(SchedulerActor)
    return remote.options(
        name=name,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        max_restarts=-1,
        max_concurrency=MAX_WAITING,
        num_cpus=0,
        resources={"node:__internal_head__": 0.001},  # the journal is there
    ).remote(name, wanted)

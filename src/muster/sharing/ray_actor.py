"""What runs inside the scheduler's Ray actor? A Scheduler, and watchers over the nodes and the pipelines' actors.

The actor lives on the head node. Ray restarts it after a crash; it then takes up its journal, calls the pipelines'
actors again by the handles that it has kept, and goes on. `muster.sharing.ray` is the way to it.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import functools
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.actor import ActorHandle
from ray.exceptions import ActorUnavailableError, RayActorError, RayError, RayTaskError

from muster import files
from muster.core.sharing import leases
from muster.errors import AlreadyExists, InvalidRequest, JournalUnusable, MusterError, NotFound
from muster.sharing import ray_notes
from muster.sharing.ray_notes import Contact, LivingNode, NodeSlot, Notes, RaySettings
from muster.sharing.scheduler import Scheduler
from muster.types.codec import Problem
from muster.types.sharing import ClusterSpec, PipelineId, Pool, Released, Tenant

log = logging.getLogger("muster.sharing")

NODE_LABEL = "muster.io/node"  # names a node; without it its Ray node name does, which is its address by default
NODE_LOST = "node-lost"
WATCH_S = 1.0  # between two looks at the nodes, and at each pipeline's actor
ASK_S = 2.0  # how long an actor may take to say that it is the process that it was: it may be busy with this very call
PATIENCE_S = 30.0  # how long another one may take to say that it lives, or Ray to say that it does not
ASK_AGAIN_S = 0.2
LOCKED_S = 2.0  # how long a killed predecessor may take to let go of the journal
OPERATIONS = (
    *("admit_pipeline", "quarantine_pipeline", "request_gpus", "notify_release_then_request_gpus"),
    *("notify_release_gpus", "await_release_gpus", "report_progress", "clear_progress"),
    *("snapshot", "events", "reports", "lose_node", "restore_node"),
)

_pickle: Any = ray.cloudpickle


class ActorDead(Exception):
    """The pipeline's actor is gone."""


@dataclass(frozen=True)
class Reply:
    """Errors travel as values, so that they arrive as what they are and not wrapped in Ray's own."""

    value: Any = None
    error: MusterError | None = None


async def finished(ref: Any) -> Any:
    """The result of a remote call. Cancelling this cancels the call, and waits until it has really ended."""
    future = asyncio.wrap_future(ref.future())
    try:
        return await asyncio.shield(future)
    except asyncio.CancelledError:
        ray.cancel(ref)
        await asyncio.wait({future})
        future.exception()
        raise


class ActorHooks:
    """A pipeline's hooks, when they are methods of an actor; its methods may be sync or async."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor
        if hasattr(actor, "vacated"):
            self.vacated = functools.partial(self._call, "vacated")

    async def shrink(self, ranks: Sequence[int], /) -> None:
        await self._call("shrink", list(ranks))

    async def expand(self, ranks: Mapping[int, Sequence[int]], /) -> None:
        await self._call("expand", {rank: list(gpus) for rank, gpus in ranks.items()})

    async def _call(self, method: str, argument: object) -> Any:
        try:
            return await finished(getattr(self.actor, method).remote(argument))
        except RayTaskError as error:
            raise error.cause or error from None
        except RayActorError as error:
            raise ActorDead(str(error).splitlines()[0]) from None


def hook_problems(hooks: object) -> tuple[Problem, ...]:
    if not isinstance(hooks, ActorHandle):
        return (Problem("hooks", f"must be a Ray actor's handle, not {type(hooks).__name__}: it is called from afar"),)
    missing = [name for name in ("shrink", "expand") if not hasattr(hooks, name)]
    return tuple(Problem("hooks", f"the actor must have a method {name}") for name in missing)


def process_of(actor: object) -> str:
    """Runs inside a pipeline's actor: which process that is. One that Ray has restarted is another."""
    return str(ray.get_runtime_context().get_worker_id())


class SchedulerActor:
    """The actor's class. Calls wait until it has started."""

    def __init__(self, name: str, wanted: RaySettings) -> None:
        self._session = ray.get_runtime_context().get_session_name()
        self._place = files.home() / "ray" / self._session / f"{name}.json"
        self._watches: dict[str, asyncio.Task[None]] = {}
        self._started = asyncio.get_running_loop().create_task(self._start(wanted))

    async def settings(self) -> Reply:
        """How it was made; or why it could not be."""
        return await _answered(self._settled())

    async def call(self, operation: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Reply:
        return await _answered(self._carry_out(operation, arguments, named))

    async def _settled(self) -> RaySettings:
        await asyncio.shield(self._started)
        return self._settings

    async def _carry_out(self, operation: str, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        await asyncio.shield(self._started)
        own: Mapping[str, Callable[..., Awaitable[Any]]] = {
            "register_pipeline": self._register,
            "unregister_pipeline": self._unregister,
            "kill_pipeline": self._kill,
            "nodes": self._nodes,
            "stop": self._stop,
        }
        if operation not in own and operation not in OPERATIONS:
            raise InvalidRequest(f"a scheduler on Ray has no operation {operation!r}")
        found = own.get(operation) or getattr(self._scheduler, operation)
        result = found(*arguments, **named)
        return await result if inspect.isawaitable(result) else result

    # Life

    async def _start(self, wanted: RaySettings) -> None:
        settings = ray_notes.merged(ray_notes.read_settings(self._place), wanted)
        journal = settings.journal or str(self._place.with_suffix(".journal"))
        self._notes_file = Path(f"{journal}.ray")
        self._notes = ray_notes.read_notes(self._notes_file, self._session)
        self._pool = settings.pool or self._notes.pool or _pool_of(await _ray_nodes())
        self._settings = replace(settings, journal=journal, pool=self._pool)
        self._scheduler = await _scheduler(self._settings)
        ray_notes.write_settings(self._place, self._settings)
        self._write(replace(self._notes, pool=self._pool))
        await self._look_at_nodes()  # before anything is granted
        self._node_watch = asyncio.create_task(self._watch_nodes())
        self._node_watch.add_done_callback(_told)
        for pipeline, contact in self._notes.contacts.items():
            if pipeline in self._scheduler.shares.pipelines:
                self._watch(pipeline, _loaded(contact), contact)

    async def _stop(self) -> None:
        for task in (self._node_watch, *self._watches.values()):
            task.cancel()
        await self._scheduler.stop()

    # Pipelines

    async def _register(
        self,
        pipeline: str,
        clusters: Mapping[str, ClusterSpec],
        hooks: object,
        weight: float = 1.0,
        tenant: Tenant | None = None,
    ) -> None:
        problems = hook_problems(hooks)
        if problems:
            raise InvalidRequest(f"hooks of {pipeline!r}: {problems[0].message}", problems=problems)
        adapter = ActorHooks(hooks)
        await self._must_not_be_killed(pipeline, adapter)
        process = await self._supersede(pipeline, adapter)
        await self._scheduler.register_pipeline(pipeline, clusters, adapter, weight, tenant=tenant)
        contact = Contact(base64.b64encode(_pickle.dumps(hooks)).decode(), process)
        self._note_contact(pipeline, contact)
        self._watch(pipeline, adapter, contact)

    async def _supersede(self, pipeline: str, hooks: ActorHooks) -> str:
        """What a dead actor held ends before another comes in its place; one that lives keeps its place.

        Which process these hooks are, if they are those that are there.
        """
        there = self._scheduler.shares.pipelines.get(PipelineId(pipeline))
        if there is None or there.quarantined:
            return ""
        contact = self._notes.contacts.get(pipeline)
        if contact is None:  # its actor was of a Ray cluster that is gone
            await self._give_up(pipeline)
            return ""
        before = _loaded(contact).actor
        same = before == hooks.actor
        process = await _process_within(before, ASK_S if same else PATIENCE_S)
        if process == "" or (process and contact.process not in ("", process)):
            await self._give_up(pipeline)
        elif not same:
            raise AlreadyExists(
                f"{pipeline} has another actor, which {'lives' if process else 'does not answer and may live'}",
                hint="end that actor, or unregister the pipeline, then register again",
            )
        return process or ""

    async def _give_up(self, pipeline: str) -> None:
        with contextlib.suppress(NotFound):  # unregistered meanwhile
            await self._scheduler.quarantine_pipeline(pipeline, "its actor died, and another comes in its place")

    async def _unregister(self, pipeline: str, why: str = "") -> None:
        await self._scheduler.unregister_pipeline(pipeline, why)
        self._forget(pipeline)
        self._note_contact(pipeline, None)

    async def _kill(self, pipeline: str, why: str = "", force: bool = False) -> Released:
        contact = self._notes.contacts.get(pipeline)
        process = contact.process if contact is not None else ""
        if contact is not None and not process:
            process = await _process_within(_loaded(contact).actor, ASK_S) or ""
        if process:
            await self._scheduler.bar_process(pipeline, process, why or "no reason was given")
        released = await self._scheduler.kill_pipeline(pipeline, why, force)
        if PipelineId(pipeline) not in self._scheduler.shares.pipelines:
            self._forget(pipeline)
            self._note_contact(pipeline, None)
        return released

    async def _must_not_be_killed(self, pipeline: str, hooks: ActorHooks) -> None:
        if any(one.pipeline == pipeline for one in self._scheduler.shares.killed):
            process = await _process_within(hooks.actor, ASK_S)
            leases.check_not_killed(self._scheduler.shares, PipelineId(pipeline), Tenant(process or None))

    def _watch(self, pipeline: str, hooks: ActorHooks, contact: Contact) -> None:
        self._forget(pipeline)
        self._watches[pipeline] = asyncio.create_task(self._watched(pipeline, hooks, contact))
        self._watches[pipeline].add_done_callback(_told)

    def _forget(self, pipeline: str) -> None:
        before = self._watches.pop(pipeline, None)
        if before is not None:
            before.cancel()

    async def _watched(self, pipeline: str, hooks: ActorHooks, contact: Contact) -> None:
        """Call the actor now and then, for as long as its hooks count.

        A call to a busy actor just waits, and fails when the actor dies: slowness is not taken for death.
        """
        while True:
            why = ""
            try:
                process = await finished(hooks.actor.__ray_call__.remote(process_of))
            except ActorUnavailableError:
                await asyncio.sleep(WATCH_S)
                continue
            except RayActorError as error:
                process, why = "", f"its actor died: {str(error).splitlines()[0]}"
            if process and contact.process not in ("", process):
                why = "its actor died, and Ray has restarted it"
            there = self._scheduler.shares.pipelines.get(PipelineId(pipeline))
            if there is None or (there.quarantined and not there.killed):
                return
            if there.killed:
                if why:
                    await self._unregister(pipeline, f"it was killed; {why}")
                    return
                await asyncio.sleep(WATCH_S)
                continue
            if why:
                await self._scheduler.quarantine_pipeline(pipeline, why)
                return
            contact = replace(contact, process=process)
            self._note_contact(pipeline, contact)
            if there.detached_since is not None:
                await self._attach(pipeline, hooks)
            await asyncio.sleep(WATCH_S)

    async def _attach(self, pipeline: str, hooks: ActorHooks) -> None:
        """After a restart: the actor is the same process as before, so it is called again as before."""
        there = self._scheduler.shares.pipelines[PipelineId(pipeline)]
        await self._scheduler.register_pipeline(pipeline, there.clusters, hooks, there.weight)

    def _note_contact(self, pipeline: str, contact: Contact | None) -> None:
        others = {name: one for name, one in self._notes.contacts.items() if name != pipeline}
        self._write(replace(self._notes, contacts=others if contact is None else {**others, pipeline: contact}))

    def _write(self, notes: Notes) -> None:
        if notes != self._notes:
            ray_notes.write_notes(self._notes_file, notes)
            self._notes = notes

    # Nodes

    async def _nodes(self) -> tuple[NodeSlot, ...]:
        return self._notes.slots

    async def _watch_nodes(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            try:
                await self._look_at_nodes()
            except (RayError, OSError) as error:
                log.warning("the nodes could not be looked at: %s", error)

    async def _look_at_nodes(self) -> None:
        """Compare who sits where with what the scheduler thinks; the state says what is lost, so nothing is missed."""
        pool = self._pool
        count = -(-pool.gpus // pool.gpus_per_node)
        before = self._notes.slots
        after = ray_notes.placed(before, await _present(), count)
        if not after:
            return  # no node claims GPUs: the pool's are mere slots
        for index in range(count):
            had = before[index].node_id if index < len(before) else ""
            has = after[index].node_id if index < len(after) else ""
            if not self._is_lost(index) and (not has or had not in ("", has)):
                await self._scheduler.lose_node(index, NODE_LOST)
            if has and self._is_lost(index):
                await self._scheduler.restore_node(index)
        self._write(replace(self._notes, slots=after))

    def _is_lost(self, node: int) -> bool:
        return node * self._pool.gpus_per_node in self._scheduler.shares.lost_gpus


# Parts -------------------------------------------------------------------------------------------


async def _process_within(actor: Any, timeout_s: float) -> str | None:
    """Which process an actor is now; "" if it is dead, None if that cannot be told in time: it is busy, or away."""
    clock = asyncio.get_running_loop().time
    until = clock() + timeout_s
    while True:
        asked = asyncio.wrap_future(actor.__ray_call__.remote(process_of).future())
        asked.add_done_callback(lambda done: done.cancelled() or done.exception())  # it may come too late to be read
        await asyncio.wait({asked}, timeout=until - clock())
        if not asked.done():
            return None
        try:
            return str(asked.result())
        except ActorUnavailableError:
            if clock() > until:
                return None
            await asyncio.sleep(ASK_AGAIN_S)
        except RayActorError:
            return ""


async def _answered(work: Any) -> Reply:
    try:
        return Reply(await work)
    except MusterError as error:
        return Reply(error=error)
    except OSError as error:
        return Reply(error=JournalUnusable(f"the journal cannot be written: {error}"))


def _told(watch: asyncio.Task[None]) -> None:
    """A watch that ends with an error must not do so in silence."""
    if not watch.cancelled() and (error := watch.exception()) is not None:
        log.error("a watch has ended", exc_info=error)


async def _scheduler(settings: RaySettings) -> Scheduler:
    limits = {name: getattr(settings, name) for name in ("hook_timeout_s", "min_turn_s", "reattach_timeout_s")}
    given = {name: value for name, value in limits.items() if value is not None}
    assert settings.pool is not None
    scheduler = Scheduler(settings.pool, settings.journal, logs_grants=False, **given)
    loop = asyncio.get_running_loop()
    until = loop.time() + LOCKED_S
    while True:
        try:
            await scheduler.start()
            return scheduler
        except JournalUnusable:
            if loop.time() > until:
                raise
            await asyncio.sleep(0.05)


def _loaded(contact: Contact) -> ActorHooks:
    return ActorHooks(_pickle.loads(base64.b64decode(contact.handle)))


async def _ray_nodes() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = await asyncio.to_thread(ray.nodes)
    return [node for node in found if node["Alive"]]


async def _present() -> list[LivingNode]:
    return [
        LivingNode(node["Labels"].get(NODE_LABEL) or node["NodeName"], node["NodeID"])
        for node in await _ray_nodes()
        if node["Resources"].get("GPU", 0) >= 1 or NODE_LABEL in node["Labels"]
    ]


def _pool_of(nodes: list[dict[str, Any]]) -> Pool:
    """The pool that the cluster's own GPUs make."""
    counts = sorted({int(gpus) for node in nodes if (gpus := node["Resources"].get("GPU", 0)) >= 1})
    if len(counts) != 1:
        told = f"its nodes have {', '.join(map(str, counts))} GPUs" if counts else "none of its nodes has GPUs"
        raise InvalidRequest(f"the pool cannot be told from the cluster: {told}", hint="give connect a pool")
    nodes_with = sum(node["Resources"].get("GPU", 0) >= 1 for node in nodes)
    return Pool(gpus=nodes_with * counts[0], gpus_per_node=counts[0])

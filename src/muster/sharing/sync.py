"""How does a pipeline whose loop does not await take part in a pool? With `connect`, and blocks that block.

    pool = connect("p1", gpus=[0, 1], engine=engine)
    with pool.generation(step, n) as rollout:
        with rollout.turn() as turn: ...
    with pool.training(): ...

Every rank of the pipeline makes the same calls. Rank 0 speaks to the scheduler (`spokesman`), the others follow
(`crew`); a failure of one is raised on all. An event loop on a thread of its own answers the scheduler meanwhile.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from muster.background import LoopThread
from muster.errors import InvalidRequest, MusterError, RequestRefused, SchedulerStopped, SharingError, Unavailable
from muster.sdk.drive import Link
from muster.sdk.find import Search
from muster.sharing import crew as crews
from muster.sharing import families, pool_log
from muster.sharing.api import SchedulerApi
from muster.sharing.crew import Crew
from muster.sharing.crew_hooks import CrewHooks, CrewWire
from muster.sharing.devices import Devices
from muster.sharing.gate import Gate, Turn
from muster.sharing.hook_runner import HookRunner
from muster.sharing.hooks import PipelineHooks
from muster.sharing.remote import RemoteScheduler
from muster.sharing.spokesman import GIVE_BACK_S, LOOK_S, Spokesman
from muster.types.sharing import GENERATION_CLUSTER, ClusterSpec, Gpu, Priority

T = TypeVar("T")

TRAINING_CLUSTER = "actor_train"
WITHDRAW_S = 10.0  # how long an interrupted call may take to be withdrawn
PROGRESS_S = 0.5

log = logging.getLogger("muster.sharing")
_numbers = itertools.count()  # of pools in this process; ranks make theirs in the same order
_open: set[SharedPool] = set()  # held until they are closed: one that nobody knows any more still has its lease


def connect(
    pipeline: str,
    *,
    gpus: Sequence[Gpu] | None = None,
    clusters: Mapping[str, ClusterSpec] | None = None,
    engine: PipelineHooks | None = None,
    url: str | None = None,
    token: str | None = None,
    pool: str = "default",
    weight: float = 1.0,
    crew: Crew | None = None,
) -> SharedPool:
    """A pipeline of a control plane's pool, on every rank of it.

    `gpus`: it generates and trains on these, all or none at a time. `clusters` says it stage by stage. Without an
    `engine` one has to be attached before the first stage (`attach`, or `muster.sharing.trl.share`); until then this
    process holds its training GPUs, since it will load a model. Before CUDA has begun, the pipeline's GPUs are made the
    visible ones.
    """
    maps = _maps(gpus, clusters)
    loop = LoopThread(f"pool of {pipeline}")
    loop.start()
    made: SharedPool | None = None
    try:
        scheduler = RemoteScheduler(Link(Search.of(url, token)), pool)
        shown = asyncio.run_coroutine_threadsafe(scheduler.view(), loop.loop).result()
        devices = Devices(_all_gpus(maps), shown["devices"])
        _check_gpus(maps, int(shown["gpus"]))
        devices.make_visible()
        made = SharedPool(scheduler, loop, pipeline, maps, devices, engine=engine, weight=weight, crew=crew)
        if engine is None:
            made.prepare()
        return made
    except BaseException:
        if made is None:
            loop.stop()
        else:
            made.close()
        raise


class SharedPool:
    """One rank's side of a pipeline in a pool. Its stages are taken by one thread, one after the other."""

    def __init__(
        self,
        scheduler: SchedulerApi,
        loop: LoopThread,
        pipeline: str,
        clusters: Mapping[str, ClusterSpec],
        devices: Devices,
        *,
        engine: PipelineHooks | None = None,
        weight: float = 1.0,
        crew: Crew | None = None,
        owned: bool = True,
    ) -> None:
        self.pipeline, self.clusters, self.devices = pipeline, dict(clusters), devices
        self.gate = Gate()
        self._scheduler, self._loop, self._weight, self._owned = scheduler, loop, weight, owned
        self._name = f"{pipeline}/{next(_numbers)}"
        self._given_crew = crew
        self._crew: Crew | None = None  # once joined
        self._spokesman: Spokesman | None = None  # of rank 0
        self._runner: HookRunner | None = None  # of others
        self._tasks: list[concurrent.futures.Future[Any]] = []
        self._stages = itertools.count()
        self._rollout: Rollout | None = None
        self._preparing: contextlib.ExitStack | None = None  # the training GPUs, until there is an engine
        self._broken = ""
        self._pid = os.getpid()
        if engine is not None:
            self.attach(engine)
        _open.add(self)

    # Life

    def attach(self, engine: PipelineHooks) -> None:
        """The engine that generates here, if it was not known before. Joins the pool, if all ranks can."""
        self._must_be_usable()
        self.gate.attach(engine)
        if self._given_crew is None and crews.found(self._name) is None:
            return
        if self._preparing is not None:
            self.run(engine.shrink(list(range(len(self._bundles())))))
            self._preparing.close()
            self._preparing = None
        self.join()
        if hasattr(self.gate, "vacated"):  # it was registered without
            self._joined().led("attach", lambda: self._spoken(lambda it: it.register()))

    def prepare(self) -> None:
        """Hold the training GPUs until an engine is attached; ranks that cannot reach each other yet do not."""
        if TRAINING_CLUSTER in self.clusters and (self._given_crew or crews.found(self._name)) is not None:
            with contextlib.ExitStack() as stack:
                stack.enter_context(self.training(Priority.INITIALIZATION))
                self._preparing = stack.pop_all()

    def join(self) -> None:
        """Register the pipeline; on all ranks. The first stage does it by itself."""
        self._must_be_usable()
        if self._crew is not None:
            return
        crew = self._given_crew or crews.found(self._name)
        if crew is None:
            raise InvalidRequest(
                "WORLD_SIZE says that there are other ranks, and torch.distributed is not initialised",
                hint="initialise it before the first stage",
            )
        self._start(_beating(crew))
        self._name_ranks(crew)
        if crew.leads:
            self._spokesman = self._spoken_for(crew)
        else:
            self._runner = self._loop.do(lambda: HookRunner(CrewWire(crew), self.pipeline, self.gate))
        try:
            crew.led("join", lambda: self._spoken(lambda it: it.register()))
        except BaseException:
            self._end_tasks()
            raise
        self._crew = crew

    def _name_ranks(self, crew: Crew) -> None:
        """Register the processes of all ranks, if they are on one machine."""
        if crew.alone or not isinstance(self._scheduler, RemoteScheduler):
            return
        scheduler = self._scheduler
        families.mark_this_process(crew.led("mark", lambda: scheduler.process))
        place = {"space": families.space(), "pid": os.getpid()}
        crew.post(f"process/{crew.rank}", place)
        if crew.leads:
            others = [crew.read(f"process/{rank}", of=rank, within_s=crew.meeting_s) for rank in range(1, crew.size)]
            are_here = all(other["space"] == place["space"] for other in others)
            scheduler.name_ranks([os.getpid(), *(other["pid"] for other in others)] if are_here else [])

    def _spoken_for(self, crew: Crew) -> Spokesman:
        hooks: PipelineHooks = self.gate if crew.alone else CrewHooks(crew, self.gate, self._bundles())
        return self._loop.do(lambda: Spokesman(self._scheduler, self.pipeline, self.clusters, hooks, self._weight))

    def _bundles(self) -> tuple[tuple[Gpu, ...], ...]:
        return self.clusters.get(GENERATION_CLUSTER, ClusterSpec()).bundles

    def close(self) -> None:
        """Give everything back and leave the pool. Is done at exit, too; more than once does no harm."""
        if self._pid != os.getpid() or self not in _open:
            return  # a forked child has no part in it
        _open.discard(self)
        try:
            if self._spokesman is not None and self._crew is not None and not self._broken:
                self._wait(self._spokesman.unregister(), GIVE_BACK_S)
        except (MusterError, TimeoutError) as error:
            log.warning("%s was not unregistered: %s", self.pipeline, error)
        finally:
            self._broken = self._broken or "it is closed"
            self._end_tasks()
            if self._owned:
                with contextlib.suppress(MusterError, TimeoutError):
                    self._wait(self._scheduler.stop(), WITHDRAW_S)
                self._loop.stop()

    def _end_tasks(self) -> None:
        for task in self._tasks:
            task.cancel()
        if self._runner is not None:
            self._wait(self._runner.stop(), WITHDRAW_S)
            self._runner = None

    def __enter__(self) -> SharedPool:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # Stages

    @contextlib.contextmanager
    def generation(self, step: str | int, n: int, timeout: float | None = None) -> Iterator[Rollout]:
        """`n` trajectories, of all ranks together, are to be generated. Blocks until GPUs were granted.

        Generate inside `rollout.turn()` only: what was granted may be taken back at any time. When the block is left,
        everything is down.
        """
        if self._rollout is not None:
            raise RequestRefused(f"{self.pipeline} is generating already")
        rollout = Rollout(self, n)
        with self._stage(
            lambda it: it.open(str(step), n, timeout),
            lambda it: it.close(rollout.take_done()),
            on_enter=f"generation {step}",
        ) as (key, gpus):
            rollout.begin(key, gpus)
            self._rollout = rollout
            watch = self._start(self._watch(rollout)) if self._spokesman is not None else None
            try:
                yield rollout
            finally:
                self._rollout = None
                if watch is not None:
                    watch.cancel()

    @contextlib.contextmanager
    def training(
        self,
        priority: Priority = Priority.ACTOR_TRAINING,
        cluster: str = TRAINING_CLUSTER,
        timeout: float | None = None,
    ) -> Iterator[Stage]:
        """Blocks until the whole cluster is granted; it is nobody else's until the block is left."""
        with self._stage(
            lambda it: it.request(cluster, priority, timeout), lambda it: it.release(cluster), on_enter=cluster
        ) as (_, gpus):
            yield Stage(self, gpus)

    def completed(self, n: int = 1) -> None:
        """So many trajectories of the open rollout are done, on this rank."""
        if self._rollout is None:
            raise RequestRefused(f"completed: {self.pipeline} has no rollout open", hint="it goes inside generation()")
        self._rollout.completed(n)

    @contextlib.contextmanager
    def _stage(
        self,
        begin: Callable[[Spokesman], Coroutine[Any, Any, list[Gpu]]],
        end: Callable[[Spokesman], Coroutine[Any, Any, None]],
        *,
        on_enter: str,
    ) -> Iterator[tuple[str, list[Gpu]]]:
        if self.gate.engine is None and self._preparing is not None:
            raise InvalidRequest(
                f"{self.pipeline} has no engine", hint="give connect an engine, or attach one before the first stage"
            )
        self.join()
        crew, key = self._joined(), f"stage/{next(self._stages)}"
        try:
            gpus = crew.led(f"{key}/in", lambda: self._spoken(begin))
        except BaseException as error:
            if not isinstance(error, SharingError):  # else all ranks have heard the same, and may go on
                self._break(f"{on_enter}: {error}")
            raise
        try:
            yield key, gpus
        except BaseException as error:
            problem = f"{on_enter}: {type(error).__name__}: {error}"[:500]
            with contextlib.suppress(MusterError):
                crew.left(key, problem)
            self._break(problem)
            self._end_after_failure(crew, key, end)
            raise
        crew.left(key)
        crew.led(f"{key}/over", lambda: self._ended(crew, key, end))

    def _ended(self, crew: Crew, key: str, end: Callable[[Spokesman], Coroutine[Any, Any, None]]) -> None:
        """Rank 0: nothing is given back before every rank has left, or is dead."""
        problems = [] if crew.alone else crew.all_left(key)
        self._spoken(end)
        if problems:
            self._break("; ".join(problems))
            raise SharingError(f"{self.pipeline} cannot go on: {'; '.join(problems)}"[:500])

    def _end_after_failure(self, crew: Crew, key: str, end: Callable[[Spokesman], Coroutine[Any, Any, None]]) -> None:
        if not crew.leads:
            return
        try:
            self._ended(crew, key, end)
        except (MusterError, TimeoutError) as error:  # what the block raised is what the caller has to know
            log.warning("%s: %s", self.pipeline, error)

    def _break(self, why: str) -> None:
        """Ranks that have gone different ways cannot act as one any more; a rank that is alone can go on."""
        if self._crew is not None and not self._crew.alone:
            self._broken = self._broken or why

    # What goes on beside

    async def _watch(self, rollout: Rollout) -> None:
        """Rank 0, while it generates: what the others have done, and whether anything can still be hoped for."""
        assert self._spokesman is not None
        looked = said = time.monotonic()
        while True:
            await asyncio.sleep(PROGRESS_S)
            try:
                if number := rollout.take_done():
                    await self._spokesman.completed(number)
                now = time.monotonic()
                if now - looked < LOOK_S or self.gate.awake:
                    continue
                looked, why = now, await self._spokesman.look()
                if now - said > pool_log.SAY_S:
                    pool_log.log.warning("%s: waits for a GPU to generate on: %s", self.pipeline, why)
                    said = now
            except (SchedulerStopped, Unavailable) as error:  # the control plane may come back
                log.warning("%s cannot be looked after: %s", self.pipeline, error.message)
            except MusterError as error:
                rollout.fail(error)
                return

    # Parts

    def _joined(self) -> Crew:
        assert self._crew is not None
        return self._crew

    def _must_be_usable(self) -> None:
        if self._pid != os.getpid():
            raise RequestRefused(
                f"this is a forked child: {self.pipeline} belongs to process {self._pid}", hint="connect here anew"
            )
        if self._broken:
            raise RequestRefused(f"{self.pipeline} cannot be used any more: {self._broken}")

    def _start(self, work: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        task = asyncio.run_coroutine_threadsafe(work, self._loop.loop)
        self._tasks = [one for one in self._tasks if not one.done()] + [task]
        return task

    def _spoken(self, say: Callable[[Spokesman], Coroutine[Any, Any, T]]) -> T:
        assert self._spokesman is not None
        return self._wait(say(self._spokesman))

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """On the pool's event loop, and wait for it: for engines that a stage moves itself."""
        self._must_be_usable()
        return self._wait(work)

    def _wait(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Blocks. What interrupts it, as Ctrl-C does, also ends what it waits for."""
        task = asyncio.run_coroutine_threadsafe(work, self._loop.loop)
        try:
            return task.result(timeout)
        except BaseException:
            if not task.done():
                task.cancel()
                concurrent.futures.wait({task}, timeout=WITHDRAW_S)
            raise


class Stage:
    """GPUs that are this pipeline's for as long as the block lasts."""

    def __init__(self, pool: SharedPool, gpus: Sequence[Gpu]) -> None:
        self.gpus = tuple(gpus)
        self.devices = pool.devices.of(gpus)


class Rollout:
    """An open rollout, on one rank. Nothing is generated outside of a turn."""

    def __init__(self, pool: SharedPool, target: int) -> None:
        self._pool, self.target = pool, target
        self.granted: tuple[Gpu, ...] = ()  # at first; turns know what there is now
        self._key = ""
        self._turn: Turn | None = None
        self._error: MusterError | None = None
        self._done = self._taken = 0

    def begin(self, key: str, granted: Sequence[Gpu]) -> None:
        self._key, self.granted = f"{key}/done", tuple(granted)

    @contextlib.contextmanager
    def turn(self, timeout: float | None = None) -> Iterator[Turn]:
        """Blocks until a bundle of this rank is awake. A shrink waits until the turn has ended: keep it short, or look
        at `interrupted()`. The scheduler waits two minutes, twice; then it takes the engine for broken."""
        if self._turn is not None:
            raise RequestRefused("a turn is taken already: the shrink would wait for both")
        pool = self._pool

        def check(waited_s: float) -> None:
            pool._must_be_usable()
            if self._error is not None:
                raise self._error
            if pool._rollout is not self:
                raise RequestRefused(f"the rollout of {pool.pipeline} is over")
            if timeout is not None and waited_s > timeout:
                raise TimeoutError(f"no bundle of {pool.pipeline} was awake within {timeout:g} s")

        with pool.gate.turn(check) as turn:
            self._turn = turn
            try:
                yield turn
            finally:
                self._turn = None

    def interrupted(self, after_s: float = 0.0) -> bool:
        """Whether the turn's GPUs are wanted back, for at least so long."""
        return self._turn is not None and self._turn.interrupted(after_s)

    @property
    def in_turn(self) -> bool:
        return self._turn is not None

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """Of the turn, or what is awake now."""
        if self._turn is not None:
            return self._turn.gpus
        return tuple(sorted(gpu for gpus in self._pool.gate.awake.values() for gpu in gpus))

    @property
    def devices(self) -> tuple[str, ...]:
        return self._pool.devices.of(self.gpus)

    def completed(self, n: int = 1) -> None:
        """So many trajectories are done, on this rank."""
        if isinstance(n, bool) or not isinstance(n, int) or n < 0:
            raise InvalidRequest(f"completed trajectories are counted in whole numbers, not by {n!r}")
        crew = self._pool._joined()
        if crew.alone:
            self._done += n
        else:
            crew.add(self._key, n)

    def take_done(self) -> int:
        """What was completed since this was asked last, on all ranks."""
        crew = self._pool._joined()
        done = self._done if crew.alone else crew.add(self._key, 0)
        new, self._taken = done - self._taken, done
        return new

    def fail(self, error: MusterError) -> None:
        """Nothing can be hoped for: whoever waits for a turn hears it."""
        self._error = error


async def _beating(crew: Crew) -> None:
    while not crew.alone:
        try:
            crew.beat()
        except MusterError:  # whoever waits for the others hears it, too
            await asyncio.sleep(crews.BEAT_S)
        await asyncio.sleep(min(crews.BEAT_S, crew.patience_s / 4))


def _maps(gpus: Sequence[Gpu] | None, clusters: Mapping[str, ClusterSpec] | None) -> Mapping[str, ClusterSpec]:
    if (gpus is None) == (clusters is None):
        raise InvalidRequest("say on which GPUs: either gpus, or clusters")
    if clusters is not None:
        return clusters
    assert gpus is not None
    if not gpus:
        raise InvalidRequest("gpus: at least one")
    return {TRAINING_CLUSTER: ClusterSpec(gpus), GENERATION_CLUSTER: ClusterSpec(gpus, tp_size=len(gpus))}


def _all_gpus(clusters: Mapping[str, ClusterSpec]) -> list[Gpu]:
    return sorted({gpu for spec in clusters.values() for gpu in spec.gpus})


def _check_gpus(clusters: Mapping[str, ClusterSpec], count: int) -> None:
    if strange := [gpu for gpu in _all_gpus(clusters) if not 0 <= gpu < count]:
        raise InvalidRequest(f"the pool has no GPU {strange[0]}: it has {count}, from 0")


def _close_all() -> None:
    for pool in list(_open):
        pool.close()


# Before executors end, which ordinary exit functions do not: an engine may need one to go down.
getattr(threading, "_register_atexit", atexit.register)(_close_all)

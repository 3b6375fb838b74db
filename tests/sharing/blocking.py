"""Pools for pipelines that block: a scheduler on a thread, or a control plane, and who used which GPU."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

from muster.background import LoopThread
from muster.sharing import ClusterSpec, Pool, Scheduler, Snapshot
from muster.sharing.crew import Crew
from muster.sharing.devices import VISIBLE, Devices
from muster.sharing.hooks import PipelineHooks
from muster.sharing.remote import RemoteScheduler
from muster.sharing.remote import connect as connect_remote
from muster.sharing.sync import SharedPool, connect
from tests.plane import Plane

T = TypeVar("T")
BOUND_S = 60.0
ONE = {"actor_train": ClusterSpec([0]), "actor_infer": ClusterSpec([0])}


class Engine:
    """Says which ranks are awake, and can be held up."""

    def __init__(self) -> None:
        self.awake: dict[int, tuple[int, ...]] = {}
        self.calls: list[str] = []
        self.held_up: threading.Event | None = None

    async def shrink(self, ranks: Sequence[int]) -> None:
        self.calls.append(f"shrink {sorted(ranks)}")
        while self.held_up is not None and not self.held_up.is_set():
            await asyncio.sleep(0.005)
        for rank in ranks:
            self.awake.pop(rank, None)

    async def expand(self, ranks: Mapping[int, Sequence[int]]) -> None:
        self.calls.append(f"expand {sorted(ranks)}")
        self.awake.update({rank: tuple(gpus) for rank, gpus in ranks.items()})


class PoolHouse(Protocol):
    """Where a pool is, and how pipelines that block come into it."""

    def pipeline(
        self,
        name: str,
        clusters: Mapping[str, ClusterSpec] = ...,
        engine: PipelineHooks | None = None,
        crew: Crew | None = None,
    ) -> SharedPool: ...

    def snapshot(self) -> Snapshot: ...

    def ask(self, work: Callable[[Any], Coroutine[Any, Any, T]]) -> T:
        """Something of the scheduler, from outside of any pipeline."""


class InProcess:
    def __init__(self, loop: LoopThread, scheduler: Scheduler) -> None:
        self.loop, self.scheduler = loop, scheduler
        self.pools: list[SharedPool] = []

    def pipeline(
        self,
        name: str,
        clusters: Mapping[str, ClusterSpec] = ONE,
        engine: PipelineHooks | None = None,
        crew: Crew | None = None,
    ) -> SharedPool:
        gpus = [gpu for spec in clusters.values() for gpu in spec.gpus]
        made = SharedPool(
            self.scheduler,
            self.loop,
            name,
            clusters,
            Devices(gpus, ()),
            engine=engine or Engine(),
            crew=crew,
            owned=False,
        )
        self.pools.append(made)
        return made

    def snapshot(self) -> Snapshot:
        return self.loop.do(self.scheduler.snapshot)

    def ask(self, work: Callable[[Any], Coroutine[Any, Any, T]]) -> T:
        return asyncio.run_coroutine_threadsafe(work(self.scheduler), self.loop.loop).result(BOUND_S)


@contextlib.contextmanager
def in_process(gpus: int = 4, **options: Any) -> Iterator[InProcess]:
    loop = LoopThread("scheduler")
    loop.start()
    scheduler = Scheduler(Pool(gpus, gpus), **{"min_turn_s": 0.01, **options})
    house = InProcess(loop, scheduler)
    try:
        asyncio.run_coroutine_threadsafe(scheduler.start(), loop.loop).result()
        yield house
    finally:
        for pool in house.pools:
            pool.close()
        asyncio.run_coroutine_threadsafe(scheduler.stop(), loop.loop).result()
        loop.stop()


class ControlPlane:
    def __init__(self, plane: Plane, loop: LoopThread, scheduler: RemoteScheduler) -> None:
        self.plane, self.loop, self.scheduler = plane, loop, scheduler
        self.pools: list[SharedPool] = []

    def pipeline(
        self,
        name: str,
        clusters: Mapping[str, ClusterSpec] = ONE,
        engine: PipelineHooks | None = None,
        crew: Crew | None = None,
    ) -> SharedPool:
        engine = engine or Engine()
        url, token = self.plane.url, self.plane.api_token
        made = connect(name, clusters=clusters, engine=engine, url=url, token=token, crew=crew)
        self.pools.append(made)
        return made

    def snapshot(self) -> Snapshot:
        found: Snapshot = self.ask(lambda scheduler: scheduler.snapshot())
        return found

    def ask(self, work: Callable[[Any], Coroutine[Any, Any, T]]) -> T:
        return asyncio.run_coroutine_threadsafe(work(self.scheduler), self.loop.loop).result(BOUND_S)


def pool_of_four(plane: Plane) -> None:
    """The control plane is to have a pool, `default`, of four imitated GPUs."""
    plane.env["MUSTER_GPUS"] = "4"


@contextlib.contextmanager
def control_plane(folder: Path) -> Iterator[ControlPlane]:
    plane, seen = Plane(folder), os.environ.get(VISIBLE)
    pool_of_four(plane)
    loop = LoopThread("onlooker")
    loop.start()
    try:
        plane.serve()
        connecting = connect_remote(plane.url, plane.api_token)
        house = ControlPlane(plane, loop, asyncio.run_coroutine_threadsafe(connecting, loop.loop).result())
        try:
            yield house
        finally:
            for pool in house.pools:
                pool.close()
            asyncio.run_coroutine_threadsafe(house.scheduler.stop(), loop.loop).result()
    finally:
        loop.stop()
        plane.close()
        os.environ.pop(VISIBLE, None)  # whoever connects sees the pipeline's GPUs from then on
        os.environ.update({} if seen is None else {VISIBLE: seen})


class Checker:
    """Is asked at each token: whoever works on a GPU must hold its lease at that moment, and nobody else be at work."""

    def __init__(self, house: PoolHouse) -> None:
        self._house = house
        self._lock = threading.Lock()
        self._at_work: dict[int, str] = {}
        self.seen: list[tuple[int, str]] = []  # (GPU, who)
        self.wrong: list[str] = []

    def token(self, name: str, gpus: Sequence[int]) -> None:
        with self._lock:
            for gpu in gpus:
                if (other := self._at_work.get(gpu, name)) != name:
                    self.wrong.append(f"{name} and {other} work on GPU {gpu}")
                self._at_work[gpu] = name
        leases = self._house.snapshot().leases
        with self._lock:
            for gpu in gpus:
                holder = leases.get(gpu)
                if holder is None or holder.pipeline != name:
                    self.wrong.append(f"{name} works on GPU {gpu}, which {holder} has")
                self.seen.append((gpu, name))
                self._at_work.pop(gpu, None)


def in_thread(work: Callable[[], T]) -> Callable[[], T]:
    """Begin it on a thread of its own; call what this returns to have its result."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((work(), None))
        except BaseException as error:  # noqa: BLE001  # it is raised where the result is asked for
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result() -> T:
        thread.join(BOUND_S)
        assert not thread.is_alive(), "it hangs"
        found, error = outcome[0]
        if error is not None:
            raise error
        value: T = found
        return value

    return result

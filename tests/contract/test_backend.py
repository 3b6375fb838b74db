"""What every backend keeps: workers are listed until they are forgotten, GPUs are held by exactly those that run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from muster.backends.local.backend import LocalBackend
from muster.clock import SystemClock
from muster.ports import Backend, LogQuery
from muster.types.training import Training
from muster.types.worker import Worker
from tests.kube.cluster import Cluster
from tests.kube.house import opened
from tests.memory_store import MemoryStore
from tests.simulator.control import SimulatedBackend
from tests.training_builders import a_training

PATIENCE_S = 20.0
GPUS = 2

Submit = Callable[[Training], Awaitable[Training]]
Scenario = Callable[[Backend, Submit], Awaitable[None]]
Run = Callable[[Scenario], None]


async def as_it_is(training: Training) -> Training:
    return training


@asynccontextmanager
async def a_local(home: Path) -> AsyncIterator[tuple[Backend, Submit]]:
    """Its workers look for a coordinator that is not there, which is enough to live for a while."""
    backend = LocalBackend(home, MemoryStore(), SystemClock())
    try:
        yield backend, as_it_is
    finally:
        for uid in list(backend._workers):
            for worker in backend.workers(uid):
                await backend.stop(uid, worker.name, why="the test is over", kill=True)
            async with asyncio.timeout(PATIENCE_S):
                await until(lambda u=uid: not any(one.alive for one in backend.workers(u)))  # type: ignore[misc]
        await backend.close()


@asynccontextmanager
async def a_simulated(home: Path) -> AsyncIterator[tuple[Backend, Submit]]:
    yield SimulatedBackend(SystemClock(), gpus=GPUS), as_it_is


def on(cluster: Cluster, namespace: str) -> Callable[[Path], AbstractAsyncContextManager[tuple[Backend, Submit]]]:
    """Pods belong to a training that the cluster has."""

    @asynccontextmanager
    async def a_kube(home: Path) -> AsyncIterator[tuple[Backend, Submit]]:
        async with opened(cluster, namespace) as house:
            yield house.backend, house.submit

    return a_kube


@pytest.fixture(params=[pytest.param("local", marks=pytest.mark.process), "simulated"])
def run_with_gpus(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Where workers are placed by muster itself."""
    return _run({"local": a_local, "simulated": a_simulated}[request.param], tmp_path, monkeypatch)


@pytest.fixture(
    params=[pytest.param("local", marks=pytest.mark.process), "simulated", pytest.param("kube", marks=pytest.mark.kube)]
)
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    if request.param == "kube":
        request.getfixturevalue("kubelet")
        kube = on(request.getfixturevalue("cluster"), request.getfixturevalue("namespace"))
        return _run(kube, tmp_path, monkeypatch)
    return _run({"local": a_local, "simulated": a_simulated}[request.param], tmp_path, monkeypatch)


def _run(
    opening: Callable[[Path], AbstractAsyncContextManager[tuple[Backend, Submit]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Run:
    monkeypatch.setenv("MUSTER_GPUS", str(GPUS))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "coordinator.addr").write_text("127.0.0.1:9\n")

    def run(scenario: Scenario) -> None:
        async def play() -> None:
            async with opening(tmp_path / "home") as (backend, submit):
                async with asyncio.timeout(PATIENCE_S):
                    await scenario(backend, submit)

        asyncio.run(play())

    return run


async def until(look: Callable[[], bool]) -> None:
    while not look():
        await asyncio.sleep(0.002)


def a_sleeper(tmp_path: Path, **spec: Any) -> Training:
    return a_training(command=("/bin/sleep", "600"), working_dir=str(tmp_path), **spec)


def free(backend: Backend) -> tuple[int, ...]:
    capacity = backend.capacity()
    assert capacity is not None
    return capacity.free


def alive(backend: Backend, training: Training) -> list[str]:
    return [worker.name for worker in backend.workers(training.uid) if worker.alive]


def test_a_started_worker_is_listed_and_holds_its_gpus(run_with_gpus: Run, tmp_path: Path) -> None:
    async def scenario(backend: Backend, submit: Submit) -> None:
        training = await submit(a_sleeper(tmp_path))
        assert free(backend) == (0, 1) and backend.workers(training.uid) == ()
        worker = await backend.start(training, "demo-0", (1,), "token")
        assert isinstance(worker, Worker) and worker.alive and worker.gpus == (1,)
        assert alive(backend, training) == ["demo-0"]
        assert free(backend) == (0,)

    run_with_gpus(scenario)


def test_gpus_are_taken_before_anything_is_awaited(run_with_gpus: Run, tmp_path: Path) -> None:
    async def scenario(backend: Backend, submit: Submit) -> None:
        starting = asyncio.ensure_future(backend.start(await submit(a_sleeper(tmp_path)), "demo-0", (0,), "token"))
        await asyncio.sleep(0)
        assert free(backend) == (1,)
        await starting

    run_with_gpus(scenario)


def test_a_stopped_worker_ends_stays_listed_and_frees_its_gpus(run: Run, tmp_path: Path) -> None:
    async def scenario(backend: Backend, submit: Submit) -> None:
        training = await submit(a_sleeper(tmp_path))
        await backend.start(training, "demo-0", (0,), "token")
        await backend.start(training, "demo-1", (1,), "token")
        await backend.stop(training.uid, "demo-0", why="enough", kill=True)
        await until(lambda: alive(backend, training) == ["demo-1"])
        assert [worker.name for worker in backend.workers(training.uid)] == ["demo-0", "demo-1"], "oldest first"
        ended = backend.workers(training.uid)[0]
        assert ended.ended_at is not None and ended.why_ended == "enough"
        if backend.capacity() is not None:
            assert free(backend) == (0,)

    run(scenario)


def test_stopping_what_is_not_there_is_no_error(run: Run, tmp_path: Path) -> None:
    async def scenario(backend: Backend, submit: Submit) -> None:
        training = await submit(a_sleeper(tmp_path))
        await backend.stop(training.uid, "nobody", why="enough")
        await backend.start(training, "demo-0", (), "token")
        for _ in range(2):
            await backend.stop(training.uid, "demo-0", why="enough", kill=True)
        await until(lambda: not alive(backend, training))
        await backend.stop(training.uid, "demo-0", why="enough")

    run(scenario)


def test_what_is_forgotten_is_no_longer_listed(run: Run, tmp_path: Path) -> None:
    async def scenario(backend: Backend, submit: Submit) -> None:
        training = await submit(a_sleeper(tmp_path))
        await backend.start(training, "demo-0", (), "token")
        await backend.stop(training.uid, "demo-0", why="enough", kill=True)
        await until(lambda: not alive(backend, training))
        await backend.forget(training.uid)
        assert backend.workers(training.uid) == ()

    run(scenario)


def test_a_plan_says_how_many_workers_there_would_be(run: Run, tmp_path: Path) -> None:
    async def scenario(backend: Backend, submit: Submit) -> None:
        assert backend.plan(a_sleeper(tmp_path, world=(1, 2, 3), spares=1))["workers"] == 3

    run(scenario)


def test_logs_of_an_ended_training_end(run: Run, tmp_path: Path) -> None:
    async def scenario(backend: Backend, submit: Submit) -> None:
        training = await submit(a_sleeper(tmp_path))
        chunks = [chunk async for chunk in backend.logs(training.uid, LogQuery(follow=True), lambda: True)]
        assert all(chunk.endswith(b"\n") for chunk in chunks)

    run(scenario)

"""What every backend keeps: workers are listed until they are forgotten, GPUs are held by exactly those that run."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from muster.backends.local.backend import LocalBackend
from muster.daemon import WallClock
from muster.ports import Backend, LogQuery
from muster.sim.control import SimulatedBackend
from muster.store.memory import MemoryStore
from muster.types.training import Training
from muster.types.worker import Worker
from tests.training_builders import a_training

PATIENCE_S = 20.0
GPUS = 2

Scenario = Callable[[Backend], Awaitable[None]]


@asynccontextmanager
async def a_local(home: Path) -> AsyncIterator[Backend]:
    """Its workers look for a coordinator that is not there, which is enough to live for a while."""
    backend = LocalBackend(home, MemoryStore(), WallClock())
    try:
        yield backend
    finally:
        for uid in list(backend._workers):
            for worker in backend.workers(uid):
                await backend.stop(uid, worker.name, why="the test is over", kill=True)
            await until(lambda u=uid: not any(one.alive for one in backend.workers(u)))  # type: ignore[misc]
        backend.close()


@asynccontextmanager
async def a_simulated(home: Path) -> AsyncIterator[Backend]:
    yield SimulatedBackend(WallClock(), gpus=GPUS)


@pytest.fixture(params=[a_local, a_simulated], ids=["local", "simulated"])
def run(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Scenario], None]:
    monkeypatch.setenv("MUSTER_GPUS", str(GPUS))
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "coordinator.addr").write_text("127.0.0.1:9\n")

    def run(scenario: Scenario) -> None:
        async def play() -> None:
            async with request.param(tmp_path / "home") as backend:
                async with asyncio.timeout(PATIENCE_S):
                    await scenario(backend)

        asyncio.run(play())

    return run


async def until(look: Callable[[], bool]) -> None:
    while not look():
        await asyncio.sleep(0.002)


def a_sleeper(tmp_path: Path, **spec: Any) -> Training:
    return a_training(command=("/bin/sleep", "600"), working_dir=str(tmp_path), **spec)


def alive(backend: Backend, training: Training) -> list[str]:
    return [worker.name for worker in backend.workers(training.uid) if worker.alive]


def test_a_started_worker_is_listed_and_holds_its_gpus(run: Callable[[Scenario], None], tmp_path: Path) -> None:
    async def scenario(backend: Backend) -> None:
        training = a_sleeper(tmp_path)
        assert backend.capacity().free == (0, 1) and backend.workers(training.uid) == ()
        worker = await backend.start(training, "demo-0", (1,), "token")
        assert isinstance(worker, Worker) and worker.alive and worker.gpus == (1,)
        assert alive(backend, training) == ["demo-0"]
        assert backend.capacity().taken == {1: "demo-0"} and backend.capacity().free == (0,)

    run(scenario)


def test_gpus_are_taken_before_anything_is_awaited(run: Callable[[Scenario], None], tmp_path: Path) -> None:
    async def scenario(backend: Backend) -> None:
        starting = asyncio.ensure_future(backend.start(a_sleeper(tmp_path), "demo-0", (0,), "token"))
        await asyncio.sleep(0)
        assert backend.capacity().free == (1,)
        await starting

    run(scenario)


def test_a_stopped_worker_ends_stays_listed_and_frees_its_gpus(run: Callable[[Scenario], None], tmp_path: Path) -> None:
    async def scenario(backend: Backend) -> None:
        training = a_sleeper(tmp_path)
        await backend.start(training, "demo-0", (0,), "token")
        await backend.start(training, "demo-1", (1,), "token")
        await backend.stop(training.uid, "demo-0", why="enough", kill=True)
        await until(lambda: alive(backend, training) == ["demo-1"])
        assert [worker.name for worker in backend.workers(training.uid)] == ["demo-0", "demo-1"], "oldest first"
        ended = backend.workers(training.uid)[0]
        assert ended.ended_at is not None and ended.why_ended == "enough"
        assert backend.capacity().free == (0,)

    run(scenario)


def test_stopping_what_is_not_there_is_no_error(run: Callable[[Scenario], None], tmp_path: Path) -> None:
    async def scenario(backend: Backend) -> None:
        training = a_sleeper(tmp_path)
        await backend.stop(training.uid, "nobody", why="enough")
        await backend.start(training, "demo-0", (), "token")
        for _ in range(2):
            await backend.stop(training.uid, "demo-0", why="enough", kill=True)
        await until(lambda: not alive(backend, training))
        await backend.stop(training.uid, "demo-0", why="enough")

    run(scenario)


def test_what_is_forgotten_is_no_longer_listed(run: Callable[[Scenario], None], tmp_path: Path) -> None:
    async def scenario(backend: Backend) -> None:
        training = a_sleeper(tmp_path)
        await backend.start(training, "demo-0", (), "token")
        await backend.stop(training.uid, "demo-0", why="enough", kill=True)
        await until(lambda: not alive(backend, training))
        await backend.forget(training.uid)
        assert backend.workers(training.uid) == ()

    run(scenario)


def test_a_plan_says_how_many_workers_there_would_be(run: Callable[[Scenario], None], tmp_path: Path) -> None:
    async def scenario(backend: Backend) -> None:
        assert backend.plan(a_sleeper(tmp_path, world=(1, 2, 3), spares=1))["workers"] == 3

    run(scenario)


def test_logs_of_an_ended_training_end(run: Callable[[Scenario], None], tmp_path: Path) -> None:
    async def scenario(backend: Backend) -> None:
        training = a_sleeper(tmp_path)
        chunks = [chunk async for chunk in backend.logs(training.uid, LogQuery(follow=True), lambda: True)]
        assert all(chunk.endswith(b"\n") for chunk in chunks)

    run(scenario)

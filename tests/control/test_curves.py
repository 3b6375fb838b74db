"""Curves are held while a training lives, written within a budget, and gone with it."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

import pytest

from muster import errors
from muster.control import curves
from muster.control.curves import CurveKeeper
from muster.core import keeping
from muster.core.curves import MOST_RECENT
from muster.ports import Record, RunView, Write
from muster.types.frames import MetricsFrame
from muster.types.measured import LoggedNumber, WorkerUse
from muster.types.training import RankStatus, Training, Uid
from muster.types.world import Progress
from tests.clocks import HandClock
from tests.core.builders import NOW, a_round, a_run, an_id
from tests.memory_store import MemoryStore
from tests.training_builders import a_training


class Worlds:
    """Runs as the test has them."""

    def __init__(self) -> None:
        self.runs: dict[str, Any] = {}

    def look(self, uid: Uid) -> RunView | None:
        return RunView(self.runs[uid], "", False) if uid in self.runs else None


class Scene:
    def __init__(self) -> None:
        self.clock = HandClock()
        self.store = MemoryStore(clock=self.clock)
        self.worlds = Worlds()
        self.keeper = self.another()

    def another(self) -> CurveKeeper:
        return CurveKeeper(self.store, cast(Any, self.worlds), self.clock)

    async def put(self, training: Training) -> Uid:
        await self.store.write(Write(put=training))
        return training.uid

    def tell(self, uid: Uid, *seqs: int, number: int = 0, **more: Any) -> None:
        points = tuple(LoggedNumber(seq, 0, 1.0, seq, seq / 10) for seq in seqs)
        self.keeper.measured(uid, "w0", MetricsFrame(round=number, names=("loss",), points=points, **more))

    def steps(self, uid: Uid) -> list[int | None]:
        found = self.keeper.curves(uid).get("loss")
        return [point.step for point in found.points] if found is not None else []

    @property
    def kept(self) -> set[str]:
        return set(self.store.records(keeping.CURVES))


def play(story: Callable[[Scene], Awaitable[None]]) -> None:
    async def run() -> None:
        scene = Scene()
        await story(scene)
        await scene.keeper.stop()

    asyncio.run(run())


def test_what_is_told_is_known_at_once_and_after_a_restart() -> None:
    async def story(scene: Scene) -> None:
        uid = await scene.put(a_training(phase="ready"))
        scene.keeper.start()
        scene.tell(uid, 1, 2, 3)
        scene.tell(uid, 2, 3, 4)
        assert scene.steps(uid) == [1, 2, 3, 4]
        assert scene.keeper.curves(uid)["loss"].points[0].at == scene.clock.now().timestamp() - 1.0
        await scene.keeper.stop()
        scene.keeper = scene.another()
        scene.keeper.start()
        assert scene.steps(uid) == [1, 2, 3, 4]
        scene.tell(uid, 3, 4, 5)
        assert scene.steps(uid) == [1, 2, 3, 4, 5]

    play(story)


def test_what_nobody_knows_of_is_not_kept() -> None:
    async def story(scene: Scene) -> None:
        scene.keeper.start()
        scene.tell(Uid("stranger"), 1, use=WorkerUse(cpu_percent=1.0))
        assert scene.keeper.curves(Uid("stranger")) == {} and scene.keeper.workers(Uid("stranger")) == {}

    play(story)


@pytest.mark.parametrize("name", [-1, 1, 1 << 40])
def test_a_number_without_a_name_is_dropped(name: int) -> None:
    async def story(scene: Scene) -> None:
        uid = await scene.put(a_training(phase="ready"))
        scene.keeper.start()
        told = MetricsFrame(round=0, names=("loss",), points=(LoggedNumber(1, name, 1e300, 1, 1.0),))
        scene.keeper.measured(uid, "w0", told)
        assert scene.keeper.curves(uid) == {}

    play(story)


def test_steps_speed_and_size_are_known_of_who_logs_nothing() -> None:
    async def story(scene: Scene) -> None:
        uid = await scene.put(a_training(phase="ready"))
        scene.keeper.start()
        ids = frozenset({an_id("a"), an_id("b")})
        for look in range(3):
            marks = {0: Progress(10 * look, NOW + 4 * look), 1: Progress(99, NOW)}
            scene.worlds.runs[uid] = a_run("a b", last=a_round("a b", up=ids, progress=marks))
            await scene.keeper.look()
            scene.clock.at += timedelta(seconds=4)
        found = scene.keeper.curves(uid)
        assert [point.value for point in found["step"].points] == [0, 10, 20]
        assert [point.value for point in found["steps_per_second"].points] == [2.5, 2.5]
        assert {point.value for point in found["world_size"].points} == {2.0}

    play(story)


@pytest.mark.parametrize(("looks", "steps"), [(1, [10, 12]), (0, [12])])
def test_the_last_step_is_known_also_if_nobody_looked_then(looks: int, steps: list[float]) -> None:
    async def story(scene: Scene) -> None:
        training = a_training(phase="ready")
        uid = await scene.put(training)
        scene.keeper.start()
        marks = {0: Progress(10, NOW)}
        scene.worlds.runs[uid] = a_run("a", last=a_round("a", up=frozenset({an_id("a")}), progress=marks))
        for _ in range(looks):
            await scene.keeper.look()
        ranks = (RankStatus(0, "w0", phase="succeeded", step=12), RankStatus(1, "w1", phase="succeeded", step=11))
        ended = replace(training.status, phase="succeeded", ranks=ranks)
        await scene.put(replace(training, status=ended))
        await scene.keeper._write(uid)
        found = scene.keeper.curves(uid)
        assert [point.value for point in found["step"].points] == steps
        assert found["world_size"].points[-1].value == 0.0

    play(story)


def test_a_coordinator_that_has_just_come_back_says_nothing_of_the_size() -> None:
    async def story(scene: Scene) -> None:
        uid = await scene.put(a_training(phase="ready"))
        scene.keeper.start()
        scene.worlds.runs[uid] = replace(a_run("a b"), recovery_until=NOW)
        await scene.keeper.look()
        assert scene.keeper.curves(uid) == {}

    play(story)


def test_a_worker_that_is_silent_is_not_shown_any_more() -> None:
    async def story(scene: Scene) -> None:
        uid = await scene.put(a_training(phase="ready"))
        scene.keeper.start()
        scene.tell(uid, use=WorkerUse(cpu_percent=50.0))
        assert scene.keeper.workers(uid)["w0"].use.cpu_percent == 50.0
        scene.clock.at += timedelta(seconds=curves.SILENT_S + 1)
        await scene.keeper.look()
        assert scene.keeper.workers(uid) == {}

    play(story)


@pytest.mark.parametrize(("workers", "kept"), [(MOST_RECENT, 2), (MOST_RECENT + 1, 1)])
def test_what_workers_of_a_large_world_used_before_is_not_kept(workers: int, kept: int) -> None:
    async def story(scene: Scene) -> None:
        uid = await scene.put(a_training(phase="ready"))
        scene.keeper.start()
        for cpu in (1.0, 2.0):
            for worker in range(workers):
                scene.keeper.measured(uid, f"w{worker}", MetricsFrame(use=WorkerUse(cpu_percent=cpu)))
        assert [len(one.recent) for one in scene.keeper.workers(uid).values()] == [kept] * workers

    play(story)


def test_curves_of_one_that_ended_leave_memory_and_those_of_one_that_is_gone_leave_the_store() -> None:
    async def story(scene: Scene) -> None:
        training = a_training(phase="ready")
        uid = await scene.put(training)
        scene.keeper.start()
        scene.tell(uid, 1, 2)
        await scene.put(replace(training, status=replace(training.status, phase="succeeded")))
        await scene.keeper._write(uid)
        assert not scene.keeper._held and scene.steps(uid) == [1, 2] and scene.kept == {uid}
        assert scene.keeper.curves(uid)["world_size"].points[-1].value == 0.0
        await scene.store.write(Write(delete=training.key, records=(Record(keeping.CURVES, uid, None),)))
        scene.tell(uid, 3)
        await scene.keeper._write(uid)
        assert scene.kept == set() and not scene.keeper._held

    play(story)


def test_the_curves_of_one_that_ends_are_written_at_once() -> None:
    async def story(scene: Scene) -> None:
        training = a_training(phase="ready")
        uid = await scene.put(training)
        scene.keeper.start()
        scene.tell(uid, 1, 2)
        await scene.put(replace(training, status=replace(training.status, phase="succeeded")))
        async with asyncio.timeout(curves.WRITE_EVERY_S / 2):
            while scene.kept != {uid}:
                await asyncio.sleep(0)

    play(story)


def test_what_is_left_of_trainings_that_disappeared_is_removed_at_the_start() -> None:
    async def story(scene: Scene) -> None:
        await scene.store.write(Write(records=(Record(keeping.CURVES, "gone", {"curves": {}}),)))
        assert scene.kept == {"gone"}
        scene.keeper.start()
        async with asyncio.timeout(5):
            while scene.kept:
                await asyncio.sleep(0)

    play(story)


def test_beyond_a_total_the_curves_of_those_that_ended_first_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "MOST_BYTES_KEPT", 250)

    async def story(scene: Scene) -> None:
        scene.keeper.start()
        uids = []
        for count in range(5):
            training = a_training(f"t{count}", phase="ready")
            uids.append(await scene.put(training))
            scene.tell(uids[-1], 1, 2, 3)
            await scene.put(replace(training, status=replace(training.status, phase="succeeded")))
            await scene.keeper._write(uids[-1])
        assert 0 < len(scene.kept) < 5 and scene.kept == set(uids[-len(scene.kept) :])

    play(story)


def test_who_ends_very_many_drives_out_only_what_is_of_the_same_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "MOST_BYTES_KEPT", 250)

    async def story(scene: Scene) -> None:
        scene.keeper.start()
        uids = []
        for count, namespace in enumerate(["quiet", *["busy"] * 5]):
            training = a_training(f"t{count}", namespace=namespace, phase="ready")
            uids.append(await scene.put(training))
            scene.tell(uids[-1], 1, 2, 3)
            await scene.put(replace(training, status=replace(training.status, phase="succeeded")))
            await scene.keeper._write(uids[-1])
        assert uids[0] in scene.kept and uids[-1] in scene.kept and uids[1] not in scene.kept

    play(story)


def test_curves_of_those_that_live_are_written_however_often_others_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "WRITE_EVERY_S", 0.05)

    async def story(scene: Scene) -> None:
        uid = await scene.put(a_training("lives", phase="ready"))
        scene.keeper.start()
        scene.tell(uid, 1)
        async with asyncio.timeout(10):
            for count in itertools.count():
                training = a_training(f"t{count}", phase="ready")
                scene.tell(await scene.put(training), 1)
                await scene.put(replace(training, status=replace(training.status, phase="succeeded")))
                await asyncio.sleep(0)
                if uid in scene.kept:
                    break

    play(story)


def test_what_cannot_be_written_now_is_written_later(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(scene: Scene) -> None:
        uid = await scene.put(a_training(phase="ready"))
        scene.keeper.start()
        scene.tell(uid, 1)
        write = scene.store.write

        async def refuses(order: Write) -> None:
            raise errors.Unavailable("the disk is full")

        monkeypatch.setattr(scene.store, "write", refuses)
        assert await scene.keeper._write(uid) == 0
        monkeypatch.setattr(scene.store, "write", write)
        assert await scene.keeper._write(uid) > 0 and scene.kept == {uid}
        assert await scene.keeper._write(uid) == 0, "there is nothing new"

    play(story)


def test_a_record_that_cannot_be_read_is_as_good_as_none() -> None:
    async def story(scene: Scene) -> None:
        uid = await scene.put(a_training(phase="ready"))
        await scene.store.write(Write(records=(Record(keeping.CURVES, uid, {"curves": 7, "at": "noon"}),)))
        scene.keeper.start()
        assert scene.keeper.curves(uid) == {}
        scene.tell(uid, 1)
        assert scene.steps(uid) == [1]

    play(story)

"""Who speaks for a pipeline: a successor gets what a dead process held, and nobody takes anything from a living one."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from muster.errors import AlreadyExists, NotFound, RequestRefused
from muster.sharing import Priority
from muster.sharing.remote import RemoteScheduler, tenant_of
from muster.sim import virtual
from muster.types.sharing import Tenant
from tests.sharing.room import ALL, INFER, TRAIN, Engine, Room, clusters, in_room
from tests.sharing.scripted import FOUR, OTHER, Hooks, a_scheduler, held_by, joined, training, turns

UID = "0b5e-training"
TTL_S = 1.0


class Trainings:
    """Trainings whose rounds end when a test says so."""

    def __init__(self, *uids: str) -> None:
        self.uids = set(uids)
        self.ended: set[tuple[str, int]] = set()

    def knows(self, training: str) -> bool:
        return training in self.uids

    def over(self, training: str, number: int) -> str:
        return f"round {number} is over" if (training, number) in self.ended else ""


def a_rank(number: int, name: str = "") -> Tenant:
    return Tenant(name or f"rank-{number}", UID, number)


def fall_silent(handle: RemoteScheduler) -> None:
    """As a process that was killed: nobody fetches its actions any more, and nothing is said."""
    for runner in handle._hook_runners.values():
        runner._task.cancel()


async def trains(handle: RemoteScheduler, name: str = "p1") -> list[int]:
    return await handle.request_gpus(name, TRAIN, Priority.ACTOR_TRAINING)


# Rounds


def test_a_successor_in_the_next_round_gets_at_once_what_its_dead_predecessor_held(tmp_path: Path) -> None:
    trainings = Trainings(UID)

    async def test(room: Room) -> None:
        dead = await room.pipeline("p1", Engine(), tenant=a_rank(0))
        assert await trains(dead) == [0, 1]
        fall_silent(dead)
        trainings.ended.add((UID, 0))
        engine = Engine()
        successor = await room.pipeline("p1", engine, tenant=a_rank(1))
        assert await successor.request_gpus("p1", TRAIN, Priority.OLD_LOG_PROBS) == [0, 1]
        assert await successor.request_gpus("p1", INFER, Priority.GENERATION, 8) == [2, 3]
        assert engine.calls == ["expand [2, 3]"]
        with pytest.raises(AlreadyExists):
            await dead.notify_release_gpus("p1", TRAIN)

    in_room(tmp_path, test, rounds=trainings)


def test_what_a_round_held_ends_with_it_also_when_nobody_comes_after_it(tmp_path: Path) -> None:
    trainings = Trainings(UID)

    async def test(room: Room) -> None:
        holder = await room.pipeline("p1", Engine(), tenant=a_rank(3))
        rival = await room.pipeline("p2", Engine())
        await trains(holder)
        waiting = asyncio.create_task(trains(rival, "p2"))
        await room.until(lambda: room.pool.scheduler.shares.requests)
        [shown] = [one for one in room.pool.view()["pipelines"] if one["id"] == "p1"]
        assert (shown["training"], shown["round"]) == (UID, 3)
        trainings.ended.add((UID, 3))
        room.pool.tenants.training_changed(UID)
        assert await waiting == [0, 1]
        [end] = [one for one in room.pool.events() if one.kind == "unregistered"]
        assert (end.pipeline, end.text, end.gpus) == ("p1", "round 3 is over", (0, 1))
        with pytest.raises(NotFound):
            await trains(holder)

    in_room(tmp_path, test, rounds=trainings)


def test_a_round_that_ended_while_the_control_plane_was_away_is_noticed_when_it_is_back(tmp_path: Path) -> None:
    trainings = Trainings(UID)

    async def test(room: Room) -> None:
        holder = await room.pipeline("p1", Engine(), tenant=a_rank(0))
        other = await room.pipeline("p2", Engine(), tenant=replace(a_rank(0), process="q", training="other"))
        await trains(holder)
        await other.request_gpus("p2", INFER, Priority.GENERATION, 8)
        fall_silent(holder)
        await room.pool.stop()
        trainings.ended.add((UID, 0))
        await room.pool.start()
        await room.until(lambda: "p1" not in room.pool.scheduler.shares.pipelines)
        assert room.pool.scheduler.shares.pipelines.keys() == {"p2"}
        assert {one.pipeline for one in room.pool.scheduler.snapshot().leases.values()} == {"p2"}

    in_room(tmp_path, test, rounds=trainings, journal=tmp_path / "j")


def test_a_process_that_attaches_again_after_a_restart_still_belongs_to_its_round(tmp_path: Path) -> None:
    trainings = Trainings(UID)

    async def test(room: Room) -> None:
        await trains(await room.pipeline("p1", Engine(), tenant=a_rank(0)))
        await room.pool.stop()
        await room.pool.start()
        await room.until(lambda: room.pool.view()["pipelines"][0]["state"] == "attached")
        assert sorted(room.pool.scheduler.snapshot().leases) == [0, 1]
        trainings.ended.add((UID, 0))
        room.pool.tenants.training_changed(UID)
        await room.until(lambda: room.pool.scheduler.snapshot().idle == tuple(ALL))

    in_room(tmp_path, test, rounds=trainings, journal=tmp_path / "j")


# Claims


def test_a_claim_ends_nothing_but_what_the_claimer_registers(tmp_path: Path) -> None:
    trainings = Trainings(UID)

    async def test(room: Room) -> None:
        holder = await room.pipeline("p1", Engine(), tenant=a_rank(5))
        assert await trains(holder) == [0, 1]
        for claim in (a_rank(6, "liar"), Tenant("liar", "unknown", 1), Tenant("liar")):
            with pytest.raises(AlreadyExists, match="which was heard just now"):
                await room.pipeline("p1", Engine(), tenant=claim)
        trainings.ended.add((UID, 4))
        with pytest.raises(RequestRefused, match="round 4 is over"):
            await room.pipeline("p1", Engine(), tenant=a_rank(4, "late"))
        with pytest.raises(RequestRefused, match="round 4 is over"):
            await room.pipeline("p2", Engine(), tenant=a_rank(4, "late"))
        assert sorted(room.pool.scheduler.snapshot().leases) == [0, 1]
        assert (await holder.notify_release_gpus("p1", TRAIN)).gpus == (0, 1)

    in_room(tmp_path, test, rounds=trainings)


def test_a_training_that_this_control_plane_does_not_run_is_none(tmp_path: Path) -> None:
    async def test(room: Room) -> None:
        holder = await room.pipeline("p1", Engine(), tenant=Tenant("p", "standalone-run", 0))
        assert await trains(holder) == [0, 1]
        room.pool.tenants.training_changed("standalone-run")
        [kept] = [one.tenant for one in room.pool.scheduler.shares.pipelines.values()]
        assert (kept.process, kept.training, kept.round) == ("p", None, None)

    in_room(tmp_path, test, rounds=Trainings(UID))


def test_a_rank_knows_its_training_and_round_and_other_processes_have_none() -> None:
    inside = tenant_of({"MUSTER_RUN_ID": UID, "MUSTER_ROUND": "7"})
    assert (inside.training, inside.round) == (UID, 7)
    for env in ({}, {"MUSTER_RUN_ID": UID}, {"MUSTER_RUN_ID": "a b", "MUSTER_ROUND": "1"}, {"MUSTER_ROUND": "x"}):
        assert tenant_of(env) == Tenant(inside.process)


# Processes


def test_a_duplicate_of_a_living_process_is_refused_and_takes_nothing(tmp_path: Path) -> None:
    async def test(room: Room) -> None:
        engine = Engine()
        holder = await room.pipeline("p1", engine, tenant=Tenant("one"))
        assert await trains(holder) == [0, 1]
        with pytest.raises(AlreadyExists, match="which was heard just now"):
            await room.pipeline("p1", Engine(), tenant=Tenant("two"))
        assert sorted(room.pool.scheduler.snapshot().leases) == [0, 1]
        await holder.notify_release_gpus("p1", TRAIN)
        assert await holder.request_gpus("p1", INFER, Priority.GENERATION, 8) == ALL, "its hooks are still called"
        assert engine.awake == set(ALL)

    in_room(tmp_path, test)


def test_a_successor_waits_until_its_predecessor_has_been_silent_and_then_has_shrunk_everything(
    tmp_path: Path,
) -> None:
    async def test(room: Room) -> None:
        dead = await room.pipeline("p1", Engine(), tenant=Tenant("one"))
        assert await trains(dead) == [0, 1]
        fall_silent(dead)
        engine = Engine()
        successor = await room.pipeline("p1", engine, tenant=Tenant("two"))
        assert engine.calls == ["shrink [0, 1, 2, 3]"]
        assert "nothing was heard" in next(one.text for one in room.pool.events() if one.kind == "quarantined")
        assert await successor.request_gpus("p1", TRAIN, Priority.OLD_LOG_PROBS) == [0, 1]

    in_room(tmp_path, test, pipeline_ttl_s=TTL_S)


def test_clients_that_do_not_name_their_process_are_told_apart_by_their_sessions(tmp_path: Path) -> None:
    async def test(room: Room) -> None:
        dead = await room.pipeline("p1", Engine(), tenant=Tenant())
        assert await trains(dead) == [0, 1]
        with pytest.raises(AlreadyExists, match="which was heard just now"):
            await room.pipeline("p1", Engine(), tenant=Tenant())
        fall_silent(dead)
        successor = await room.pipeline("p1", Engine(), tenant=Tenant())
        assert await successor.request_gpus("p1", TRAIN, Priority.OLD_LOG_PROBS) == [0, 1]

    in_room(tmp_path, test, pipeline_ttl_s=TTL_S)


def test_the_same_process_keeps_what_it_holds_when_it_registers_again(tmp_path: Path) -> None:
    async def test(room: Room) -> None:
        old, new = Engine(), Engine()
        first, second = await room.pipeline("p1", old), await room.handle()
        assert await trains(first) == [0, 1]
        await second.register_pipeline("p1", clusters(), new)
        assert await trains(second) == [0, 1]
        assert await second.request_gpus("p1", INFER, Priority.GENERATION, 8) == [2, 3]
        assert new.awake == {2, 3} and not old.calls

    in_room(tmp_path, test)


def test_a_registration_that_is_refused_does_not_cut_off_who_is_there(tmp_path: Path) -> None:
    async def test(room: Room) -> None:
        engine = Engine()
        holder = await room.pipeline("p1", engine)
        with pytest.raises(AlreadyExists, match="another weight"):
            await (await room.handle()).register_pipeline("p1", clusters(), Engine(), weight=2.0)
        assert await holder.request_gpus("p1", INFER, Priority.GENERATION, 8) == ALL
        assert engine.awake == set(ALL)

    in_room(tmp_path, test)


@pytest.mark.parametrize("forgotten", [False, True], ids=["the pool", "the whole process"])
def test_a_newcomer_after_a_restart_is_refused_when_the_process_before_comes_back(
    tmp_path: Path, forgotten: bool
) -> None:
    async def test(room: Room) -> None:
        holder = await room.pipeline("p1", Engine(), tenant=Tenant("one"))
        assert await trains(holder) == [0, 1]
        await room.pool.stop()
        if forgotten:
            room.pool.tenants._remotes.clear()
        await room.pool.start()
        with pytest.raises(AlreadyExists, match="another process"):
            await room.pipeline("p1", Engine(), tenant=Tenant("two"))
        await room.until(lambda: room.pool.view()["pipelines"][0]["state"] == "attached")
        assert await trains(holder) == [0, 1]

    in_room(tmp_path, test, journal=tmp_path / "j")


def test_a_newcomer_after_a_restart_waits_no_longer_than_the_process_before_may_take_to_come_back(
    tmp_path: Path,
) -> None:
    async def test(room: Room) -> None:
        dead = await room.pipeline("p1", Engine(), tenant=Tenant("one"))
        assert await trains(dead) == [0, 1]
        fall_silent(dead)
        await room.pool.stop()
        room.pool.tenants._remotes.clear()  # as in a new process
        await room.pool.start()
        successor = await room.pipeline("p1", Engine(), tenant=Tenant("two"))
        assert "did not attach" in next(one.text for one in room.pool.events() if one.kind == "quarantined")
        assert await successor.request_gpus("p1", TRAIN, Priority.OLD_LOG_PROBS) == [0, 1]

    in_room(tmp_path, test, journal=tmp_path / "j", reattach_timeout_s=TTL_S)


def test_a_successor_that_dies_while_it_waits_does_not_keep_the_next_one_from_coming(tmp_path: Path) -> None:
    async def test(room: Room) -> None:
        dead = await room.pipeline("p1", Engine(), tenant=Tenant("one"))
        assert await trains(dead) == [0, 1]
        fall_silent(dead)
        second = await room.handle(Tenant("two"))
        engine = Engine()
        engine.go.clear()
        coming = asyncio.create_task(second.register_pipeline("p1", clusters(), engine))
        await room.until(lambda: engine.calls)  # it is being asked to shrink everything, and dies in the middle of it
        coming.cancel()
        fall_silent(second)
        third = await room.pipeline("p1", Engine(), tenant=Tenant("three"))
        assert await third.request_gpus("p1", TRAIN, Priority.OLD_LOG_PROBS) == [0, 1]

    in_room(tmp_path, test, pipeline_ttl_s=TTL_S)


def test_a_process_that_gave_up_waiting_and_begins_anew_does_not_wait_for_itself(tmp_path: Path) -> None:
    async def test(room: Room) -> None:
        dead = await room.pipeline("p1", Engine(), tenant=Tenant("one"))
        assert await trains(dead) == [0, 1]
        await room.pool.scheduler.quarantine_pipeline("p1", "it seemed dead")
        successor, engine = await room.handle(Tenant("two")), Engine()
        engine.go.clear()
        first = asyncio.create_task(successor.register_pipeline("p1", clusters(), engine))
        await room.until(lambda: engine.calls)
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        engine.go.set()
        await successor.register_pipeline("p1", clusters(), engine)
        assert await successor.request_gpus("p1", TRAIN, Priority.OLD_LOG_PROBS) == [0, 1]

    in_room(tmp_path, test)


def test_unregistering_makes_room_for_who_waits(tmp_path: Path) -> None:
    async def test(room: Room) -> None:
        dead = await room.pipeline("p1", Engine(), tenant=Tenant("one"))
        assert await trains(dead) == [0, 1]
        fall_silent(dead)
        coming = asyncio.create_task(room.pipeline("p1", Engine(), tenant=Tenant("two")))
        await room.until(lambda: (there := room.pool.tenants._remotes["p1"].arrival) and there.waits)
        await (await room.handle()).unregister_pipeline("p1")
        assert await trains(await coming) == [0, 1]

    in_room(tmp_path, test)


# In one process


def test_after_a_restart_another_process_gets_what_the_one_before_held_and_the_same_one_keeps_it(
    tmp_path: Path,
) -> None:
    async def story() -> None:
        async with a_scheduler(journal=tmp_path / "j") as sched:
            await sched.register_pipeline("p1", FOUR, Hooks(), tenant=Tenant("one"))
            await sched.admit_pipeline("p1")
            await training(sched, "p1")
        async with a_scheduler(journal=tmp_path / "j") as again:
            await again.register_pipeline("p1", FOUR, Hooks(), tenant=Tenant("one"))
            assert held_by(again, "p1") == {0: "held", 1: "held"}
            with pytest.raises(AlreadyExists, match="whose hooks are attached"):
                await again.register_pipeline("p1", FOUR, Hooks(), tenant=Tenant("two"))
            assert held_by(again, "p1") == {0: "held", 1: "held"}
        async with a_scheduler(journal=tmp_path / "j") as again:
            await joined(again, "p2", {**OTHER, "actor_train": FOUR["actor_train"]})
            waiting = asyncio.create_task(training(again, "p2"))
            await turns()
            hooks = Hooks()
            await again.register_pipeline("p1", FOUR, hooks, tenant=Tenant("two"))
            assert hooks.calls == [("shrink", [0, 1, 2, 3])]
            assert await waiting == [0, 1]

    virtual.run(story())

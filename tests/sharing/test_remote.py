"""Pipelines in other processes: the client against a real server, real deaths, and a restart of the control plane."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from muster.backends.local import gpus
from muster.errors import (
    AlreadyExists,
    Conflict,
    InvalidRequest,
    NotFound,
    RequestRefused,
    Unauthenticated,
    Unavailable,
)
from muster.sharing import (
    ClusterSpec,
    GrantTimeout,
    PipelineClient,
    PipelineQuarantined,
    Priority,
    ProgressReport,
)
from muster.sharing.remote import RemoteScheduler, connect
from muster.types.pools import Action, ActionAnswer
from tests.fleet import PROGRAMS, Fleet, eventually
from tests.plane import Plane
from tests.sharing.room import ALL, BOUND_S, INFER, TRAIN, Engine, Room, clusters, in_room
from tests.sharing.scripted import PlainHooks, restart_the_machine

SHARER = str(PROGRAMS / "sharer.py")


# The client


def test_two_remote_pipelines_share_four_gpus_for_several_rollouts(tmp_path: Path) -> None:
    async def test(room: Room) -> None:
        overlaps: list[set[int]] = []

        async def live(name: str, train: list[int], mine: Engine, other: Engine) -> None:
            handle = await room.pipeline(name, mine, *train)
            client = PipelineClient(handle, name)
            for number in range(5):
                got = await client.signal_rollout_demand(number, 12)
                assert got and set(got) <= set(ALL)
                await client.begin_progress_batch(12)
                for _ in range(12):
                    overlaps.append(mine.awake & other.awake)
                    await client.bump_completed()
                await client.end_progress_batch()
                await handle.await_release_gpus(name)
                assert not mine.awake
                assert await handle.request_gpus(name, TRAIN, Priority.OLD_LOG_PROBS) == train
                again = await handle.notify_release_then_request_gpus(name, TRAIN, TRAIN, Priority.ACTOR_TRAINING)
                assert again == train
                assert (await handle.notify_release_gpus(name, TRAIN)).gpus == tuple(train)

        one, two = Engine(), Engine()
        await asyncio.gather(live("p1", [0, 1], one, two), live("p2", [2, 3], two, one))
        assert overlaps and not any(overlaps)  # no GPU was awake in both at any time
        kinds = [event.kind for event in room.pool.events()]
        assert kinds.count("granted") == 2 * 5 * 3
        assert "hook-failed" not in kinds and "quarantined" not in kinds
        snapshot = await (await room.handle()).snapshot()
        assert snapshot.idle == (0, 1, 2, 3) and not snapshot.open_rollouts
        assert snapshot == room.pool.scheduler.snapshot()

    in_room(tmp_path, test, min_turn_s=0.05)


def test_a_remote_request_that_times_out_is_withdrawn_with_its_reason(tmp_path: Path) -> None:
    async def test(room: Room) -> None:
        p1, p2 = await room.pipeline("p1", Engine()), await room.pipeline("p2", Engine())
        await p1.request_gpus("p1", TRAIN, Priority.ACTOR_TRAINING)
        with pytest.raises(GrantTimeout, match="p1"):
            await p2.request_gpus("p2", TRAIN, Priority.ACTOR_TRAINING, timeout=0.1)
        assert not room.pool.scheduler.shares.requests
        assert (await p1.snapshot()).pending == ()

    in_room(tmp_path, test)


def test_a_cancelled_remote_request_is_withdrawn(tmp_path: Path) -> None:
    async def test(room: Room) -> None:
        p1, p2 = await room.pipeline("p1", Engine()), await room.pipeline("p2", Engine())
        await p1.request_gpus("p1", TRAIN, Priority.ACTOR_TRAINING)
        asking = asyncio.create_task(p2.request_gpus("p2", TRAIN, Priority.ACTOR_TRAINING))
        await room.until(lambda: room.pool.scheduler.shares.requests)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert not room.pool.scheduler.shares.requests
        await p1.notify_release_gpus("p1", TRAIN)
        assert room.pool.scheduler.snapshot().idle == (0, 1, 2, 3)

    in_room(tmp_path, test)


def test_what_the_scheduler_refuses_is_raised_as_what_it_is(tmp_path: Path) -> None:
    async def test(room: Room) -> None:
        with pytest.raises(Unauthenticated):
            await connect(room.url, "mst_wrong")
        with pytest.raises(NotFound, match="elsewhere"):
            await connect(room.url, room.token, pool="elsewhere")
        with pytest.raises(Unavailable):
            await connect("http://127.0.0.1:9", room.token)
        handle = await room.handle()
        with pytest.raises(InvalidRequest, match="required"):
            await handle.register_pipeline("p1", clusters(), None)
        with pytest.raises(InvalidRequest, match="shrink must be an async function"):
            await handle.register_pipeline("p1", clusters(), PlainHooks())
        with pytest.raises(InvalidRequest) as bad:
            await handle.register_pipeline("p1", {TRAIN: ClusterSpec([9])}, Engine(), weight=-1)
        assert [problem.field for problem in bad.value.problems] == ["weight"]
        with pytest.raises(InvalidRequest) as bad:
            await handle.register_pipeline("p1", {TRAIN: ClusterSpec([9])}, Engine())
        assert {problem.field for problem in bad.value.problems} == {"clusters", "clusters.actor_train"}
        with pytest.raises(RequestRefused, match="register"):
            await handle.admit_pipeline("p1")
        await handle.register_pipeline("p1", clusters(), Engine())
        with pytest.raises(RequestRefused, match="admitted"):
            await handle.request_gpus("p1", TRAIN, Priority.ACTOR_TRAINING)
        with pytest.raises(AlreadyExists):
            await handle.register_pipeline("p1", clusters(), Engine(), weight=2.0)
        with pytest.raises(InvalidRequest):
            await handle.request_gpus("p1", TRAIN, 9)  # type: ignore[arg-type]
        await handle.admit_pipeline("p1")
        with pytest.raises(RequestRefused, match="neither an estimate"):
            await handle.request_gpus("p1", INFER, Priority.GENERATION)
        with pytest.raises(InvalidRequest):
            await handle.report_progress(ProgressReport("p1", -1, 8))

    in_room(tmp_path, test)


def test_a_remote_batch_without_an_open_rollout_is_an_error_that_names_the_call(tmp_path: Path) -> None:
    async def test(room: Room) -> None:
        handle = await room.pipeline("p1", Engine())
        client = PipelineClient(handle, "p1")
        with pytest.raises(RequestRefused, match="begin_progress_batch of p1: its rollout is not open"):
            await client.begin_progress_batch(8)
        await client.signal_rollout_demand(1, 8)
        await client.begin_progress_batch(8)
        await handle.clear_progress("p1")
        with pytest.raises(RequestRefused, match="bump_completed of p1: its rollout is not open"):
            await client.bump_completed()

    in_room(tmp_path, test)


def test_unregistering_ends_who_waits_and_frees_everything(tmp_path: Path) -> None:
    async def test(room: Room) -> None:
        p1, p2 = await room.pipeline("p1", Engine()), await room.pipeline("p2", Engine())
        await p1.request_gpus("p1", TRAIN, Priority.ACTOR_TRAINING)
        asking = asyncio.create_task(p2.request_gpus("p2", TRAIN, Priority.ACTOR_TRAINING))
        await room.until(lambda: room.pool.scheduler.shares.requests)
        await (await room.handle()).unregister_pipeline("p2")
        with pytest.raises((RequestRefused, Conflict, NotFound)):
            await asking
        await p1.unregister_pipeline("p1")
        assert room.pool.scheduler.snapshot().idle == (0, 1, 2, 3)

    in_room(tmp_path, test)


# Hooks


def test_hooks_that_fail_quarantine_their_pipeline_and_registering_again_ends_it(tmp_path: Path) -> None:
    async def test(room: Room) -> None:
        engine = Engine()
        p1 = await room.pipeline("p1", engine)
        engine.fails = True
        with pytest.raises(PipelineQuarantined, match="ValueError: no memory"):
            await p1.request_gpus("p1", INFER, Priority.GENERATION, 8)
        assert engine.calls == ["expand [0, 1, 2, 3]"] * 2
        with pytest.raises(PipelineQuarantined, match="shrink"):
            await p1.register_pipeline("p1", clusters(), engine)
        engine.fails = False
        await p1.register_pipeline("p1", clusters(), engine)
        assert await p1.request_gpus("p1", INFER, Priority.GENERATION, 8) == ALL
        assert engine.awake == set(ALL)

    in_room(tmp_path, test)


def test_a_shrink_does_not_wait_for_an_expand_of_other_ranks(tmp_path: Path) -> None:
    class Slow(Engine):
        async def expand(self, ranks: Mapping[int, Sequence[int]]) -> None:
            if 2 in ranks:
                self.calls.append("slow")
                await self.held_up.wait()
            await super().expand(ranks)

    async def test(room: Room) -> None:
        engine = Slow()
        engine.held_up = asyncio.Event()
        one = await room.pipeline("p1", engine, 0, 1)
        two = await room.pipeline("p2", Engine(), 2, 3)
        await two.request_gpus("p2", TRAIN, Priority.ACTOR_TRAINING)
        assert await one.request_gpus("p1", INFER, Priority.GENERATION, 8) == [0, 1]
        await two.notify_release_gpus("p2", TRAIN)
        await room.until(lambda: "slow" in engine.calls)
        assert await one.request_gpus("p1", TRAIN, Priority.ACTOR_TRAINING) == [0, 1]
        assert engine.calls[-1] == "shrink [0, 1]" and engine.cancelled == 0
        engine.held_up.set()
        await room.until(lambda: engine.awake == {2, 3})

    in_room(tmp_path, test)


def test_a_hook_that_hangs_is_cancelled_before_it_is_called_again(tmp_path: Path) -> None:
    async def test(room: Room) -> None:
        engine = Engine()
        p1 = await room.pipeline("p1", engine)
        engine.go.clear()
        asking = asyncio.create_task(p1.request_gpus("p1", INFER, Priority.GENERATION, 8))
        await room.until(lambda: len(engine.calls) == 2)
        assert engine.cancelled == 1
        engine.go.set()
        assert await asking == ALL
        assert not (await p1.snapshot()).quarantined

    in_room(tmp_path, test, hook_timeout_s=0.5)


def test_a_late_answer_to_an_earlier_call_changes_nothing(tmp_path: Path) -> None:
    async def test(room: Room) -> None:
        engine = Engine()
        p1 = await room.pipeline("p1", engine)
        engine.go.clear()
        asking = asyncio.create_task(p1.request_gpus("p1", INFER, Priority.GENERATION, 8))
        first = await _next(p1, 0)
        second = await _next(p1, first.epoch)
        with pytest.raises(Conflict):
            await p1.answer("p1", first, ActionAnswer(first.epoch, True))
        assert {one.state for one in (await p1.snapshot()).leases.values()} == {"granting"}
        engine.go.set()
        assert await asking == ALL
        await p1.answer("p1", second, ActionAnswer(second.epoch, True))  # said twice, heard once
        assert {one.state for one in (await p1.snapshot()).leases.values()} == {"held"}

    in_room(tmp_path, test, hook_timeout_s=0.5)


async def _next(handle: RemoteScheduler, after: int) -> Action:
    while (found := await handle.next_action("p1", after)) is None:
        pass
    return found


def test_a_long_hook_does_not_make_its_pipeline_silent(tmp_path: Path) -> None:
    async def test(room: Room) -> None:
        engine = Engine()
        p1 = await room.pipeline("p1", engine)
        engine.go.clear()
        asking = asyncio.create_task(p1.request_gpus("p1", INFER, Priority.GENERATION, 8))
        await engine.called.wait()
        heard = [room.pool.view()["pipelines"][0]["silentSeconds"]]
        began = asyncio.get_running_loop().time()
        await room.until(lambda: asyncio.get_running_loop().time() - began > 1.0)  # twice the time to live
        heard.append(room.pool.view()["pipelines"][0]["silentSeconds"])
        engine.go.set()
        assert await asking == ALL
        assert max(heard) < 0.5 and not (await p1.snapshot()).quarantined

    in_room(tmp_path, test, pipeline_ttl_s=0.5)


# Deaths


def test_after_a_crash_of_the_servers_machine_a_pipeline_shrinks_everything_before_it_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(room: Room) -> None:
        engine = Engine()
        handle = await room.pipeline("p1", engine)
        assert await handle.request_gpus("p1", INFER, Priority.GENERATION, 8) == ALL
        await room.pool.stop()
        restart_the_machine(tmp_path, monkeypatch)
        await room.pool.start()
        await room.until(lambda: len(engine.calls) == 3)
        assert engine.calls == ["expand [0, 1, 2, 3]", "shrink [0, 1, 2, 3]", "expand [0, 1, 2, 3]"]

    in_room(tmp_path, test, journal=tmp_path / "j")


def test_a_process_that_was_taken_for_dead_does_not_speak_for_the_next_one(tmp_path: Path) -> None:
    async def test(room: Room) -> None:
        old, new = Engine(), Engine()
        before = await room.pipeline("p1", old)
        assert await before.request_gpus("p1", TRAIN, Priority.ACTOR_TRAINING) == [0, 1]
        await room.pool.scheduler.quarantine_pipeline("p1", "it seemed dead")
        after = await room.pipeline("p1", new)
        assert new.calls == ["shrink [0, 1, 2, 3]"] and not old.calls
        assert await after.request_gpus("p1", TRAIN, Priority.ACTOR_TRAINING) == [0, 1]
        with pytest.raises(AlreadyExists, match="another process"):
            await before.notify_release_gpus("p1", TRAIN)
        with pytest.raises(AlreadyExists, match="another process"):
            await before.next_action("p1", 0)
        with pytest.raises(AlreadyExists, match="another process"):
            await before.attach("p1")
        assert sorted((await after.snapshot()).leases) == [0, 1]
        await after.notify_release_gpus("p1", TRAIN)
        assert await after.request_gpus("p1", INFER, Priority.GENERATION, 8) == ALL
        assert new.awake == set(ALL) and not old.calls

    in_room(tmp_path, test)


@pytest.fixture
def fleet_of_sharers(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path)
    yield made
    made.close()


def test_a_client_that_stands_still_is_quarantined_and_the_other_goes_on(
    tmp_path: Path, fleet_of_sharers: Fleet
) -> None:
    async def test(room: Room) -> None:
        fleet, token = fleet_of_sharers, {"MUSTER_TOKEN": room.token}
        doomed = fleet.start(sys.executable, SHARER, room.url, "doomed", "0,1", "0,1", "1000", **token)
        other = fleet.start(sys.executable, SHARER, room.url, "other", "2,3", "0,1,2,3", "1000", **token)
        for process in (doomed, other):
            await asyncio.to_thread(process.expect, r"rollout 1 trained")
        doomed.kill(signal.SIGSTOP)
        await room.until(lambda: room.pool.scheduler.snapshot().quarantined)
        [(name, why)] = room.pool.scheduler.snapshot().quarantined.items()
        assert (name, why) == ("doomed", "nothing was heard for 1 s; its process still runs")
        done = other.text.count("trained")
        await room.until(lambda: other.text.count("trained") > done + 1)
        assert "doomed" in room.pool.scheduler.snapshot().quarantined
        reborn = fleet.start(sys.executable, SHARER, room.url, "doomed", "0,1", "0,1", "2", **token)
        assert await asyncio.to_thread(reborn.wait) == 0, reborn.text
        assert reborn.text.startswith("shrunk [0, 1]\n") and reborn.text.endswith("done\n")
        assert not room.pool.scheduler.snapshot().quarantined
        done = other.text.count("trained")
        await room.until(lambda: other.text.count("trained") > done)

    in_room(tmp_path, test, pipeline_ttl_s=1.0, min_turn_s=0.05)


@pytest.mark.usefixtures("processes")
def test_a_control_plane_that_is_killed_comes_back_with_leases_and_demand(tmp_path: Path) -> None:
    plane = Plane(tmp_path)
    plane.env["MUSTER_POOL_GPUS"] = "0,1,2,3"
    plane.env["MUSTER_GPUS"] = "6"
    try:
        plane.serve()
        asyncio.run(_through_a_restart(plane))
    finally:
        plane.close()


async def _through_a_restart(plane: Plane) -> None:
    engine = Engine()
    async with asyncio.timeout(2 * BOUND_S), await connect(plane.url, plane.api_token) as handle:
        await handle.register_pipeline("p1", clusters(0, 1), engine)
        await handle.admit_pipeline("p1")
        assert await handle.request_gpus("p1", INFER, Priority.GENERATION, 16) == ALL
        await handle.report_progress(ProgressReport("p1", 4, 16))
        before = await handle.snapshot()
        assert before.open_rollouts == {"p1": 16}
        rival = await connect(plane.url, plane.api_token)
        await rival.register_pipeline("p2", clusters(2, 3), Engine())
        await rival.admit_pipeline("p2")
        assert await rival.request_gpus("p2", TRAIN, Priority.ACTOR_TRAINING) == [2, 3]  # shrinks p1 to two
        assert await handle.request_gpus("p1", TRAIN, Priority.ACTOR_TRAINING) == [0, 1]  # and to none
        waiting = asyncio.create_task(rival.request_gpus("p2", INFER, Priority.GENERATION, 8))
        while "p2" not in (left := await handle.snapshot()).open_rollouts:
            pass
        calls = len(engine.calls)
        await asyncio.to_thread(plane.crash)
        during = asyncio.create_task(handle.report_progress(ProgressReport("p1", 8, 16)))
        await asyncio.to_thread(plane.serve)
        await during
        after = await handle.snapshot()
        assert after.leases == left.leases
        assert after.open_rollouts == {"p1": 16, "p2": 8}
        assert [(one.pipeline, one.cluster) for one in after.pending] == [("p2", INFER)]
        while {one["state"] for one in (await handle.view())["pipelines"]} != {"attached"}:
            pass  # both attach again by themselves
        await handle.notify_release_gpus("p1", TRAIN)
        # Both rollouts are open, so they share the released GPUs.
        got = await waiting
        assert len(got) == 1
        await _until(lambda: len(engine.calls) > calls)
        rest = [gpu for gpu in (0, 1) if gpu not in got]
        assert await handle.request_gpus("p1", INFER, Priority.GENERATION) == rest
        assert (await handle.await_release_gpus("p1")).gpus == tuple(rest)
        assert not engine.awake
        await rival.stop()


async def _until(look: Callable[[], bool]) -> None:
    while not look():
        await asyncio.sleep(0.005)


# The daemon and the command line


def test_what_the_pool_of_0_1_had_comes_first_and_the_rest_is_in_it_too() -> None:
    assert gpus.visible({"MUSTER_GPUS": "6", "MUSTER_POOL_GPUS": "3,1, 2"}) == ("3", "1", "2", "0", "4", "5")
    assert gpus.visible({"CUDA_VISIBLE_DEVICES": "4,5,6", "MUSTER_POOL_GPUS": "5"}) == ("5", "4", "6")
    assert gpus.pooled({}) == ()
    with pytest.raises(ValueError, match="1 more than once"):
        gpus.pooled({"MUSTER_POOL_GPUS": "1,2,1"})


@pytest.mark.usefixtures("processes")
def test_the_command_line_shows_the_pool_and_takes_a_pipeline_out(tmp_path: Path) -> None:
    plane = Plane(tmp_path)
    plane.env |= {"MUSTER_POOL_GPUS": "4,5,6,7", "MUSTER_POOL_GPUS_PER_NODE": "2"}
    try:
        plane.serve()
        shown = _ran(plane, "share", "status", "-o", "json")
        assert (shown["gpus"], shown["gpusPerNode"], shown["devices"]) == (4, 2, ["4", "5", "6", "7"])
        asyncio.run(_holding(plane))
        table = plane.muster("share", "status")
        assert table.wait() == 0
        assert [line.split() for line in table.text.splitlines()][1:3] == [
            ["0", "p1", "actor_train", "0", "held"],
            ["1", "p1", "actor_train", "1", "held"],
        ]
        assert [one["id"] for one in _ran(plane, "share", "pipelines", "-o", "json")["items"]] == ["p1"]
        kinds = [one["kind"] for one in _ran(plane, "share", "events", "-o", "json")["items"]]
        assert kinds == ["started", "registered", "admitted", "requested", "granted"]
        assert plane.muster("share", "unregister", "p1").wait() == 0
        assert _ran(plane, "share", "status", "-o", "json")["idle"] == [0, 1, 2, 3]
        wrong = plane.muster("share", "status", "--pool", "other")
        assert wrong.wait() != 0 and "there is no pool 'other'" in wrong.text
    finally:
        plane.close()


def _ran(plane: Plane, *words: str) -> Any:
    process = plane.muster(*words)
    assert process.wait() == 0, process.text
    return json.loads(process.text)


async def _holding(plane: Plane) -> None:
    async with await connect(plane.url, plane.api_token) as handle:
        form = {TRAIN: ClusterSpec([0, 1]), INFER: ClusterSpec(ALL)}
        await handle.register_pipeline("p1", form, Engine())
        await handle.admit_pipeline("p1")
        assert await handle.request_gpus("p1", TRAIN, Priority.ACTOR_TRAINING) == [0, 1]


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("env", "told"),
    [
        ({"MUSTER_POOL_GPUS": "0,0"}, "more than once"),
        ({"MUSTER_POOL_GPUS": "0,1", "MUSTER_POOL_GPUS_PER_NODE": "3"}, "from 1 to 2"),
    ],
)
def test_a_pool_that_cannot_be_is_refused_at_the_start(tmp_path: Path, env: dict[str, str], told: str) -> None:
    fleet = Fleet(tmp_path)
    try:
        process = fleet.start(sys.executable, "-m", "muster.daemon", "--home", str(tmp_path / "home"), **env)
        assert process.wait() == 1
        eventually(lambda: told in process.text, told, 5)
    finally:
        fleet.close()

"""When a pipeline's process is gone, its GPUs are freed, but no GPU that may still be in use is given away."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from muster.errors import MusterError
from muster.sharing import Priority, families
from muster.sharing.remote import connect
from muster.types.pools import PoolEvent
from muster.types.sharing import PipelineProcess
from tests.fleet import PROGRAMS, Fleet, Process, eventually, free_port
from tests.plane import Plane
from tests.sharing.blocking import control_plane
from tests.sharing.room import ALL, TRAIN, Engine, Room, in_room

SHARER = str(PROGRAMS / "sharer.py")
HOLDER = str(PROGRAMS / "gpu_holder.py")
SILENCE_S = 3600.0  # silence frees nothing in these tests
TTL_S = 2.0  # A living process on a busy machine reports more often than this.


@pytest.fixture
def pipelines(tmp_path: Path, processes: None) -> Iterator[Fleet]:
    made = Fleet(tmp_path)
    yield made
    made.close()


def hold(fleet: Fleet, room: Room, *words: str) -> Process:
    """Start a process, and return once it holds all GPUs of actor_train."""
    process = fleet.start(sys.executable, HOLDER, room.url, *words, MUSTER_TOKEN=room.token)
    process.expect(r"holds")
    return process


def child_of(process: Process) -> int:
    return int(process.expect(r"child (\d+)")[1])


def ends(room: Room, kind: str = "unregistered") -> list[PoolEvent]:
    return [one for one in room.pool.events() if one.kind == kind]


async def told(room: Room, process: Process, kind: str) -> str:
    await room.until(lambda: ends(room, kind))
    [event] = ends(room, kind)
    assert event.pipeline == "p1" and f"its process {process.pid} has ended" in event.text
    return event.text


@pytest.mark.scenario
def test_a_killed_process_frees_its_fixed_lease_and_its_peer_is_granted_it(tmp_path: Path, pipelines: Fleet) -> None:
    async def test(room: Room) -> None:
        doomed = await asyncio.to_thread(hold, pipelines, room, "none")
        peer = await room.pipeline("p2", Engine())
        waiting = asyncio.create_task(peer.request_gpus("p2", TRAIN, Priority.ACTOR_TRAINING))
        await room.until(lambda: room.pool.scheduler.shares.requests)
        assert room.pool.view()["pipelines"][0].get("process") == doomed.pid
        doomed.kill(signal.SIGKILL)
        assert await waiting == [0, 1]
        assert "nothing of it is left on its GPUs" in await told(room, doomed, "unregistered")
        assert ends(room)[0].gpus == (0, 1)

    in_room(tmp_path, test, pipeline_ttl_s=SILENCE_S)


@pytest.mark.parametrize(
    "kind", ["before", pytest.param("spawned", marks=pytest.mark.scenario), "forked", "emptied", "orphaned"]
)
def test_a_child_that_outlives_its_pipeline_keeps_the_gpus_and_the_reason_names_it(
    tmp_path: Path, pipelines: Fleet, kind: str
) -> None:
    """Children: before the registration; with the environment; by fork alone; without environment; of a dead child."""

    async def test(room: Room) -> None:
        doomed = await asyncio.to_thread(hold, pipelines, room, kind)
        child = await asyncio.to_thread(child_of, doomed)
        if kind == "emptied":  # it has no mark, so the pool must observe it while its parent lives
            watch = room.pool.tenants._watches["p1"]
            await room.until(lambda: child in [one.pid for one in watch.children])
        doomed.kill(signal.SIGKILL)
        reason = await told(room, doomed, "quarantined")
        assert f"process {child} (" in reason
        assert sorted(room.pool.scheduler.snapshot().leases) == [0, 1]
        watcher = await room.pipeline("p2", Engine())
        waiting = asyncio.create_task(watcher.request_gpus("p2", TRAIN, Priority.ACTOR_TRAINING))
        await room.until(
            lambda: any(f"process {child}" in one.reason for one in room.pool.scheduler.snapshot().pending)
        )
        os.kill(child, signal.SIGKILL)
        assert await waiting == [0, 1]
        assert "nothing of it is left" in ends(room)[0].text

    in_room(tmp_path, test, pipeline_ttl_s=SILENCE_S)


def test_a_process_that_dies_while_the_control_plane_is_away_is_missed_at_its_start(
    tmp_path: Path, pipelines: Fleet
) -> None:
    async def test(room: Room) -> None:
        doomed = await asyncio.to_thread(hold, pipelines, room, "none")
        await room.pool.stop()
        doomed.kill(signal.SIGKILL)
        await asyncio.to_thread(doomed.wait)
        await room.pool.start()
        await told(room, doomed, "unregistered")
        assert room.pool.scheduler.snapshot().idle == tuple(ALL)

    in_room(tmp_path, test, pipeline_ttl_s=SILENCE_S, journal=tmp_path / "j")


def test_a_successor_is_registered_at_once(tmp_path: Path, pipelines: Fleet) -> None:
    async def test(room: Room) -> None:
        doomed = await asyncio.to_thread(hold, pipelines, room, "none")
        doomed.kill(signal.SIGKILL)
        successor = await asyncio.to_thread(hold, pipelines, room, "none")
        assert room.pool.view()["pipelines"][0].get("process") == successor.pid
        assert len(ends(room)) == 1

    in_room(tmp_path, test, pipeline_ttl_s=SILENCE_S)


def test_a_process_that_dies_in_the_middle_of_a_hook_frees_everything(tmp_path: Path, pipelines: Fleet) -> None:
    async def test(room: Room) -> None:
        doomed = pipelines.start(sys.executable, HOLDER, room.url, "hook", MUSTER_TOKEN=room.token)
        await asyncio.to_thread(doomed.expect, "expanding")
        assert {one.state for one in room.pool.scheduler.snapshot().leases.values()} == {"granting"}
        doomed.kill(signal.SIGKILL)
        await told(room, doomed, "unregistered")
        assert room.pool.scheduler.snapshot().idle == tuple(ALL)

    in_room(tmp_path, test, pipeline_ttl_s=SILENCE_S)


def test_an_ended_process_that_forgot_to_unregister_frees_its_gpus(tmp_path: Path, pipelines: Fleet) -> None:
    async def test(room: Room) -> None:
        holder = await asyncio.to_thread(hold, pipelines, room, "none")
        holder.kill(signal.SIGTERM)
        await told(room, holder, "unregistered")

    in_room(tmp_path, test, pipeline_ttl_s=SILENCE_S)


def test_a_stopped_process_is_not_gone(tmp_path: Path, pipelines: Fleet) -> None:
    async def test(room: Room) -> None:
        stopped = await asyncio.to_thread(hold, pipelines, room, "none")
        stopped.kill(signal.SIGSTOP)
        await room.until(lambda: ends(room, "quarantined"))
        assert ends(room, "quarantined")[0].text == "nothing was heard for 1 s; its process still runs"
        assert sorted(room.pool.scheduler.snapshot().leases) == [0, 1]
        stopped.kill(signal.SIGKILL)
        await told(room, stopped, "unregistered")

    in_room(tmp_path, test, pipeline_ttl_s=1.0)


@pytest.mark.parametrize("claim", ["1", "999999999", "{server}", "{server},{liar}", "{liar},999999999"])
def test_a_false_claim_of_pids_proves_nothing(tmp_path: Path, pipelines: Fleet, claim: str) -> None:
    """If a process registers a foreign or missing pid as its own, only its silence shows its end."""

    async def test(room: Room) -> None:
        given = claim.replace("{server}", str(os.getppid()))
        liar = await asyncio.to_thread(hold, pipelines, room, "none", given)
        assert room.pool.view()["pipelines"][0].get("process") is None
        liar.kill(signal.SIGKILL)
        await room.until(lambda: ends(room, "quarantined"))
        assert "cannot be seen from here" in ends(room, "quarantined")[0].text
        assert sorted(room.pool.scheduler.snapshot().leases) == [0, 1]

    in_room(tmp_path, test, pipeline_ttl_s=1.0)


@pytest.mark.usefixtures("processes")
def test_two_pipelines_on_four_gpus_and_one_is_killed_in_its_third_rollout(tmp_path: Path) -> None:
    plane = Plane(tmp_path)
    plane.env["MUSTER_GPUS"] = "4"
    try:
        plane.serve()
        token = {"MUSTER_TOKEN": plane.api_token}
        one = plane.start(sys.executable, SHARER, plane.url, "p1", "0,1", "0,1,2,3", "5", **token)
        two = plane.start(sys.executable, SHARER, plane.url, "p2", "2,3", "0,1,2,3", "5", **token)
        one.expect("rollout 1 trained")
        one.kill(signal.SIGKILL)
        killed_in = two.text.count("trained")
        assert two.wait() == 0, two.text
        assert two.text.count("trained") == 5 and killed_in < 5
        pool = plane.muster("pool")
        assert pool.wait() == 0 and "4 GPUs: 4 idle" in pool.text, pool.text
        events = plane.muster("share", "events")
        assert events.wait() == 0
        assert f"its process {one.pid} has ended, and nothing of it is left on its GPUs" in events.text
    finally:
        plane.close()


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("child", [False, True])
def test_a_control_plane_that_was_killed_too_finds_out_at_its_start(tmp_path: Path, child: bool) -> None:
    plane = Plane(tmp_path)
    plane.env["MUSTER_GPUS"] = "4"
    try:
        plane.serve()
        kind = "spawned" if child else "none"
        doomed = plane.start(sys.executable, HOLDER, plane.url, kind, MUSTER_TOKEN=plane.api_token)
        doomed.expect("holds")
        left = child_of(doomed) if child else 0
        plane.crash()
        doomed.kill()
        doomed.wait()
        plane.serve()
        if child:
            assert f"process {left}" in eventually(lambda: asyncio.run(quarantine(plane)), "it is quarantined")
            os.kill(left, signal.SIGKILL)
        eventually(lambda: asyncio.run(idle(plane)) == (0, 1, 2, 3), "all GPUs are free")
    finally:
        plane.close()


async def quarantine(plane: Plane) -> str:
    async with await connect(plane.url, plane.api_token) as handle:
        return (await handle.snapshot()).quarantined.get("p1", "")


async def idle(plane: Plane) -> tuple[int, ...]:
    with contextlib.suppress(MusterError):
        async with await connect(plane.url, plane.api_token) as handle:
            return (await handle.snapshot()).idle
    return ()


@pytest.mark.usefixtures("processes")
def test_ranks_of_a_dead_speaker_keep_the_gpus_until_they_are_gone_too(tmp_path: Path) -> None:
    with control_plane(tmp_path) as house:
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        env = {"MUSTER_URL": house.plane.url, "MUSTER_TOKEN": house.plane.api_token, **place}
        program = (sys.executable, str(PROGRAMS / "blocking_ranks.py"), "holds")
        first, second = (house.plane.start(*program, **env, RANK=str(rank)) for rank in range(2))
        first.expect("holds")
        second.expect("holds")
        second.kill(signal.SIGSTOP)  # otherwise it detects that the first rank is gone, and ends
        first.kill(signal.SIGKILL)
        eventually(lambda: f"process {second.pid}" in house.snapshot().quarantined.get("p1", ""), "it is quarantined")
        assert house.snapshot().leases[0].pipeline == "p1"
        second.kill(signal.SIGKILL)
        eventually(lambda: not house.snapshot().leases, "its GPUs are free")


def test_a_killed_pipeline_keeps_what_a_known_child_may_use_although_it_is_silent(
    tmp_path: Path, pipelines: Fleet
) -> None:
    async def test(room: Room) -> None:
        doomed = await asyncio.to_thread(hold, pipelines, room, "spawned")
        child = await asyncio.to_thread(child_of, doomed)
        doomed.kill(signal.SIGKILL)
        await told(room, doomed, "quarantined")
        await (await room.handle()).kill_pipeline("p1", "enough")
        heard = asyncio.get_running_loop().time()
        await room.until(lambda: asyncio.get_running_loop().time() - heard > 1.5 * TTL_S)
        assert sorted(room.pool.scheduler.snapshot().leases) == [0, 1]
        os.kill(child, signal.SIGKILL)
        await room.until(lambda: room.pool.scheduler.snapshot().idle == tuple(ALL))

    in_room(tmp_path, test, pipeline_ttl_s=TTL_S)


# What is looked at


def of(pid: int) -> PipelineProcess:
    return PipelineProcess(pid, ticks_of(pid), families.space())


def ticks_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def a_process(*words: str, **env: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(words, env={"PATH": os.environ["PATH"], **env}, start_new_session=True)


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with a_process("sleep", "600") as process:
        yield process
        process.kill()


def test_a_pid_that_is_used_again_is_another_process(sleeper: subprocess.Popen[bytes]) -> None:
    real = of(sleeper.pid)
    former = replace(real, started=real.started - 1)
    assert families.open_pidfd(former) is None
    assert families.survivors(families.Family("", (former,)), (), families.Neighbours()) == ""
    assert f"process {sleeper.pid}" in families.survivors(families.Family("", (real,)), (), families.Neighbours())


def test_of_an_earlier_boot_nothing_is_left_and_another_namespace_cannot_be_seen(
    sleeper: subprocess.Popen[bytes],
) -> None:
    real = of(sleeper.pid)
    boot, _, namespace = real.space.partition("/")
    earlier = families.Family("", (replace(real, space=f"an-earlier-one/{namespace}"),))
    assert families.open_pidfd(earlier.registered[0]) is None
    assert families.survivors(earlier, (), families.Neighbours()) == ""
    elsewhere = families.Family("", (replace(real, space=f"{boot}/pid:[1]"),))
    with pytest.raises(families.Unknowable):
        families.open_pidfd(elsewhere.registered[0])
    with pytest.raises(families.Unknowable):
        families.survivors(elsewhere, (), families.Neighbours())


def test_a_session_that_the_process_led_is_of_its_family() -> None:
    leader = a_process("sh", "-c", "env -i sleep 600 & wait")
    family = families.Family("", (of(leader.pid),))

    def child() -> int:
        [tree] = families.descendants({"": family.registered}).values()
        return next((process.pid for process in tree if process.pid != leader.pid), 0)

    try:
        left = eventually(child, "it starts a child")
    finally:
        leader.kill()
        leader.wait()
    try:
        assert f"process {left}" in families.survivors(family, (), families.Neighbours())
    finally:
        os.kill(left, signal.SIGKILL)
    eventually(lambda: not families.survivors(family, (), families.Neighbours()), "all are gone")


def test_whoever_has_a_gpu_open_counts_unless_it_is_known_to_be_somebody_elses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "_GPU_FILE", re.compile("/dev/full"))  # it stands for a GPU
    gone = families.Family("gone", (PipelineProcess(2**22 - 1, 1, families.space()),))
    with a_process("sh", "-c", "exec sleep 600 3>/dev/full", MUSTER_RUN_ID="a-training") as user:
        try:
            held = f"process {user.pid} (sleep 600) has /dev/full open"
            eventually(lambda: families.survivors(gone, ("0",), families.Neighbours()) == held, held)
            neighbour = families.Family("other", (of(user.pid),))
            assert families.survivors(gone, ("0",), families.Neighbours((neighbour,))) == ""
            assert families.survivors(gone, ("0",), families.Neighbours(runs=frozenset({"a-training"}))) == ""
            assert families.survivors(gone, ("0",), families.Neighbours(runs=frozenset({"b-training"}))) == held
        finally:
            user.kill()


def test_a_driver_that_lists_processes_or_fails_keeps_the_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families, "_GPU_FILE", re.compile("/dev/full"))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    smi = tmp_path / "nvidia-smi"
    gone = families.Family("gone", (PipelineProcess(2**22 - 1, 1, families.space()),))
    for script, said in (("echo 4194303", "process 4194303"), ("exit 0", "")):
        smi.write_text(f"#!/bin/sh\n{script}\n")
        smi.chmod(0o755)
        assert said in families.survivors(gone, ("0",), families.Neighbours())
    smi.write_text("#!/bin/sh\necho 'driver mismatch'; exit 9\n")
    with pytest.raises(families.Unknowable, match="driver mismatch"):
        families.survivors(gone, ("0",), families.Neighbours())

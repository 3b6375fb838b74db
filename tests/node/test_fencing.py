"""A rank whose agent and guard are stopped ends itself when the lease of its worker is over."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
import timeit
from collections.abc import Iterator
from pathlib import Path

import pytest

import muster
from muster.core.member.guard import GuardState
from muster.core.member.held_round import HeldRound
from muster.core.member.orders import Beat, Order
from muster.core.member.state import MemberState
from muster.node import fencing
from muster.types.frames import RenewedFrame, WelcomeFrame
from muster.types.world import MemberId, RunId, Settings
from tests.fleet import Fleet, Process, eventually, family, gone, kill_all
from tests.netns import fenced_log

PROGRAM = str(Path(__file__).parents[1] / "programs" / "fenced_calls.py")
OPTIONS = ("--nnodes", "2", "--spares", "1", "--max-restarts", "0")
SURE_S = 60.0


def marks(fleet: Fleet) -> list[fenced_log.Mark]:
    return fenced_log.read_file(fleet.notes / "fenced.log")


def at_work(fleet: Fleet, number: int) -> dict[int, fenced_log.Mark]:
    """Wait until both ranks of a round have left a mark. Return the last mark of each."""

    def look() -> dict[int, fenced_log.Mark] | None:
        last = {mark.rank: mark for mark in marks(fleet) if mark.round == number and mark.kind == "beat"}
        return last if len(last) == 2 else None

    return eventually(look, f"both ranks of round {number} are at work")


def later(fleet: Fleet, number: int, after: float) -> None:
    """Wait until both ranks of a round have left a mark after that moment."""

    def look() -> bool:
        late = {mark.rank for mark in marks(fleet) if mark.round == number and mark.at > after}
        return len(late) == 2

    eventually(look, f"both ranks of round {number} still work")


def three(fleet: Fleet, call: str, *options: str) -> dict[str, Process]:
    program = (PROGRAM, str(fleet.notes), call)
    return {name: fleet.node(name, *OPTIONS, *options, program=program) for name in ("a", "b", "c")}


def stop_agent_and_guard(node: Process) -> list[int]:
    pids = family(node.pid)[:2]
    kill_all(pids, signal.SIGSTOP)
    return pids


@pytest.mark.parametrize(
    "call",
    [
        pytest.param("progress", marks=pytest.mark.scenario),
        "commit",
        "should_save",
        "saving",
        "log",
        "restore",
        "thread",
    ],
)
def test_a_rank_ends_itself_when_agent_and_guard_are_stopped(fleet: Fleet, call: str) -> None:
    fleet.coordinator()
    nodes = three(fleet, call)
    victim = at_work(fleet, 0)[1]
    stopped = stop_agent_and_guard(nodes[victim.worker])
    eventually(lambda: gone(victim.pid), "the rank has ended")
    at_work(fleet, 1)
    assert not any(gone(pid) for pid in stopped), "nobody else ended it"
    later(fleet, 1, time.monotonic())
    assert fenced_log.problems(marks(fleet)) == []
    [text] = [path.read_text() for path in (fleet.folder / "logs" / "round-0").glob("rank-1.err")]
    [line] = [line for line in text.splitlines() if line.startswith("muster: ")]
    assert line.startswith(f"muster: rank 1 of round 0 ends: the lease of its worker {victim.worker} ended ")
    kill_all(stopped, signal.SIGCONT)
    fleet.until("the worker is back as a spare", lambda v: len(v["members"]) == 3 and v["round"] == 1)
    (fleet.notes / "go").touch()
    assert [node.wait() for node in nodes.values()] == [0, 0, 0]


def test_ranks_go_on_while_the_coordinator_is_dead(fleet: Fleet) -> None:
    """Nothing renews the lease then. Ranks still end if their agent and guard are stopped during that time."""
    coordinator = fleet.coordinator()
    node = fleet.node("a", "--nnodes", "1", "--lease-s", "0.6", program=(PROGRAM, str(fleet.notes), "progress"))
    begun = eventually(lambda: marks(fleet), "it is at work")[0]
    coordinator.kill()
    coordinator.wait()
    dead_at = time.monotonic()
    eventually(lambda: marks(fleet)[-1].at > dead_at + 3.0, "it works for several leases")
    assert not gone(begun.pid)
    stopped = stop_agent_and_guard(node)
    eventually(lambda: gone(begun.pid), "the rank has ended")
    kill_all(stopped, signal.SIGCONT)


def test_a_worker_that_stands_still_for_less_than_its_lease_keeps_its_ranks(fleet: Fleet) -> None:
    fleet.coordinator()
    node = fleet.node("a", "--nnodes", "1", "--lease-s", "30", program=(PROGRAM, str(fleet.notes), "progress"))
    begun = eventually(lambda: marks(fleet), "it is at work")[0]
    stopped = stop_agent_and_guard(node)
    still_at = time.monotonic()
    eventually(lambda: marks(fleet)[-1].at > still_at + 2.0, "it works beside them")
    kill_all(stopped, signal.SIGCONT)
    (fleet.notes / "go").touch()
    assert node.wait() == 0
    assert {mark.pid for mark in marks(fleet)} == {begun.pid}


def test_ranks_of_torchrun_end_themselves_too(fleet: Fleet) -> None:
    fleet.coordinator()
    nodes = {}
    for name in ("a", "b", "c"):
        nodes[name] = fleet.start(
            *(sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=muster"),
            *(f"--rdzv-endpoint={fleet.address}", f"--rdzv-id={fleet.run_id}", "--nnodes=2:3"),
            *(f"--rdzv-conf=spares=1,name={name}", "--max-restarts=0", "--nproc-per-node=1"),
            *(PROGRAM, str(fleet.notes), "progress"),
            MUSTER_ROUND="0",
            MUSTER_WORKER=name,
        )
    began = at_work(fleet, 0)
    victim = began[1]
    guards = [pid for pid in family(nodes[victim.worker].pid) if b"torchrun_guard" in command(pid)]
    stopped = [nodes[victim.worker].pid, *guards]
    assert len(stopped) == 2
    kill_all(stopped, signal.SIGSTOP)
    eventually(lambda: gone(victim.pid), "the rank has ended")
    assert not any(gone(pid) for pid in stopped), "nobody else ended it"
    (fleet.notes / "go").touch()
    kill_all([process.pid for process in nodes.values()])


def command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


# What a rank sees ---------------------------------------------------------------------------------


@pytest.fixture
def lease(monkeypatch: pytest.MonkeyPatch) -> Iterator[fencing.LeaseFile]:
    file = fencing.LeaseFile()
    monkeypatch.setenv(fencing.FILE_VARIABLE, file.path)
    yield file
    file.close()


def call_in_another_process(code: str = "import muster; muster.progress(1)") -> subprocess.CompletedProcess[str]:
    env = os.environ | {"RANK": "3", "MUSTER_ROUND": "7", "MUSTER_WORKER": "gpu-4"}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=SURE_S)


def test_a_rank_whose_lease_is_over_exits_75_with_one_line(lease: fencing.LeaseFile) -> None:
    now = time.monotonic()
    lease.publish(now - 1.0, now - 3.0)
    ended = call_in_another_process("import atexit, muster; atexit.register(print, 'no'); muster.progress(1); print()")
    assert (ended.returncode, ended.stdout) == (75, "")
    [line] = ended.stderr.splitlines()
    assert line.startswith("muster: rank 3 of round 7 ends: the lease of its worker gpu-4 ended ")


def test_also_when_it_calls_in_a_thread(lease: fencing.LeaseFile) -> None:
    lease.publish(time.monotonic() - 1.0, 0.0)
    code = "import muster, threading as t; a = t.Thread(target=muster.progress, args=[1]); a.start(); a.join(); print()"
    ended = call_in_another_process(code)
    assert (ended.returncode, ended.stdout) == (75, "")


def test_its_children_do_not_outlive_it(lease: fencing.LeaseFile) -> None:
    lease.publish(time.monotonic() - 1.0, 0.0)
    code = (
        "import muster, subprocess, sys; a = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        "print(a.pid, flush=True); muster.progress(1)"
    )
    ended = call_in_another_process(code)
    assert ended.returncode == 75
    eventually(lambda: gone(int(ended.stdout)), "its child has ended")


def test_a_lease_that_lasts_ends_nobody(lease: fencing.LeaseFile) -> None:
    now = time.monotonic()
    lease.publish(now + SURE_S, now)
    assert call_in_another_process().returncode == 0
    lease.publish(math.inf, math.inf)
    assert call_in_another_process().returncode == 0


def test_after_a_suspension_a_rank_waits_for_its_agent(
    lease: fencing.LeaseFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steady clock stood still during the suspension, so only a lease that was requested afterwards counts."""
    asked_at = time.monotonic()
    lease.publish(asked_at + SURE_S, asked_at)
    slept_s, boot = 3600.0, time.clock_gettime
    monkeypatch.setattr(time, "clock_gettime", lambda clock: boot(clock) + slept_s)
    over = threading.Event()

    def call() -> None:
        muster.progress(1)
        over.set()

    rank = threading.Thread(target=call)
    rank.start()
    lease.publish(asked_at + SURE_S, asked_at)  # the agent publishes the earlier lease again
    assert not over.wait(0.2)
    renewed_at = time.monotonic()
    lease.publish(renewed_at + SURE_S, renewed_at)
    assert over.wait(SURE_S)
    rank.join()


@pytest.mark.parametrize("kind", ["missing", "short", "other", "folder", "pipe", "empty name"])
def test_what_is_not_the_agents_file_ends_nobody(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process may have the pid of an agent that has ended."""
    path = tmp_path / "file"
    match kind:
        case "short":
            path.write_bytes(b"muster")
        case "other":
            path.write_bytes(bytes(24))
        case "folder":
            path.mkdir()
        case "pipe":
            os.mkfifo(path)
    monkeypatch.setenv(fencing.FILE_VARIABLE, "" if kind == "empty name" else str(path))
    assert call_in_another_process().returncode == 0


def test_a_rank_cannot_change_the_lease(lease: fencing.LeaseFile) -> None:
    """A rank cannot truncate the file, either: the agent would die at its next write to the memory."""
    lease.publish(time.monotonic() - 1.0, 0.0)
    with pytest.raises(OSError), open(lease.path, "r+b", buffering=0) as file:
        file.truncate(0)
    assert call_in_another_process().returncode == 75


def test_a_call_costs_microseconds(lease: fencing.LeaseFile) -> None:
    lease.publish(time.monotonic() + SURE_S, time.monotonic())
    fastest = min(timeit.repeat(fencing.check_lease, number=1000, repeat=20)) / 1000
    assert fastest < 20e-6


# What an agent publishes --------------------------------------------------------------------------


def test_a_rank_ends_itself_after_its_guard_would_and_when_its_place_may_be_given_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = Settings(min=1, max=1, lease_s=2.0)
    member = MemberState(MemberId("m"), RunId("r"), settings, 0.0)
    beats: list[tuple[float, Beat]] = []

    def note(orders: list[Order], now: float) -> None:
        beats.extend((now, order) for order in orders if isinstance(order, Beat))

    member.hello(0.0)
    note(member.heard(WelcomeFrame(settings=settings), 0.1), 0.1)
    monkeypatch.setattr(HeldRound, "runs", property(lambda self: True))
    for tick in range(1, 40):
        now = tick / 10
        note(member.tick(now), now)
        if tick % 5 == 0:
            note(member.heard(RenewedFrame(), now), now)
    finite = [(now, beat) for now, beat in beats if beat.until < math.inf]
    assert len(finite) > 10
    for now, beat in finite:
        guard = GuardState(settings.lease_s, now)
        guard.beat(beat.until, beat.lease_s, 0, now)
        assert guard.due_at < beat.fence
        # The coordinator counts from the arrival of the renewal, which is never earlier than its sending.
        assert beat.fence == pytest.approx(beat.until + settings.kill_margin_s)

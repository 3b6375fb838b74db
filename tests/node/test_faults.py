"""Partitions, deaths at awkward moments, and processes killed from under the agent."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.fleet import Fleet, eventually, family, gone, kill_all
from tests.proxy import Proxy


def children_of(pid: int) -> list[int]:
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True, check=False)
    return [int(word) for word in listed.stdout.split()]


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except OSError:
        return ""


def below(pid: int, what: str) -> int:
    """The descendant whose command line has `what` in it."""

    def look() -> int | None:
        todo = children_of(pid)
        while todo:
            one = todo.pop()
            if what in command_of(one):
                return one
            todo += children_of(one)
        return None

    return eventually(look, f"{what} below {pid}")


def test_a_member_killed_before_the_round_forms_is_not_waited_for(fleet: Fleet) -> None:
    fleet.coordinator()
    options = ("--nnodes", "2:3", "--last-call-s", "1")
    first = fleet.node("a", *options)
    fleet.until("a is here", lambda v: len(v["members"]) == 1)
    first.kill()
    fleet.node("b", *options)
    fleet.node("c", *options)
    fleet.training(0, 2)
    assert [note["MUSTER_WORKER"] for note in fleet.started(0, 2)] == ["b", "c"]


def test_the_coordinator_may_die_while_the_world_forms(fleet: Fleet) -> None:
    coordinator = fleet.coordinator()
    nodes = [fleet.node(f"w{i}", "--nnodes", "3") for i in range(2)]
    fleet.until("two of three", lambda v: len(v["members"]) == 2)
    coordinator.kill()
    coordinator.wait()
    nodes.append(fleet.node("w2", "--nnodes", "3"))
    fleet.coordinator()
    fleet.started(0, 3)
    fleet.go()
    assert [node.wait() for node in nodes] == [0, 0, 0]


def test_the_coordinator_may_die_after_some_have_the_outcome(fleet: Fleet) -> None:
    """One of two has it, and cannot lead: it brings the outcome to a coordinator without a record."""
    coordinator = fleet.coordinator()
    proxy = Proxy((fleet.host, fleet.port))
    options = ("--nnodes", "1", "--spares", "1", "--farewell-s", "20", "--lease-s", "30", "--launch-id", "monday")
    near = fleet.node("a", *options)
    fleet.until("a member", lambda v: len(v["members"]) == 1)
    far = fleet.node("c", *options, "--coordinator", f"127.0.0.1:{proxy.port}", "--run-id", fleet.run_id, join=False)
    fleet.training(0, 1)
    fleet.until("two members", lambda v: len(v["members"]) == 2)
    fleet.started(0, 1)
    proxy.cut()
    fleet.go()
    fleet.until("it has ended", lambda v: v["outcome"] is not None)
    coordinator.kill()
    coordinator.wait()
    (fleet.folder / "home" / "coordinators" / f"127.0.0.1-{fleet.port}.json").unlink()
    fleet.coordinator()
    assert near.wait() == 0, "it holds the outcome and brings it back"
    proxy.close()
    far.kill(signal.SIGTERM)
    late = fleet.node("d", *options)
    assert late.wait() == 0, "the adopted outcome is told to late joiners"


def test_a_killed_guard_or_warm_parent_costs_a_restart_and_no_more(fleet: Fleet) -> None:
    fleet.coordinator()
    node = fleet.node("a", program=fleet.probe("fork", "wait"))
    first = fleet.started(0, 1)[0]
    os.kill(below(node.pid, "muster.node.bootstrap"), signal.SIGKILL)
    second = fleet.started(1, 1)[0]
    assert gone(first["pid"]) and gone(first["child"]), "what the dead guard left is ended by the agent"
    os.kill(below(node.pid, "muster.node.warm"), signal.SIGKILL)
    fleet.started(2, 1)
    assert gone(second["pid"]) and gone(second["child"])
    fleet.go()
    assert node.wait() == 0
    fleet.assert_nothing_left_but(1)


def test_the_agent_that_started_the_coordinator_starts_it_again(fleet: Fleet) -> None:
    node = fleet.node("a", "--standalone", "--run-id", "run", join=False)
    rank = fleet.started(0, 1)[0]
    os.kill(below(node.pid, "muster.coordinator"), signal.SIGKILL)
    node.expect("starting it again")
    fleet.go()
    assert node.wait() == 0
    assert len(fleet.told("start")) == 1 and rank["MUSTER_ROUND"] == "0"
    fleet.assert_nothing_left()


def test_a_coordinator_that_stands_still_breaks_the_round_but_loses_nobody(fleet: Fleet) -> None:
    coordinator = fleet.coordinator()
    options = ("--nnodes", "2", "--spares", "1", "--max-restarts", "0", "--lease-s", "4")  # for all to come back in
    nodes = [fleet.node(f"w{i}", *options) for i in range(3)]
    fleet.training(0, 2)
    fleet.until("the spare is here", lambda v: len(v["members"]) == 3)
    fleet.started(0, 2)
    coordinator.kill(signal.SIGSTOP)
    for node in nodes[:2]:
        node.expect("silent: ending ranks")
    coordinator.kill(signal.SIGCONT)
    after = fleet.started(1, 2)
    assert [note["MUSTER_WORKER"] for note in after] == ["w0", "w1"], "a spare that is back first displaces nobody"
    fleet.go()
    assert [node.wait() for node in nodes] == [0, 0, 0]


def test_a_standalone_job_outlives_the_agent_that_started_its_coordinator(fleet: Fleet) -> None:
    from tests.fleet import free_port

    fleet.port = free_port()
    options = ("--nnodes", "2", "--spares", "1", "--max-restarts", "0")
    starter = fleet.node(
        *("a", "--standalone", "--listen", fleet.address, "--run-id", "run", *options), join=False, MUSTER_IDLE_S="1"
    )
    starter.expect("joined run")
    others = [fleet.node(name, *options) for name in ("b", "c")]
    fleet.started(0, 2)
    starter.kill()
    after = fleet.started(1, 2)
    assert [note["MUSTER_WORKER"] for note in after] == ["c", "b"]
    fleet.go()
    assert [node.wait() for node in others] == [0, 0]
    fleet.assert_nothing_left()


def test_a_lost_coordinator_ends_the_agent_with_75_after_orphan_s(fleet: Fleet) -> None:
    coordinator = fleet.coordinator()
    node = fleet.node("a", "--orphan-s", "1")
    rank = fleet.started(0, 1)[0]
    coordinator.kill()
    begun = time.monotonic()
    assert node.wait() == 75
    assert time.monotonic() - begun >= 1.0
    assert gone(rank["pid"])
    fleet.assert_nothing_left()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["dead", "silent"])
def test_a_spare_that_is_left_alone_gives_its_machine_back(fleet: Fleet, how: int) -> None:
    """The only worker with a rank is lost, and the coordinator with it."""
    coordinator = fleet.coordinator()
    options = ("--nnodes", "1", "--spares", "1", "--lease-s", "0.6", "--spare-orphan-s", "1")
    nodes = {name: fleet.node(name, *options) for name in ("a", "b")}
    active = fleet.started(0, 1)[0]["MUSTER_WORKER"]
    fleet.until("the spare is there", lambda v: len(v["members"]) == 2)
    spare = nodes["b" if active == "a" else "a"]
    begun = time.monotonic()
    coordinator.kill(how)
    kill_all(family(nodes[active].pid))
    assert spare.wait() == 75
    assert time.monotonic() - begun >= 1.6
    assert re.search(r"the coordinator was lost \(.+\); gave up after 1\.6 s, for no rank runs here", spare.text)
    kill_all([coordinator.pid])
    coordinator.wait()
    fleet.assert_nothing_left()


def test_a_spare_follows_a_successor(fleet: Fleet) -> None:
    coordinator = fleet.coordinator()
    nodes = [fleet.node(f"w{i}", "--nnodes", "2", "--spares", "1", "--spare-orphan-s", "30") for i in range(3)]
    fleet.started(0, 2)
    fleet.settled(4)
    coordinator.kill()
    coordinator.wait()
    eventually(lambda: any("leading run" in node.text for node in nodes), "one of them leads")
    fleet.go()
    assert [node.wait() for node in nodes] == [0, 0, 0]


def test_a_stopped_warm_parent_holds_up_nobody(fleet: Fleet) -> None:
    fleet.coordinator()
    nodes = [fleet.node(f"w{i}", "--nnodes", "2", "--spares", "1") for i in range(3)]
    fleet.started(0, 2)
    os.kill(below(nodes[0].pid, "muster.node.warm"), signal.SIGSTOP)
    nodes[1].kill()
    fleet.started(1, 2)
    fleet.go()
    assert nodes[0].wait() == nodes[2].wait() == 0


@pytest.mark.scenario
def test_agent_and_guard_killed_together_leave_nothing(fleet: Fleet) -> None:
    fleet.coordinator()
    node = fleet.node("a", program=fleet.probe("fork", "sleep"))
    fleet.started(0, 1)
    for pid in (below(node.pid, "muster.node.bootstrap"), node.pid):
        os.kill(pid, signal.SIGKILL)
    fleet.assert_nothing_left_but(1)


def test_a_coordinator_that_was_told_to_stop_still_knows_how_runs_ended(fleet: Fleet) -> None:
    coordinator = fleet.coordinator()
    node = fleet.node("a", "--launch-id", "monday")
    fleet.started(0, 1)
    fleet.go()
    assert node.wait() == 0
    coordinator.kill(signal.SIGTERM)
    assert coordinator.wait() == 0
    fleet.coordinator()
    assert fleet.node("late", "--launch-id", "monday").wait() == 0
    assert len(fleet.told("start")) == 1


def test_what_can_be_read_of_a_state_file_is_used(fleet: Fleet) -> None:
    kept = fleet.folder / "state.json"
    kept.write_text('{"version": 1, "runs": {"g": {"at": 1, "record": {"round": 3}}}}')
    fleet.coordinator("--state", str(kept))
    node = fleet.node("a")
    fleet.started(0, 1)
    fleet.go()
    assert node.wait() == 0


def test_a_rank_that_is_stopped_while_it_starts_ends_by_that_signal(fleet: Fleet) -> None:
    """Before it has left its parent's signal handling behind, a SIGTERM must neither be lost nor end its siblings."""
    fleet.coordinator()
    for attempt in range(3):
        fleet.run_id = f"run-{attempt}"
        program = fleet.probe("exit=3@1.*", "sleep")
        options = ("--nnodes", "1", "--nproc", "2", "--max-restarts", "0", "--fail-grace-s", "20", "--blame-s", "0.05")
        begun = time.monotonic()
        assert fleet.node("a", *options, program=program).wait() == 1
        assert time.monotonic() - begun < 15, "the signal was lost, and the rank had to be killed"

"""The world forms, heals and ends, with real agents and ranks."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.fleet import Fleet, eventually, gone


@pytest.mark.scenario
def test_spares_leave_with_the_last_active_and_nothing_is_left(fleet: Fleet) -> None:
    coordinator = fleet.coordinator()
    options = ("--nnodes", "3", "--spares", "2", "--launch-id", "monday")
    nodes = [fleet.node(f"w{i}", *options) for i in range(5)]
    view = fleet.training(0, 3)
    assert [(m["name"], m["role"], m["rank"]) for m in view["members"]] == [
        ("w0", "active", 0),
        ("w1", "active", 1),
        ("w2", "active", 2),
        ("w3", "spare", None),
        ("w4", "spare", None),
    ]
    fleet.started(0, 3)
    fleet.go()
    assert [node.wait() for node in nodes] == [0] * 5
    late = fleet.node("late", *options)
    assert late.wait() == 0, "a spare of the same launch that comes after the end gets the outcome"
    coordinator.kill(signal.SIGTERM)
    assert coordinator.wait() == 0
    fleet.assert_nothing_left()


def test_the_starter_of_the_coordinator_may_be_a_spare(fleet: Fleet) -> None:
    fleet.port = 0
    from tests.fleet import free_port

    fleet.port = free_port()
    options = ("--nnodes", "2", "--spares", "1", "--run-id", "run")
    spare = fleet.node("z", "--standalone", "--listen", fleet.address, *options, join=False, MUSTER_IDLE_S="1")
    spare.expect("joined run")
    nodes = [fleet.node(name, "--nnodes", "2", "--spares", "1") for name in ("a", "b")]
    fleet.training(0, 2)
    fleet.started(0, 2)
    fleet.go()
    assert [node.wait() for node in (*nodes, spare)] == [0, 0, 0]
    fleet.assert_nothing_left()


@pytest.mark.scenario
def test_a_killed_agent_takes_its_ranks_along_and_a_spare_gets_its_rank(fleet: Fleet) -> None:
    fleet.coordinator()
    sleepy = fleet.probe("fork", "sleep")
    nodes = {
        name: fleet.node(name, "--nnodes", "3", "--spares", "1", "--max-restarts", "0", program=sleepy)
        for name in ("a", "b", "c", "d")
    }
    fleet.training(0, 3)
    before = fleet.started(0, 3)
    nodes["b"].kill()
    fleet.training(1, 3)
    after = fleet.started(1, 3)
    lost = before[1]
    assert gone(lost["pid"]) and gone(lost["child"])
    assert [(note["RANK"], note["MUSTER_WORKER"]) for note in after] == [("0", "a"), ("1", "d"), ("2", "c")]
    assert all(note["WORLD_SIZE"] == "3" and note["MUSTER_ROUND"] == "1" for note in after)
    assert all(gone(note["pid"]) for note in before), "no rank of the old round survives into the new one"


def test_a_rank_failure_with_the_budget_spent_ends_everyone_with_the_same_reason(fleet: Fleet) -> None:
    fleet.coordinator()
    program = fleet.probe("wait", "exit=3@1.0", "sleep")
    nodes = [
        fleet.node(f"w{i}", "--nnodes", "2", "--spares", "1", "--max-restarts", "0", program=program) for i in range(3)
    ]
    [guilty] = [note["MUSTER_WORKER"] for note in fleet.started(0, 2) if note["RANK"] == "1"]
    begun = time.monotonic()
    fleet.go()
    codes = [node.wait() for node in nodes]
    assert codes == [1, 1, 1]
    assert max(node.ended_at for node in nodes) - begun < 12.0  # not after a lease
    for node in nodes:
        assert "exited with code 3 (rank 1); last output: rank 1 gives up" in node.text
        assert f"worker {guilty}, round 0; 0 of 0 restarts used" in node.text


def test_an_early_finisher_runs_again_when_a_peer_fails(fleet: Fleet) -> None:
    fleet.coordinator()
    program = fleet.probe("exit=0@0.0", "wait", "exit=5@1.0")
    nodes = [fleet.node(f"w{i}", "--nnodes", "2", program=program) for i in range(2)]
    fleet.until("rank 0 is done", lambda v: "1 done" in v["reason"])
    fleet.go()
    assert [node.wait() for node in nodes] == [0, 0]
    assert len(fleet.told("start", 1)) == 2


@pytest.mark.scenario
def test_the_coordinator_may_die_mid_training(fleet: Fleet) -> None:
    first = fleet.coordinator()
    nodes = [fleet.node(f"w{i}", "--nnodes", "2", "--spares", "1", "--lease-s", "20") for i in range(3)]
    fleet.training(0, 2)
    ranks = fleet.started(0, 2)
    fleet.settled(4)
    first.kill()
    first.wait()
    fleet.coordinator()
    view = fleet.until("the round goes on", lambda v: v["state"] == "training" and len(v["members"]) == 3)
    assert view["round"] == 0 and view["epoch"] == 2, view["story"]
    assert not any(gone(rank["pid"]) for rank in ranks)
    fleet.go()
    assert [node.wait() for node in nodes] == [0, 0, 0]
    assert len(fleet.told("start")) == 2, "no rank was started again"


def test_exits_that_happen_while_there_is_no_coordinator_are_not_lost(fleet: Fleet) -> None:
    first = fleet.coordinator()
    nodes = [fleet.node(f"w{i}", "--nnodes", "2") for i in range(2)]
    fleet.started(0, 2)
    fleet.training(0, 2)
    first.kill()
    first.wait()
    fleet.go()
    eventually(lambda: len(fleet.told("done")) == 2, "both ranks are done")
    fleet.coordinator()
    assert [node.wait() for node in nodes] == [0, 0]
    assert len(fleet.told("start")) == 2


def test_a_member_that_is_stopped_through_a_lease_comes_back_as_a_spare(fleet: Fleet) -> None:
    fleet.coordinator()
    options = ("--nnodes", "2", "--spares", "1", "--max-restarts", "0")
    nodes = {name: fleet.node(name, *options) for name in ("a", "b", "c")}
    fleet.training(0, 2)
    before = fleet.started(0, 2)
    nodes["b"].kill(signal.SIGSTOP)
    view = fleet.training(1, 2)
    assert gone(before[1]["pid"]), "the guard ends the ranks of a stopped agent"
    assert [m["name"] for m in view["members"]] == ["a", "c"]
    fleet.started(1, 2)
    nodes["b"].kill(signal.SIGCONT)
    view = fleet.until("b is back", lambda v: len(v["members"]) == 3)
    assert (view["round"], view["members"][2]["name"], view["members"][2]["role"]) == (1, "b", "spare")
    fleet.go()
    assert [node.wait() for node in nodes.values()] == [0, 0, 0]
    assert len(fleet.told("start", 1)) == 2 and not fleet.told("start", 2)


@pytest.mark.scenario
def test_sigterm_to_an_agent_is_a_leave(fleet: Fleet) -> None:
    fleet.coordinator()
    options = ("--nnodes", "2", "--spares", "1", "--max-restarts", "0")
    nodes = {name: fleet.node(name, *options) for name in ("a", "b", "c")}
    fleet.started(0, 2)
    nodes["a"].kill(signal.SIGTERM)
    assert nodes["a"].wait() == 143
    fleet.training(1, 2)
    after = fleet.started(1, 2)
    assert [(note["RANK"], note["MUSTER_WORKER"]) for note in after] == [("0", "c"), ("1", "b")]
    fleet.go()
    assert nodes["b"].wait() == nodes["c"].wait() == 0


def test_a_script_that_ignores_sigterm_does_not_hold_up_the_next_round(fleet: Fleet) -> None:
    fleet.coordinator()
    options = ("--nnodes", "2", "--spares", "1")
    nodes = {name: fleet.node(name, *options, program=fleet.probe("stubborn", "wait")) for name in ("a", "b", "c")}
    before = fleet.started(0, 2)
    os.kill(before[0]["pid"], signal.SIGKILL)
    after = fleet.started(1, 2)
    assert [note["MUSTER_WORKER"] for note in after] == ["a", "b"], "a crashed rank comes back where it was"
    fleet.go()
    assert [node.wait() for node in nodes.values()] == [0, 0, 0]

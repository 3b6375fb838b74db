"""A worker of `muster-node` whose every process is killed costs no lease: its lifeline tells that nothing is left."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.fleet import Fleet, Process, eventually, family, gone, kill_all

# A lease so long that nothing but a proof explains the next round.
OPTIONS = ("--nnodes", "2", "--spares", "1", "--max-restarts", "0", "--lease-s", "600")


def three(fleet: Fleet, *options: str) -> Process:
    """Three workers with lifelines; returns the one that has rank 1."""
    nodes = {name: fleet.node(name, *OPTIONS, *options) for name in ("a", "b", "c")}
    worker = fleet.started(0, 2)[1]["MUSTER_WORKER"]
    tied(fleet)
    return nodes[worker]


def tied(fleet: Fleet) -> None:
    """All have lifelines, and have read the welcome: what is unread at its end makes that a reset."""
    fleet.until("all have lifelines", lambda v: [m["lifeline"] for m in v["members"]] == [True] * 3)
    eventually(lambda: not unread(fleet.port), "everything is read")


def unread(port: int) -> list[str]:
    """Sockets connected to that port with something in their queue."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return [row[1] for row in rows if row[2].endswith(f":{port:04X}") and not row[4].endswith(":00000000")]


@pytest.mark.scenario
def test_a_worker_whose_every_process_is_killed_is_replaced_at_once(fleet: Fleet) -> None:
    fleet.coordinator()
    pids = family(three(fleet).pid)
    assert len(pids) >= 4, "agent, guard, warm parent, rank"
    kill_all(pids)
    fleet.started(1, 2)
    told = [event["text"] for event in fleet.training(1, 2)["story"] if event["kind"] == "gone"]
    assert [text.partition(": ")[2] for text in told] == ["all its processes ended"]
    fleet.go()


def test_also_when_another_coordinator_has_taken_over_the_round(fleet: Fleet) -> None:
    """Its ranks are older than the lifeline to that one, and hold it all the same."""
    coordinator = fleet.coordinator()
    victim = three(fleet)
    fleet.settled(4)
    coordinator.kill()
    coordinator.wait()
    fleet.coordinator()
    fleet.until("all are back", lambda v: v["state"] == "training" and len(v["members"]) == 3)
    tied(fleet)
    kill_all(family(victim.pid))
    fleet.started(1, 2)
    fleet.go()


def test_also_when_what_runs_its_ranks_was_started_again(fleet: Fleet) -> None:
    fleet.coordinator()
    victim = three(fleet, "--max-restarts", "1")
    guard = family(victim.pid)[1]
    os.kill(guard, signal.SIGKILL)
    worker = fleet.started(1, 2)[1]["MUSTER_WORKER"]
    assert worker == fleet.started(0, 2)[1]["MUSTER_WORKER"]
    kill_all(family(victim.pid))
    fleet.started(2, 2)
    fleet.go()


def test_it_is_no_proof_while_a_rank_lives(fleet: Fleet) -> None:
    """Whatever the rank's parents hold: it holds the lifeline itself."""
    fleet.coordinator()
    agent, *rest = family(three(fleet).pid)
    rank = rest[-1]
    kill_all(rest, signal.SIGSTOP)
    kill_all([agent])
    fleet.until("its agent is lost", lambda v: len(v["members"]) == 2)
    lost = time.monotonic()
    while time.monotonic() < lost + 0.5:  # that nothing happens can only be waited for
        view = fleet.view()
        assert view is None or view["round"] == 0
    assert not gone(rank)
    kill_all(rest)
    fleet.started(1, 2)
    fleet.go()

"""Does the benchmark of losses kill what its rows name, and say what came?"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from bench import swarm, world
from tests.fleet import Fleet, eventually, family, free_port, gone


def words(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def test_a_whole_worker_is_its_agent_guard_warm_parent_ranks_and_the_coordinator_that_it_started(fleet: Fleet) -> None:
    fleet.port = free_port()
    place = ("--standalone", "--listen", fleet.address, "--run-id", fleet.run_id)
    node = fleet.node("a", *place, "--nproc", "2", program=fleet.probe("wait"), join=False)
    ranks = [int(note["pid"]) for note in fleet.started(0, 2)]
    pids = family(node.pid)
    assert pids[0] == node.pid and set(ranks) < set(pids)
    assert [pid for pid in pids if "muster.coordinator" in words(pid)], "in a session of its own"
    assert {int(line.partition(":")[0]) for line in fleet.left_over()} <= set(pids), "nothing else runs for it"
    for pid in pids:
        if not gone(pid):
            os.kill(pid, signal.SIGKILL)
    eventually(lambda: all(map(gone, pids)), "all are gone")
    fleet.assert_nothing_left()


def test_a_loss_that_was_not_survived_once_is_no_time_and_a_miss() -> None:
    ours: list[world.Sample] = [0.1, "never (waited 60 s)", 0.2]
    figure = world._beside("loss", ours, {"torchrun": [2.0, 5.0, 4.0]}, "ms", world.GOES_ON)
    assert (figure.value, figure.ok, figure.samples) == (None, False, 3)
    assert figure.note.startswith("never (waited 60 s) (1 of 3); torchrun 3 samples, worst 5000")
    assert figure.peers == {"torchrun": 4000.0}


def test_a_median_stands_beside_its_worst_sample_and_what_the_peers_did() -> None:
    peers: dict[str, list[world.Sample]] = {"torchrun": [1.0], "ft_launcher": ["the job ends", 3.0]}
    figure = world._beside("loss", [0.3, 0.1, 0.2], peers, "s", world._at_most(0.15))
    assert (figure.value, figure.worst, figure.samples, figure.ok) == (0.2, 0.3, 3, False)
    assert figure.peers == {"torchrun": 1.0, "ft_launcher": "3, or the job ends (1 of 2)"}


def test_simulated_agents_that_are_lost_say_nothing_so_that_a_lease_is_waited_for(fleet: Fleet) -> None:
    fleet.coordinator()
    seen = swarm.run(fleet.host, fleet.port, fleet.token or "", members=100, target=96, spares=4, lose=1, idle_s=0.1)
    waited = swarm.LEASE_S * 2 / 3  # the last renewal was at most a third of a lease ago
    assert seen.form_s < waited < min(seen.closed_s, seen.silent_s)

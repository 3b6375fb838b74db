"""Does the benchmark of losses kill what its rows name, and say what came?"""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from bench import launchers, losses, programs, report, swarm
from bench.report import Goal, Sample
from tests.fleet import Fleet, eventually, family, free_port, gone

STAND_IN = programs.WAIT.replace('mark("start")', 'mark("ready")')  # a rank without torch is as good to kill


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


@pytest.mark.usefixtures("processes")
def test_a_job_loses_worker_after_worker_and_each_time_the_spare_takes_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "GROUP", STAND_IN)
    monkeypatch.setattr(losses, "QUIET_S", 0.2)
    quick = replace(launchers.muster, env=lambda spot: {"MUSTER_LEASE_S": "0.5"})
    healed = losses.series(quick, losses.Case(losses.every_process), 2, watch=True)
    times = [sample for sample in healed.first_all_reduce if isinstance(sample, float)]
    assert len(times) == 2, healed
    pairs = zip(healed.released, times, strict=True)
    assert all(0 < released < ready for released, ready in pairs), "released, then ready"


def test_a_job_that_does_not_heal_is_said_to_have_ended_and_a_peer_that_is_not_here_not_to_have_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(programs, "GROUP", STAND_IN)
    alone = replace(
        launchers.muster, command=lambda spot, program: ("python3", *program), env=lambda spot: {"RANK": "0"}
    )
    dies = replace(alone, command=lambda spot, program: ("false",))
    missing = replace(alone, needs=tmp_path / "nowhere")
    case = losses.Case(losses.every_process, active=1, first=True)
    assert losses.series(missing, case, 3).first_all_reduce == [f"did not run: not in {tmp_path / 'nowhere'}"]
    assert losses.series(dies, case, 3).first_all_reduce == ["did not start: ended with exit [1]"]
    monkeypatch.setattr(losses, "LIMIT_S", 0.2)
    monkeypatch.setattr(losses, "QUIET_S", 0.01)
    (sample,) = losses.series(alone, losses.Case(losses.every_process, active=2), 3).first_all_reduce
    assert sample == "never in 0.2 s; 1 of the 1 other ranks go on"


def test_a_loss_that_was_not_survived_once_is_no_time_and_a_miss() -> None:
    ours: list[Sample] = [0.1, "never", 0.2]
    figure = report.compared("loss", ours, {"torchrun": [2.0, 5.0, 4.0]}, "ms", Goal())
    assert (figure.value, figure.ok, figure.samples) == (None, False, 3)
    assert figure.note == "150 (3, worst 200) or never (1 of 3)"
    assert str(figure.peers["torchrun"]) == "4000 (3, worst 5000)"


def test_a_median_stands_beside_its_p99_its_goal_and_what_the_peers_did() -> None:
    peers: dict[str, list[Sample]] = {"torchrun": [1.0], "ft_launcher": ["the job ends", 3.0]}
    figure = report.compared("loss", [0.3, 0.1, 0.2], peers, "s", Goal(share=0.15))
    assert (figure.value, figure.worst, figure.p99, figure.samples, figure.ok) == (0.2, 0.3, 0.3, 3, False)
    assert figure.goal == "p50 ≤ 0.15 × torchrun"
    assert str(figure.peers["ft_launcher"]) == "3 (2, worst 3) or the job ends (1 of 2)"


@pytest.mark.parametrize(
    ("goal", "peers", "met"),
    [
        (Goal(p50=200, p99=300), {}, True),
        (Goal(p50=200, p99=299), {}, False),
        (Goal(p50=199), {}, False),
        (Goal(), {}, True),
        (Goal(share=0.2), {"torchrun": [1.0]}, True),
        (Goal(share=0.2), {"torchrun": ["never"]}, True),
        (Goal(share=0.2), {}, False),  # nobody to compare with
    ],
)
def test_a_goal_is_met_or_not(goal: Goal, peers: dict[str, list[Sample]], met: bool) -> None:
    assert report.compared("loss", [0.3, 0.1, 0.2], peers, "ms", goal).ok is met


def test_simulated_agents_that_are_lost_say_nothing_so_that_a_lease_is_waited_for(fleet: Fleet) -> None:
    fleet.coordinator()
    seen = swarm.run(fleet.host, fleet.port, fleet.token or "", members=100, target=96, spares=4, lose=1, idle_s=0.1)
    waited = swarm.LEASE_S * 2 / 3  # the last renewal was at most a third of a lease ago
    assert waited < min(seen.closed_s, seen.silent_s)

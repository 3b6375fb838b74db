"""Stock torchrun with `--rdzv-backend=muster`: its agents, our rendezvous."""

from __future__ import annotations

import signal
import sys
from typing import Any

import pytest

from tests.fleet import Fleet, Process, gone

pytestmark = pytest.mark.xdist_group("torch")  # one at a time: several imports of torch starve everything else


def launcher(
    fleet: Fleet,
    name: str,
    *program: str,
    nnodes: str,
    spares: int = 0,
    restarts: int = 0,
    launch: str = "",
    **env: str,
) -> Process:
    conf = f"spares={spares},name={name}" + (f",launch_id={launch}" if launch else "")
    return fleet.start(
        *(sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=muster"),
        *(f"--rdzv-endpoint={fleet.address}", f"--rdzv-id={fleet.run_id}", f"--nnodes={nnodes}"),
        *(f"--rdzv-conf={conf}", f"--max-restarts={restarts}", "--nproc-per-node=1", *program),
        MUSTER_ROUND="0",
        MUSTER_WORKER=name,
        MUSTER_RUN_ID=fleet.run_id,
        **env,
    )


def launchers(fleet: Fleet, *program: str, active: int, spares: int) -> list[Process]:
    """Those that have a place first, for whoever imports torch fastest would get it."""
    fleet.coordinator()
    nnodes = f"{active}:{active + spares}"
    nodes = [launcher(fleet, f"w{i}", *program, nnodes=nnodes, spares=spares) for i in range(active)]
    fleet.training(0, active)
    nodes += [launcher(fleet, f"w{i}", *program, nnodes=nnodes, spares=spares) for i in range(active, active + spares)]
    waiting = [f"w{i}" for i in range(active, active + spares)]
    fleet.until("the spares wait", lambda v: sorted(m["name"] for m in v["members"] if m["role"] == "spare") == waiting)
    return nodes


@pytest.mark.torches
def test_parked_spares_disturb_nothing_and_leave_with_success(fleet: Fleet) -> None:
    nodes = launchers(fleet, *fleet.probe("wait"), active=3, spares=2)
    ranks = fleet.started(0, 3)
    assert [note["RANK"] for note in ranks] == ["0", "1", "2"]
    fleet.go()
    assert [node.wait() for node in nodes] == [0] * 5
    assert len(fleet.told("start")) == 3
    last_active = max(node.ended_at for node in nodes[:3])
    assert max(node.ended_at for node in nodes[3:]) - last_active < 10.0  # with them, not after a timeout


@pytest.mark.torches
def test_a_killed_launcher_takes_its_rank_along_and_a_spare_gets_its_place(fleet: Fleet) -> None:
    nodes = launchers(fleet, *fleet.probe("wait"), active=2, spares=1)
    before = fleet.started(0, 2)
    nodes[1].kill()
    view = fleet.training(1, 2)
    assert [(m["name"], m["rank"]) for m in view["members"]] == [("w0", 0), ("w2", 1)]
    assert gone(before[1]["pid"]), "the guard knows torchrun's ranks by their mark"
    fleet.started(0, 4)
    fleet.go()
    assert (nodes[0].wait(), nodes[2].wait()) == (0, 0), nodes[0].text + nodes[2].text


def test_a_failed_rank_with_torch_out_of_restarts_ends_everyone(fleet: Fleet) -> None:
    nodes = launchers(fleet, *fleet.probe("wait", "exit=3@1.0", "sleep"), active=2, spares=1)
    fleet.started(0, 2)
    fleet.go()
    assert [node.wait() for node in nodes] == [1, 1, 1]
    assert "rank 1: Exit 3" in nodes[0].text and "rank 1: Exit 3" in nodes[2].text


def test_a_blocked_rendezvous_yields_to_sigterm(fleet: Fleet) -> None:
    fleet.coordinator()
    node = launcher(fleet, "w0", *fleet.probe("wait"), nnodes="2")
    fleet.until("it waits", lambda v: v["members"])
    node.kill(signal.SIGTERM)
    assert node.wait(20) != 0
    fleet.until("it is gone", lambda v: not v["members"])
    fleet.assert_nothing_left_but(1)


@pytest.mark.scenario
def test_one_node_needs_no_set_up(fleet: Fleet) -> None:
    words = ("--rdzv-backend=muster", "--nproc-per-node=1", *fleet.probe())
    node = fleet.start(
        sys.executable, "-m", "torch.distributed.run", *words, MUSTER_WORKER="w", MUSTER_RUN_ID="none", MUSTER_ROUND="0"
    )
    assert node.wait() == 0, node.text
    fleet.assert_nothing_left()
    assert not list(fleet.home.rglob("*.token"))


def test_several_nodes_are_told_what_they_need(fleet: Fleet) -> None:
    words = ("--rdzv-backend=muster", "--nnodes=2", *fleet.probe())
    node = fleet.start(sys.executable, "-m", "torch.distributed.run", *words)
    assert node.wait() == 1
    assert "ValueError: several nodes need --rdzv-endpoint=HOST:PORT" in node.text.splitlines()[-1]


LATE = "the run ended before this worker joined: succeeded"


def test_a_second_launch_trains_and_a_late_node_of_a_launch_does_not(fleet: Fleet) -> None:
    fleet.coordinator()
    for count in (1, 2):
        node = launcher(fleet, "w0", *fleet.probe(), nnodes="1")
        assert node.wait() == 0 and len(fleet.told("start")) == count, "without an id each start is a launch"
    for count, restart, step in ((3, "1", "0"), (4, "2", "0"), (5, "2", "1")):
        task: dict[str, Any] = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": restart, "SLURM_STEP_ID": step}
        node = launcher(fleet, "w0", *fleet.probe(), nnodes="1", **task)
        assert node.wait() == 0 and len(fleet.told("start")) == count, "a requeued job and a step are launches"
    late = launcher(fleet, "w1", *fleet.probe(), nnodes="1", **task)
    assert late.wait() == 0 and LATE in late.text and len(fleet.told("start")) == 5
    named = launcher(fleet, "w0", *fleet.probe(), nnodes="1", launch="monday")
    assert named.wait() == 0 and len(fleet.told("start")) == 6
    late = launcher(fleet, "w1", *fleet.probe(), nnodes="1", launch="monday")
    assert late.wait() == 0 and LATE in late.text and len(fleet.told("start")) == 6


def test_a_late_node_of_a_failed_launch_fails_and_says_why(fleet: Fleet) -> None:
    fleet.coordinator()
    assert launcher(fleet, "w0", *fleet.probe("exit=3"), nnodes="1", launch="monday").wait() != 0
    late = launcher(fleet, "w1", *fleet.probe(), nnodes="1", launch="monday")
    assert late.wait() != 0
    assert "the run ended before this worker joined: failed" in late.text
    assert launcher(fleet, "w0", *fleet.probe(), nnodes="1", launch="tuesday").wait() == 0
    assert len(fleet.told("start")) == 2

"""Second launches under the run id of a finished run, with real agents, ranks and coordinators."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
from typing import Any

import pytest

from muster import listening
from tests.fleet import Fleet, Process, eventually, family, free_port, gone, kill_all

FAST = ("--preload", "none", "--lease-s", "20")
LATE = "the run ended before this worker joined"


def nodes_of(fleet: Fleet, names: str, *options: str, program: tuple[str, ...] = (), **env: Any) -> list[Process]:
    """Start the workers of a launch. Without `program` each runs a program that ends at once."""
    program = program or fleet.probe()
    return [fleet.node(name, *FAST, *options, program=program, **env) for name in names.split()]


def codes(nodes: list[Process]) -> list[int]:
    return [node.wait() for node in nodes]


def trained(fleet: Fleet) -> int:
    """Return the number of ranks that have started so far, in all launches."""
    return len(fleet.told("start"))


def slurm(restart: int, step: int = 0) -> dict[str, Any]:
    """Return the variables that `srun` sets in a task."""
    return {"SLURM_JOB_ID": "77", "SLURM_RESTART_COUNT": str(restart), "SLURM_STEP_ID": str(step)}


def test_a_second_launch_trains_and_gets_its_own_settings(fleet: Fleet) -> None:
    fleet.coordinator()
    assert codes(nodes_of(fleet, "a", "--nnodes", "1")) == [0]
    assert codes(nodes_of(fleet, "a b", "--nnodes", "2", "--max-restarts", "7")) == [0, 0]
    assert trained(fleet) == 3
    view = fleet.view()
    assert view is not None and (view["min"], view["max_restarts"], view["epoch"]) == (2, 7, 2)


def test_a_launch_after_a_failed_run_does_not_get_its_failure(fleet: Fleet) -> None:
    fleet.coordinator()
    assert codes(nodes_of(fleet, "a", "--max-restarts", "0", program=fleet.probe("exit=3"))) == [1]
    assert codes(nodes_of(fleet, "a")) == [0]
    assert trained(fleet) == 2


def test_a_launch_after_a_cancelled_run_trains(fleet: Fleet) -> None:
    fleet.coordinator()
    [node] = nodes_of(fleet, "a", program=fleet.probe("sleep"))
    fleet.started(0, 1)
    fleet.order("cancel", why="enough")
    assert node.wait() == 1
    assert codes(nodes_of(fleet, "a")) == [0]
    assert trained(fleet) == 2


@pytest.mark.parametrize("outcome", ["succeeded", "failed"])
def test_a_late_worker_of_the_same_launch_gets_the_outcome_and_is_told_why(fleet: Fleet, outcome: str) -> None:
    fleet.coordinator()
    words, code = (("exit=3",), 1) if outcome == "failed" else ((), 0)
    options = ("--launch-id", "monday", "--max-restarts", "0")
    assert codes(nodes_of(fleet, "a", *options, program=fleet.probe(*words))) == [code]
    [late] = nodes_of(fleet, "late", *options)
    assert late.wait() == code
    assert LATE in late.text and outcome in late.text and "--launch-id" in late.text
    assert trained(fleet) == 1
    assert codes(nodes_of(fleet, "a", "--launch-id", "tuesday")) == [0]
    assert trained(fleet) == 2, "another launch is a new run"


def test_a_requeued_slurm_job_trains_and_its_late_task_does_not(fleet: Fleet) -> None:
    fleet.coordinator()
    for restart in (0, 1, 2):
        assert codes(nodes_of(fleet, "n1 n2", "--nnodes", "2", **slurm(restart))) == [0, 0]
        assert trained(fleet) == 2 * (restart + 1)
    [late] = nodes_of(fleet, "n3", "--nnodes", "2", **slurm(2))
    assert late.wait() == 0 and LATE in late.text
    assert trained(fleet) == 6


def test_each_srun_of_a_job_is_a_launch_and_its_late_task_does_not_train(fleet: Fleet) -> None:
    fleet.coordinator()
    assert codes(nodes_of(fleet, "n1", "--max-restarts", "0", program=fleet.probe("exit=3"), **slurm(0, 0))) == [1]
    for step in (1, 2):
        assert codes(nodes_of(fleet, "n1", **slurm(0, step))) == [0]
        assert trained(fleet) == step + 1, "neither the failure nor the success of an earlier step is this step's"
    [late] = nodes_of(fleet, "n2", **slurm(0, 2))
    assert late.wait() == 0 and LATE in late.text and trained(fleet) == 3


def test_each_start_in_the_shell_of_an_allocation_trains(fleet: Fleet) -> None:
    """Expect no launch without a step: the shell of salloc and a batch script have only the job's id."""
    fleet.port = free_port()
    for count in (1, 2):
        node = standalone(fleet, "n1", fleet.run_id, "--nnodes", "1", SLURM_JOB_ID="80")
        assert node.wait() == 0 and LATE not in node.text
        assert trained(fleet) == count


def test_a_variable_names_the_launch_and_outranks_slurm(fleet: Fleet) -> None:
    fleet.coordinator()
    assert codes(nodes_of(fleet, "a", MUSTER_LAUNCH_ID="mine", **slurm(0))) == [0]
    [late] = nodes_of(fleet, "b", MUSTER_LAUNCH_ID="mine", **slurm(1))
    assert late.wait() == 0 and LATE in late.text and trained(fleet) == 1


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_coordinator_that_was_started_again_from_its_state_file_tells_launches_apart(
    fleet: Fleet, how: signal.Signals
) -> None:
    first = fleet.coordinator()
    assert codes(nodes_of(fleet, "a b", "--nnodes", "2", **slurm(0))) == [0, 0]
    first.kill(how)
    first.wait()
    fleet.coordinator()
    [late] = nodes_of(fleet, "late", "--nnodes", "2", **slurm(0))
    assert late.wait() == 0 and LATE in late.text and trained(fleet) == 2
    assert codes(nodes_of(fleet, "a b", "--nnodes", "2", **slurm(1))) == [0, 0]
    assert trained(fleet) == 4


def test_a_coordinator_whose_electors_are_all_gone_starts_the_next_launch(fleet: Fleet) -> None:
    """Electors leave with the run, so a restarted coordinator must not wait for their votes."""
    first = fleet.coordinator()
    options = ("--nnodes", "2", "--lease-s", "2")
    nodes = nodes_of(fleet, "a b", *options, program=fleet.probe("wait"), **slurm(0))
    fleet.training(0, 2)
    fleet.settled(3)
    fleet.go()
    assert codes(nodes) == [0, 0]
    first.kill()
    first.wait()
    fleet.coordinator()
    [late] = nodes_of(fleet, "late", *options, **slurm(0))
    assert late.wait() == 0 and LATE in late.text and trained(fleet) == 2
    assert codes(nodes_of(fleet, "a b", *options, **slurm(1))) == [0, 0]
    assert trained(fleet) == 4


def test_a_launch_begins_after_a_successor_led_the_last_one_to_its_end(fleet: Fleet) -> None:
    """The restarted coordinator never led the run again, and the run's leader left with it."""
    first = fleet.coordinator()
    options = ("--nnodes", "2", "--lease-s", "2")
    nodes = nodes_of(fleet, "a b", *options, program=fleet.probe("wait"), **slurm(0))
    fleet.training(0, 2)
    fleet.settled(3)
    first.kill()
    first.wait()
    eventually(lambda: any("leading run" in node.text for node in nodes), "one of the workers leads")
    fleet.coordinator()
    fleet.go()
    assert codes(nodes) == [0, 0]
    before = trained(fleet)
    [late] = nodes_of(fleet, "late", *options, **slurm(0))
    assert late.wait() == 0 and LATE in late.text and trained(fleet) == before
    assert codes(nodes_of(fleet, "a b", *options, **slurm(1))) == [0, 0]
    assert trained(fleet) == before + 2


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_a_job_that_is_requeued_in_the_middle_of_its_run_goes_on(fleet: Fleet, how: signal.Signals) -> None:
    """The run has not ended, so the new processes take the places of the old ones."""
    fleet.coordinator()
    options = ("--nnodes", "2", "--lease-s", "2")
    old = nodes_of(fleet, "n1 n2", *options, program=fleet.probe("sleep"), **slurm(0))
    fleet.started(0, 2)
    fleet.settled(3)
    for node in old:
        kill_all(family(node.pid) if how is signal.SIGKILL else [node.pid], how)
    codes(old)
    assert codes(nodes_of(fleet, "n1 n2", *options, **slurm(1))) == [0, 0]
    assert len(fleet.told("done")) == 2


def test_a_launch_that_comes_while_the_last_one_ends_waits_and_trains(fleet: Fleet) -> None:
    """A rank of the old launch ends slowly. The new launch starts no rank before that rank is gone."""
    fleet.coordinator()
    old = nodes_of(fleet, "a b", "--nnodes", "2", "--stop-grace-s", "4", program=fleet.probe("stubborn", "sleep"))
    before = fleet.started(0, 2)
    fleet.order("cancel", why="enough")
    new = nodes_of(fleet, "a b", "--nnodes", "2")
    new[0].expect("waiting: .*the last run.*")
    assert not any(gone(note["pid"]) for note in before), "the old ranks still run"
    assert codes(old) == [1, 1] and codes(new) == [0, 0]
    assert trained(fleet) == 4


def test_two_workers_of_a_launch_without_an_id_meet_in_one_run(fleet: Fleet) -> None:
    fleet.coordinator()
    assert codes(nodes_of(fleet, "a b", "--nnodes", "2")) == [0, 0]
    [first] = nodes_of(fleet, "a", "--nnodes", "2")
    first.expect("waiting: ")
    [second] = nodes_of(fleet, "b", "--nnodes", "2")
    assert codes([first, second]) == [0, 0]
    assert trained(fleet) == 4


# A coordinator that lingers on the address of a new --standalone


def standalone(fleet: Fleet, name: str, run_id: str, *options: str, **env: Any) -> Process:
    where = ("--standalone", "--listen", fleet.address, "--run-id", run_id)
    return fleet.node(name, *FAST, *where, *options, program=fleet.probe(), join=False, **env)


@pytest.mark.parametrize("both", [False, True], ids=["one brings it", "both bring it"])
@pytest.mark.parametrize("ids", [("job", "job", "job"), ("job", "next", "last")], ids=["same id", "new id"])
def test_launches_follow_each_other_on_one_address(fleet: Fleet, ids: tuple[str, ...], both: bool) -> None:
    fleet.port = free_port()
    for index, run_id in enumerate(ids):
        fleet.run_id = run_id
        a = standalone(fleet, "a", run_id, "--nnodes", "2")
        if both:
            b = standalone(fleet, "b", run_id, "--nnodes", "2")
        else:
            [b] = nodes_of(fleet, "b", "--nnodes", "2")
        assert codes([a, b]) == [0, 0]
        assert "cannot listen" not in a.text + b.text
        assert trained(fleet) == 2 * (index + 1)


def test_a_coordinator_that_stays_keeps_nobody_waiting_who_reads_the_output(fleet: Fleet) -> None:
    fleet.port = free_port()
    first = standalone(fleet, "a", "job", "--nnodes", "1", MUSTER_IDLE_S="60")
    assert first.wait() == 0
    eventually(lambda: first.ended_at, "the end of the output", 15)
    second = standalone(fleet, "a", "job", "--nnodes", "1")
    assert second.wait() == 0 and "which was running already" in second.text, "the coordinator is still there"


def test_a_launch_on_every_address_waits_for_a_coordinator_on_the_loopback_address(fleet: Fleet) -> None:
    fleet.port = free_port()
    first = standalone(fleet, "a", "job", "--nnodes", "1", MUSTER_IDLE_S="4")
    assert first.wait() == 0
    everywhere = ("--standalone", "--listen", f"0.0.0.0:{fleet.port}", "--run-id", "job", "--nnodes", "1")
    second = fleet.node("a", *FAST, *everywhere, program=fleet.probe(), join=False)
    assert second.wait() == 0 and "cannot listen" not in second.text
    assert trained(fleet) == 2


@pytest.mark.parametrize("program", ["a program", "a coordinator"])
def test_a_launch_on_every_address_names_the_process_on_the_loopback_address(fleet: Fleet, program: str) -> None:
    if listening.reachable("0.0.0.0") == "127.0.0.1":
        pytest.skip("this machine has the loopback address only")
    with contextlib.ExitStack() as stack:
        if program == "a program":
            listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
            fleet.port = listener.getsockname()[1]
        else:
            fleet.coordinator()
        everywhere = ("--standalone", "--listen", f"0.0.0.0:{fleet.port}", "--run-id", "job", "--nnodes", "1")
        other_token = {} if program == "a program" else {"MUSTER_RUN_TOKEN": "ours"}
        node = fleet.node("a", *FAST, *everywhere, program=fleet.probe(), join=False, **other_token)
        assert node.wait() == 1
    assert f"cannot listen on 0.0.0.0:{fleet.port}: 127.0.0.1:{fleet.port} is in use: " in node.text
    assert "no coordinator" in node.text if program == "a program" else "run token" in node.text


def test_requeued_jobs_follow_each_other_on_one_address(fleet: Fleet) -> None:
    fleet.port = free_port()
    for restart in (0, 1, 2):
        a = standalone(fleet, "a", fleet.run_id, "--nnodes", "2", **slurm(restart))
        [b] = nodes_of(fleet, "b", "--nnodes", "2", **slurm(restart))
        assert codes([a, b]) == [0, 0]
        assert trained(fleet) == 2 * (restart + 1)


def test_a_coordinator_with_another_token_is_refused_by_name(fleet: Fleet) -> None:
    fleet.port = free_port()
    shown = fleet.address
    command = (sys.executable, "-m", "muster.coordinator", "--listen", shown)
    theirs = fleet.start(*command, MUSTER_RUN_TOKEN="theirs")
    theirs.expect("listens on")
    ours = standalone(fleet, "a", "run", MUSTER_RUN_TOKEN="ours")
    assert ours.wait() == 1
    assert shown in ours.text and "run token" in ours.text
    assert trained(fleet) == 0


def test_the_run_goes_on_if_the_coordinator_that_it_uses_dies(fleet: Fleet) -> None:
    fleet.port = free_port()
    other = fleet.coordinator()
    node = fleet.node(
        *("a", *FAST, "--standalone", "--listen", fleet.address, "--run-id", "run"),
        program=fleet.probe("wait"),
        join=False,
    )
    fleet.started(0, 1)
    other.kill()
    other.wait()
    node.expect("starting another")
    fleet.until("the run goes on", lambda v: v["state"] == "training")
    fleet.go()
    assert node.wait() == 0 and trained(fleet) == 1

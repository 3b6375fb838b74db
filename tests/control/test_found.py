"""What a hostile and a clumsy user found: each of these once broke a promise."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import resource
import signal
import sqlite3
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import muster
from muster import TrainingCancelled, TrainingFailed
from muster.control.loop import ALIVE_KIND
from tests.fleet import PROGRAMS, eventually
from tests.plane import Plane, fresh, reasons


def exited(training: muster.DistributedTraining) -> list[str]:
    return [str(event.data["worker"]) for event in training.events() if event.reason == "WorkerExited"]


@contextmanager
def limited(plane: Plane, kind: int, value: int) -> Iterator[None]:
    """Make something scarce for the control plane, for a while."""
    assert plane.daemon is not None
    before = resource.prlimit(plane.daemon.pid, kind)
    resource.prlimit(plane.daemon.pid, kind, (value, before[1]))
    try:
        yield
    finally:
        resource.prlimit(plane.daemon.pid, kind, before)


def high_water_kib(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))


# The control plane comes back or stalls -----------------------------------------------------------


def test_workers_of_a_training_that_had_ended_leave_at_once_when_the_control_plane_comes_back(plane: Plane) -> None:
    """They join only after the restart, and whoever lets them go must notice that."""
    training = plane.train(world=(1, 2, 2), spares=1)
    training.cancel()
    with pytest.raises(TrainingCancelled):
        training.wait(timeout=30)
    assert plane.worker_pids(), "it ended before its workers had come up"
    plane.crash()
    plane.serve()
    eventually(lambda: not plane.worker_pids(), "its workers have left", 20)
    eventually(lambda: len(exited(training)) == 3, "each end is told", 10)
    assert not [event for event in training.events() if "did not leave by itself" in event.message]


def test_a_training_that_ended_before_a_restart_is_removed_without_waiting(plane: Plane) -> None:
    training = plane.train(world=(1, 2, 2))
    training.cancel()
    with pytest.raises(TrainingCancelled):
        training.wait(timeout=30)
    plane.crash()
    plane.serve()
    began = time.monotonic()
    training.delete()
    assert time.monotonic() - began < 6


def steps(training: muster.DistributedTraining) -> list[int]:
    """How far each rank is, as the control plane knows it."""
    return [rank.step for rank in fresh(training).training.status.ranks if rank.step is not None]


def test_a_control_plane_that_stalls_does_not_restart_ranks_that_train_on(plane: Plane) -> None:
    """A suspended process, a swapping machine or a slow disk: nothing has happened to the workers meanwhile."""
    training = plane.train(world=(2, 2, 2), script=str(PROGRAMS / "stepper.py"), args=["0.05"], lease_seconds=4)
    eventually(lambda: len(steps(training)) == 2, "both ranks make steps")
    pids = plane.worker_pids()
    assert plane.daemon is not None
    plane.daemon.kill(signal.SIGSTOP)
    time.sleep(2.4)  # the stall itself is what is tested: most of a lease
    plane.daemon.kill(signal.SIGCONT)
    before = steps(training)
    eventually(lambda: min(steps(training)) > max(before) + 20, "both have told of steps that they made since")
    assert plane.worker_pids() == pids
    assert training.training.status.round == 0 and "RoundRecalled" not in reasons(training)


def test_adopted_workers_that_leave_on_request_do_not_count_as_crashes(plane: Plane) -> None:
    """Nobody knows their exit code, so it must not be taken for a failure that slows later starts."""
    training = plane.train(world=(1, 8, 8))
    training.wait_until_target_world(timeout=60)
    plane.crash()
    plane.serve()
    training.scale(target=1)
    training.wait_until_target_world(timeout=30)
    eventually(lambda: len(plane.worker_pids()) == 1, "seven have left")
    began = time.monotonic()
    training.scale(target=8)
    eventually(lambda: len(plane.worker_pids()) == 8, "seven others are started")
    assert time.monotonic() - began < 5, "at once, not after a back-off (8 s)"


# A worker that cannot be started ------------------------------------------------------------------


def test_a_passing_shortage_on_this_machine_does_not_end_a_training(plane: Plane) -> None:
    training = plane.train(world=(1, 2, 2))
    training.wait_until_target_world(timeout=30)
    assert plane.daemon is not None
    open_files = len(os.listdir(f"/proc/{plane.daemon.pid}/fd"))
    with limited(plane, resource.RLIMIT_NOFILE, open_files - 3):
        plane.kill_worker("demo-0")
        refused = itertools.count(1)
        eventually(lambda: _tried_again(training, refused), "it was tried", 20)
    assert training.wait_until_target_world(timeout=40).ready == 2
    plane.go()
    training.result(timeout=30)


def _tried_again(training: muster.DistributedTraining, refused: Iterator[int]) -> bool:
    try:
        seen = reasons(training)
    except muster.Unavailable:
        return next(refused) > 20  # what is scarce for it is scarce for answers too: for as long as this takes
    return seen.count("WorkerStarted") > 2 or "ReconcileFailed" in seen


@pytest.mark.shared
def test_a_worker_too_many_that_cannot_start_does_not_end_a_world_that_trains(plane: Plane) -> None:
    folder = plane.folder / "work"
    folder.mkdir()
    training = plane.train(world=(2, 2, 3), working_dir=str(folder))
    training.wait_until_target_world(timeout=30)
    plane.started(0, 2)
    folder.rmdir()
    training.scale(target=3)
    eventually(lambda: reasons(training).count("WorkerExited") >= 3, "the third could not be started, time and again")
    assert fresh(training).phase == "ready", fresh(training).outcome
    assert training.training.status.round == 0
    training.scale(target=2)
    plane.go()
    training.result(timeout=30)


@pytest.mark.shared
def test_an_error_names_the_reason_of_the_outcome_also_when_ranks_failed(plane: Plane) -> None:
    """A rank that was lost is not why it failed when the outcome says something else."""
    folder = plane.folder / "work"
    folder.mkdir()
    training = plane.train("demo", "sleep", world=(2, 2, 2), working_dir=str(folder), stop_grace_seconds=1)
    training.wait_until_target_world(timeout=30)
    folder.rmdir()
    plane.kill_worker("demo-0")
    with pytest.raises(TrainingFailed) as failed:
        training.result(timeout=60)
    assert "working directory" in str(failed.value)


# The disk is full ---------------------------------------------------------------------------------


def test_the_end_of_a_worker_is_told_later_when_the_store_could_not_be_written(plane: Plane) -> None:
    training = plane.train(world=(1, 2, 2))
    training.wait_until_target_world(timeout=30)
    with limited(plane, resource.RLIMIT_FSIZE, 0):
        plane.kill_worker("demo-0")
        assert plane.daemon is not None
        eventually(lambda: "demo-0" not in plane.worker_pids(), "it is gone")
        plane.daemon.expect("to be written down: trying again: .* cannot be written")
        plane.daemon.expect(r"default/demo: .* cannot be written")  # for its end has woken the loop
        assert "demo-0" not in exited(training)
    training.wait_until_target_world(timeout=40)
    eventually(lambda: "demo-0" in exited(training), f"its end is in the journal, which has only {exited(training)}", 5)


def last_alive(plane: Plane) -> str:
    """When the control plane last left word that it lives; "" before it ever could."""
    with contextlib.closing(sqlite3.connect(f"file:{plane.home / 'muster.db'}?mode=ro", uri=True)) as database:
        found = database.execute("SELECT value FROM records WHERE kind = ?", (ALIVE_KIND,)).fetchall()
    return str(json.loads(found[0][0])["at"]) if found else ""


@pytest.mark.times(ALIVE_S="0.1")
def test_the_control_plane_goes_on_telling_that_it_lives_after_the_store_could_not_be_written(plane: Plane) -> None:
    """Usage of workers that die while it is away is closed at that time."""
    with limited(plane, resource.RLIMIT_FSIZE, 0):
        assert plane.daemon is not None
        plane.daemon.expect("cannot tell that it lives", 15)
    before = last_alive(plane)
    eventually(lambda: last_alive(plane) > before, "it tells again", 15)


# Reading ------------------------------------------------------------------------------------------


def test_the_tail_of_a_long_log_does_not_cost_its_length_in_memory(plane: Plane) -> None:
    line = "x" * 99
    script = f"import sys; [sys.stdout.write({line!r} + chr(10)) for _ in range(1_500_000)]"
    training = plane.train(world=(1, 1, 1), command=[sys.executable, "-c", script])
    training.result(timeout=60)
    assert plane.daemon is not None
    before = high_water_kib(plane.daemon.pid)
    assert list(training.logs(tail=2)) == [f"[0] {line}"] * 2
    assert high_water_kib(plane.daemon.pid) - before < 64 * 1024


@pytest.mark.shared
def test_a_command_with_its_output_closed_ends_without_a_traceback(plane: Plane) -> None:
    program = Path(sys.executable).parent / "muster"
    process = plane.start("/bin/sh", "-c", f"exec {program} ps -o json >&-")
    assert (process.wait(), process.text) == (0, "")


# Another training has the name now ----------------------------------------------------------------


@pytest.fixture
def heirs(plane: Plane) -> tuple[muster.DistributedTraining, muster.DistributedTraining]:
    """A handle on a training that was deleted, and one on another that was given its name."""
    old = plane.train(world=(1, 1, 2))
    plane.client.get("demo").delete()
    new = plane.train(world=(1, 1, 2))
    return old, new


@pytest.mark.shared
def test_cancelling_a_training_that_is_gone_leaves_the_one_alone_that_has_its_name_now(
    heirs: tuple[muster.DistributedTraining, muster.DistributedTraining],
) -> None:
    old, new = heirs
    with pytest.raises(muster.NotFound):
        old.cancel()
    assert fresh(new).training.spec.cancel is None


@pytest.mark.shared
def test_deleting_a_training_that_is_gone_leaves_the_one_alone_that_has_its_name_now(
    heirs: tuple[muster.DistributedTraining, muster.DistributedTraining],
) -> None:
    old, new = heirs
    with contextlib.suppress(muster.NotFound):  # gone is gone: either answer is right
        old.delete()
    assert fresh(new).training.metadata.deletion_timestamp is None


@pytest.mark.shared
def test_reading_about_a_training_that_is_gone_does_not_answer_for_another(
    heirs: tuple[muster.DistributedTraining, muster.DistributedTraining],
) -> None:
    old, _ = heirs
    assert {event.uid for event in old.events()} <= {old.training.uid}


# Left behind --------------------------------------------------------------------------------------


@pytest.mark.skipif(not os.access("/sys/fs/cgroup", os.W_OK), reason="needs control groups")
@pytest.mark.shared
def test_a_worker_that_is_killed_leaves_no_memory_group_behind(plane: Plane) -> None:
    """Its guard is still in the group at that moment."""
    training = plane.train(world=(1, 2, 2), resources={"memory": "400Mi"})
    training.wait_until_target_world(timeout=30)

    def groups() -> list[str]:
        # Not by a glob: that fails when a group goes while it looks.
        below = (folder for folder, _, _ in os.walk("/sys/fs/cgroup") if Path(folder).parent.name == "muster")
        return [folder for folder in below if Path(folder).name.startswith(training.training.uid)]

    if not groups():
        pytest.skip("no memory limit can be set here")
    plane.kill_worker("demo-0")
    plane.started(1, 2)
    plane.go()
    training.result(timeout=30)
    plane.no_worker_left()
    try:
        eventually(lambda: not groups(), f"no group is left, but {groups()}", 5)
    finally:
        for path in groups():
            os.rmdir(path)


# Stopping the control plane -----------------------------------------------------------------------


@pytest.mark.times(DRAIN_S="20")
def test_stopping_the_control_plane_tells_of_no_lost_workers_and_takes_no_fixed_time(plane: Plane) -> None:
    """It closes the connections itself; nothing has been lost and no round is recalled."""
    training = plane.train(world=(2, 2, 2))
    training.wait_until_target_world(timeout=30)
    assert plane.daemon is not None
    began = time.monotonic()
    plane.daemon.kill(signal.SIGTERM)
    assert plane.daemon.wait() == 0
    took = time.monotonic() - began
    plane.serve()
    assert not {"WorkerLost", "RoundRecalled"} & set(reasons(training))
    assert took < 10, "no request was open, so there was nothing to wait for"

"""Many small trainings at once, beside one that ran before."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from muster import background
from muster.backends.local import processes
from muster.core.training.pacing import most_at_once
from tests.fleet import eventually, family
from tests.plane import Plane, reasons

START_TIMEOUT_S = 10  # allowed for each training of a burst; the machine may be busy


@pytest.mark.parametrize("trainings", [12, pytest.param(64, marks=pytest.mark.soak)])
def test_many_trainings_at_once_lose_no_worker_and_leave_the_others_alone(plane: Plane, trainings: int) -> None:
    before = plane.train("before", world=(2, 2, 2))
    before.wait_until_target_world(timeout=60)
    burst = [plane.train(f"t{i}", world=(2, 2, 2), command=["sleep", "1200"]) for i in range(trainings)]
    last = burst[-1]
    most = most_at_once(len(os.sched_getaffinity(0)))
    waits = f"this machine starts {most} at once"
    shown = eventually(
        lambda: waits in str(plane.client.explain(last.name)) or last.world.ready == 2, "explain says why it waits"
    )
    assert shown
    for training in burst:
        training.wait_until_target_world(timeout=START_TIMEOUT_S * trainings)
    for training in (before, *burst):
        assert not {"WorkerLost", "RoundRecalled", "FalseAlarm"} & set(reasons(training)), training.name


def nice_values(pid: int) -> list[int]:
    """Return the nice values of all threads of a process."""
    stats = [(path / "stat").read_text() for path in Path(f"/proc/{pid}/task").iterdir()]
    return [int(stat.rpartition(")")[2].split()[16]) for stat in stats]


def test_the_coordinator_goes_before_the_processes_that_it_starts(plane: Plane) -> None:
    training = plane.train("before", world=(2, 2, 2))
    training.wait_until_target_world(timeout=60)
    assert plane.daemon is not None
    ranks = [pid for agent in plane.worker_pids().values() for pid in family(agent)]
    assert len(ranks) >= 4
    assert min(nice_values(plane.daemon.pid)) < min(min(nice_values(pid)) for pid in ranks)


@pytest.mark.parametrize(("allowed", "expected"), [(True, 0), (False, processes.WORKER_NICE)])
def test_workers_are_put_behind_a_coordinator_whose_priority_cannot_be_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: bool, expected: int
) -> None:
    monkeypatch.setattr(background, "may_prefer_threads", lambda: allowed)
    own = os.getpriority(os.PRIO_PROCESS, 0)
    child = processes.spawn(("sleep", "600"), os.environ, str(tmp_path), tmp_path / "log")
    try:
        assert os.getpriority(os.PRIO_PROCESS, child.pid) == max(own, expected)
    finally:
        child.kill()
        child.wait()

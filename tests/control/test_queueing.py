"""GPUs are given in order of priority and age, and whoever waits is told what for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from muster import DistributedTraining, InvalidRequest
from tests.fleet import eventually
from tests.plane import Plane, fresh


@pytest.fixture
def two_gpus(tmp_path: Path) -> Iterator[Plane]:
    made = Plane(tmp_path)
    made.serve(MUSTER_GPUS="2")
    yield made
    made.close()


def admitted(training: DistributedTraining) -> str:
    condition = eventually(lambda: fresh(training).training.status.condition("Admitted"), "it was looked at")
    return condition.status


def visible(plane: Plane, name: str) -> list[str]:
    """CUDA_VISIBLE_DEVICES of the agents of a training."""
    found = []
    for worker, pid in plane.worker_pids().items():
        if worker.startswith(f"{name}-"):
            env = dict(part.partition(b"=")[::2] for part in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))
            found.append(env[b"CUDA_VISIBLE_DEVICES"].decode())
    return sorted(found)


@pytest.mark.scenario
@pytest.mark.usefixtures("processes")
def test_who_wants_more_than_is_free_waits_is_told_why_and_starts_when_it_can(two_gpus: Plane) -> None:
    plane = two_gpus
    holder = plane.train("holder", world=(1, 1, 1), resources={"gpus": 1})
    holder.wait_until_target_world(timeout=30)
    assert visible(plane, "holder") == ["0"]
    waiter = plane.train("waiter", "exit=0", world=(2, 2, 2), resources={"gpus": 1})
    assert admitted(waiter) == "False" and waiter.phase == "pending"
    told = str(plane.client.explain("waiter"))
    assert "needs 2 GPUs" in told and "1 of 2 free" in told and "default/holder (1)" in told
    shown = plane.muster("explain", "waiter")
    assert shown.wait() == 0 and "default/holder (1)" in shown.text
    plane.go()
    holder.result(timeout=30)
    waiter.result(timeout=30)


@pytest.mark.scenario
@pytest.mark.usefixtures("processes")
def test_each_worker_sees_its_own_gpus_and_one_that_asked_for_none_sees_none(two_gpus: Plane) -> None:
    plane = two_gpus
    two = plane.train("two", world=(2, 2, 2), resources={"gpus": 1})
    none = plane.train("none", world=(1, 1, 1))
    two.wait_until_target_world(timeout=30)
    none.wait_until_target_world(timeout=30)
    assert visible(plane, "two") == ["0", "1"]
    assert visible(plane, "none") == [""]
    plane.go()


@pytest.mark.usefixtures("processes")
def test_priority_comes_before_age_and_nobody_passes_who_waits_longer(two_gpus: Plane) -> None:
    plane = two_gpus
    holder = plane.train("holder", world=(1, 1, 1), resources={"gpus": 2})
    holder.wait_until_target_world(timeout=30)
    older = plane.train("older", "sleep", world=(1, 1, 1), resources={"gpus": 2}, stop_grace_seconds=0.5)
    urgent = plane.train("urgent", "sleep", world=(1, 1, 1), resources={"gpus": 2}, priority=5, stop_grace_seconds=0.5)
    small = plane.train("small", "exit=0", world=(1, 1, 1), resources={"gpus": 1})
    for training in (older, urgent, small):
        assert admitted(training) == "False"
    assert "is before it" in str(plane.client.explain("small"))
    plane.go()
    holder.result(timeout=30)
    urgent.wait_until_target_world(timeout=30)
    assert admitted(older) == "False" and admitted(small) == "False"
    urgent.cancel()
    older.wait_until_target_world(timeout=30)
    older.cancel()
    small.result(timeout=30)


@pytest.mark.usefixtures("processes")
def test_what_can_never_start_says_so_and_holds_nobody_back(two_gpus: Plane) -> None:
    plane = two_gpus
    with pytest.raises(InvalidRequest, match=r"needs 3 GPUs \(3 workers × 1\), there are only 2 here"):
        plane.train("huge", world=(3, 3, 3), resources={"gpus": 1})
    huge = plane.train("huge", world=(3, 3, 3), resources={"gpus": 1}, force=True)
    assert admitted(huge) == "False"
    assert "there are only 2 here" in str(plane.client.explain("huge"))
    plane.train("small", "exit=0", world=(1, 1, 1), resources={"gpus": 1}).result(timeout=30)


@pytest.mark.usefixtures("processes")
def test_gpus_stay_with_their_workers_over_a_restart_of_the_control_plane(two_gpus: Plane) -> None:
    plane = two_gpus
    holder = plane.train("holder", world=(1, 1, 1), resources={"gpus": 2})
    holder.wait_until_target_world(timeout=30)
    plane.crash()
    plane.serve(MUSTER_GPUS="2")
    waiter = plane.train("waiter", "exit=0", world=(1, 1, 1), resources={"gpus": 1})
    assert admitted(waiter) == "False"
    plane.go()
    waiter.result(timeout=30)


@pytest.mark.usefixtures("processes")
def test_a_smaller_world_starts_with_what_there_is_and_grows_later(two_gpus: Plane) -> None:
    plane = two_gpus
    holder = plane.train("holder", world=(1, 1, 1), resources={"gpus": 1})
    holder.wait_until_target_world(timeout=30)
    elastic = plane.train("elastic", "sleep", world=(1, 2, 2), resources={"gpus": 1}, stop_grace_seconds=0.5)
    assert elastic.wait_until_min_world(timeout=30).ready == 1
    plane.go()
    holder.result(timeout=30)
    assert elastic.wait_until_target_world(timeout=30).ready == 2
    elastic.cancel()

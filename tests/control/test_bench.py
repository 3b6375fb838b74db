"""`bench` of a training: it is measured what is between its workers, and that never keeps them from running."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fleet import eventually
from tests.plane import Plane, fresh


@pytest.mark.shared
def test_what_is_between_workers_is_measured_once_before_the_program_begins(plane: Plane) -> None:
    training = plane.train(world=(2, 2, 2), bench=True)
    training.wait_until_target_world(timeout=60)
    plane.go()
    training.result(timeout=90)
    found = fresh(training).bench
    assert found is not None and found.error == "", found
    assert (found.round, found.workers, found.ranks, found.via) == (0, 2, 2, "gloo")
    assert [one.bytes for one in found.sizes] == [1 << 10, 1 << 20, 16 << 20]
    assert found.bytes_per_second is not None and found.bytes_per_second > 1e6
    assert found.latency_seconds is not None and 0 < found.latency_seconds < 1
    began = training.training.status.started_at
    assert found.measured_at is not None and began is not None and found.measured_at > began
    told = [event.message for event in training.events() if event.reason == "Measured"]
    assert told == [str(found)]


@pytest.mark.shared
def test_what_cannot_be_measured_is_told_and_keeps_nothing_from_running(plane: Plane, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('broken on purpose')\n")
    training = plane.train(world=(2, 2, 2), bench=True, env={"PYTHONPATH": str(tmp_path)}, preload=["none"])
    plane.go()
    training.result(timeout=90)
    found = fresh(training).bench
    assert found is not None and found.error == "ImportError: broken on purpose"
    assert found.bytes_per_second is None and training.training.status.restarts == 0


@pytest.mark.shared
def test_a_worker_that_is_lost_while_it_measures_is_replaced_and_nobody_measures_on(plane: Plane) -> None:
    training = plane.train(world=(2, 2, 2), bench=True)
    eventually(lambda: len(measuring(plane)) == 2, "both measure", 30)
    plane.kill_worker(f"{training.name}-1")
    eventually(lambda: fresh(training).training.status.round == 1, "the next round is out", 30)
    assert training.wait_until_target_world(timeout=30).ready == 2
    assert measuring(plane) == [], "only the first round does"
    plane.go()
    training.result(timeout=60)


def measuring(plane: Plane) -> list[str]:
    return [line for line in plane.left_over() if "muster.node.allreduce" in line]


@pytest.mark.shared
def test_nothing_is_measured_that_was_not_asked_for_or_has_nobody_to_speak_to(plane: Plane) -> None:
    asked = plane.train("alone", world=(1, 1, 1), bench=True)
    silent = plane.train("silent", world=(2, 2, 2))
    plane.go()
    for training in (asked, silent):
        training.result(timeout=60)
        assert fresh(training).bench is None

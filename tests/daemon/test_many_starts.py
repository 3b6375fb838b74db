"""Many small trainings at once, beside one that ran before."""

from __future__ import annotations

import os

from muster.core.training.pacing import most_at_once
from tests.fleet import eventually
from tests.plane import Plane, reasons

TRAININGS = 12


def test_many_trainings_at_once_lose_no_worker_and_leave_the_others_alone(plane: Plane) -> None:
    before = plane.train("before", world=(2, 2, 2))
    before.wait_until_target_world(timeout=60)
    burst = [plane.train(f"t{i}", world=(2, 2, 2), command=["sleep", "600"]) for i in range(TRAININGS)]
    last = burst[-1]
    most = most_at_once(len(os.sched_getaffinity(0)))
    waits = f"this machine starts {most} at once"
    shown = eventually(
        lambda: waits in str(plane.client.explain(last.name)) or last.world.ready == 2, "explain says why it waits"
    )
    assert shown
    for training in burst:
        training.wait_until_target_world(timeout=120)
    for training in (before, *burst):
        assert not {"WorkerLost", "RoundRecalled", "FalseAlarm"} & set(reasons(training)), training.name

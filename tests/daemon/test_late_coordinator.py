"""A control plane that itself stood still counts no worker as lost for its own silence."""

from __future__ import annotations

import os
import signal

import pytest

from muster.types.world import LEASE_S
from tests.fleet import eventually
from tests.plane import Plane, reasons


@pytest.mark.parametrize("leases", [pytest.param(2, marks=pytest.mark.scenario), 4])
def test_a_control_plane_that_is_stopped_for_longer_than_a_lease_loses_no_worker(plane: Plane, leases: int) -> None:
    daemon = plane.daemon
    assert daemon is not None
    training = plane.train("demo", world=(2, 2, 4), spares=1)
    training.wait_until_target_world(timeout=60)
    eventually(lambda: len(plane.told("start", 0)) == 2, "both ranks run")
    daemon.kill(signal.SIGSTOP)
    sleep = os.spawnlp(os.P_NOWAIT, "sleep", "sleep", str(leases * LEASE_S))  # how long it stands still is the subject
    os.waitpid(sleep, 0)
    daemon.kill(signal.SIGCONT)
    plane.go()
    training.result(timeout=60)
    told = reasons(training)
    assert not {"WorkerLost", "RoundRecalled", "FalseAlarm"} & set(told), told
    assert told.count("RoundReleased") == 1

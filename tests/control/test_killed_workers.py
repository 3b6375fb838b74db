"""A worker whose every process is killed costs no lease: its backend knows that nothing of it is left."""

from __future__ import annotations

import os
import signal
import time

import pytest

from muster import DistributedTraining
from tests.fleet import eventually, family, kill_all
from tests.plane import Plane

LEASE_S = 20.0
SOON_S = LEASE_S / 2  # so much less than a lease that a busy machine does not hide the difference


def two_and_a_spare(plane: Plane, lease_s: float = LEASE_S) -> DistributedTraining:
    training = plane.train(world=(2, 2, 2), spares=1, lease_seconds=lease_s)
    training.wait_until_target_world(timeout=60)
    plane.started(0, 2)
    return training


def round_of(plane: Plane, name: str) -> int:
    return plane.client.get(name).training.status.round or 0


@pytest.mark.shared
@pytest.mark.scenario
def test_a_worker_whose_every_process_is_killed_is_replaced_at_once(plane: Plane) -> None:
    training = two_and_a_spare(plane)
    pids = family(plane.worker_pids()["demo-1"])
    assert len(pids) >= 4, "agent, guard, warm parent, rank"
    began = time.monotonic()
    kill_all(pids)
    plane.started(1, 2)
    assert time.monotonic() - began < SOON_S
    plane.go()
    training.result(timeout=60)


def test_an_agent_alone_is_no_proof_while_its_ranks_may_live(plane: Plane) -> None:
    """Guard, warm parent and rank stand still: nobody can say that the rank will not write again."""
    training = two_and_a_spare(plane, 4.0)
    agent, *rest = family(plane.worker_pids()["demo-1"])
    kill_all(rest, signal.SIGSTOP)
    os.kill(agent, signal.SIGKILL)
    eventually(lambda: "WorkerExited" in {event.reason for event in training.events()}, "its end is told")
    lost = time.monotonic()
    kill_all(rest[-1:], signal.SIGCONT)  # the rank trains on
    while time.monotonic() < lost + 1.0:  # that nothing happens can only be waited for: a good part of a lease
        assert round_of(plane, "demo") == 0, "its rank was given away while it ran"
    kill_all(rest, signal.SIGCONT)
    plane.started(1, 2)
    plane.go()
    training.result(timeout=60)


def test_a_worker_that_was_killed_while_the_control_plane_was_away_is_not_waited_for(plane: Plane) -> None:
    training = two_and_a_spare(plane)
    pids = family(plane.worker_pids()["demo-1"])
    plane.crash()
    kill_all(pids)
    began = time.monotonic()
    plane.serve()
    plane.started(1, 2)
    assert time.monotonic() - began < SOON_S
    plane.go()
    training.result(timeout=60)


def test_a_worker_starts_also_where_no_pipe_can_be_made(plane: Plane) -> None:
    """A full disk, a file system without pipes: then its lease tells."""
    (plane.home / "held").touch()
    training = plane.train("bare", "exit=0", world=(1, 1, 1))
    training.result(timeout=60)
    assert plane.daemon is not None
    plane.daemon.expect("bare-0: that nothing of it is left will be known by its lease only")


def test_what_a_worker_held_is_forgotten_with_its_training(plane: Plane) -> None:
    training = plane.train("gone", "exit=0", world=(1, 1, 1))
    training.result(timeout=60)
    held = plane.home / "held" / training.training.uid
    assert [path.name for path in held.iterdir()] == ["gone-0"]
    training.delete()
    eventually(lambda: not held.exists(), "its folder is removed")

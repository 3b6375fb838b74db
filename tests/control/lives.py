"""One life of two trainings under a control plane that is killed at random moments."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any, TypeVar

import muster
from muster import DistributedTraining, TrainingFailed
from tests.fleet import eventually
from tests.kube.plane import KubePlane
from tests.plane import Plane

PATIENCE_S = 90.0
T = TypeVar("T")


def live(plane: Plane | KubePlane, rng: Random, kills: int) -> None:
    """Submit, scale, fail and finish while the control plane dies `kills` times; then check that nothing is lost."""
    failure: list[BaseException] = []

    def work() -> None:
        try:
            _work(plane)
        except (muster.MusterError, AssertionError, OSError) as error:
            failure.append(error)

    plane.serve()
    assert plane.client.list() == []
    worker = threading.Thread(target=work)
    worker.start()
    for _ in range(kills):
        time.sleep(rng.uniform(0.0, 0.7))  # the random moment is the point of the test
        plane.crash()
        plane.serve()
    worker.join(PATIENCE_S)
    assert not worker.is_alive(), "the client is stuck"
    if failure:
        raise failure[0]
    _check(plane)


def _work(plane: Plane | KubePlane) -> None:
    good = _insist(lambda: plane.train("good", world=(2, 2, 3), spares=1, idempotency_key="good"))
    dies: dict[str, Any] = {"max_restarts": 1, "stop_grace_seconds": 1, "idempotency_key": "bad"}
    bad = _insist(lambda: plane.train("bad", "exit=3@1.*", "wait", world=(2, 2, 2), **dies))
    good.wait_until_min_world(timeout=PATIENCE_S)
    assert _insist(lambda: good.scale(target=3)).target == 3
    assert good.wait_until_target_world(timeout=PATIENCE_S).ready == 3
    plane.go()
    good.result(timeout=PATIENCE_S)
    try:
        bad.result(timeout=PATIENCE_S)
        raise AssertionError("it should have failed")
    except TrainingFailed as failed:
        assert "rank 1: exit_code=3" in str(failed), str(failed)


def _insist(call: Callable[[], T]) -> T:
    """A call waits ten seconds for a control plane to come back, and on a busy machine four kills take longer."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            return call()
        except muster.Unavailable:
            if time.monotonic() > deadline:
                raise


def _check(plane: Plane | KubePlane) -> None:
    good, bad = plane.client.get("good"), plane.client.get("bad")
    assert (good.phase, bad.phase) == ("succeeded", "failed")
    assert [one.exit_code for one in good.rank_exits] == [0, 0, 0]
    assert len(bad.rank_exits) == 2 and bad.rank_exits[1].exit_code == 3
    plane.no_worker_left()
    for training in (good, bad):
        _each_worker_began_and_ended_once(training)
        events = training.events()
        assert [event.id for event in events] == sorted({event.id for event in events})
        ends = [event.reason for event in events if event.reason in ("Succeeded", "Failed", "Cancelled")]
        assert len(ends) == 1, "it ended once"
    runs = Counter((note["MUSTER_RUN_ID"], note["MUSTER_ROUND"], note["RANK"]) for note in plane.told("start"))
    assert set(runs.values()) == {1}, f"a rank ran twice in one round: {runs}"
    assert len(plane.left_over()) == 1, f"only the control plane is left, not {plane.left_over()}"


def _each_worker_began_and_ended_once(training: DistributedTraining) -> None:
    def counted(reason: str) -> Counter[str]:
        return Counter(str(event.data["worker"]) for event in training.events() if event.reason == reason)

    eventually(lambda: counted("WorkerStarted") == counted("WorkerExited"), f"{training.name}: each end is told", 10)
    assert set(counted("WorkerStarted").values()) == {1}

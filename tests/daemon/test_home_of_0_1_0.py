"""A control plane of today on the home of one of 0.1.0 that was killed: nothing is lost, and what ran goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import httpx2
import pytest

import muster
from muster import TrainingCancelled
from tests.data import old
from tests.fleet import eventually
from tests.plane import Plane, fresh, reasons

POOL = {"MUSTER_POOL_GPUS": "0,1,2,3", "MUSTER_POOL_GPUS_PER_NODE": "4"}


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Plane]:
    made = Plane(tmp_path_factory.mktemp("plane"))
    old.a_home(made.home)
    made.serve(**POOL)
    yield made
    made.close()


@pytest.mark.usefixtures("processes")
def test_trainings_that_had_ended_are_as_they_were(left: Plane) -> None:
    assert [one.name for one in left.client.list()] == ["cancelled", "failed", "finished", "running"]
    finished, failed, cancelled = (left.client.get(name) for name in ("finished", "failed", "cancelled"))
    assert (finished.phase, failed.phase, cancelled.phase) == ("succeeded", "failed", "cancelled")
    assert [end.exit_code for end in finished.rank_exits] == [0, 0]
    assert finished.training.metadata.labels == {"team": "blue"}
    assert failed.rank_exits[1].exit_code == 3 and failed.rank_exits[1].stderr_tail == ("rank 1 gives up",)
    assert failed.outcome is not None and failed.outcome.reason == "rank_failed"
    with pytest.raises(TrainingCancelled):
        cancelled.result(timeout=5)


@pytest.mark.usefixtures("processes")
def test_the_journal_tells_what_happened_under_0_1_0(left: Plane) -> None:
    told = {name: Counter(reasons(left.client.get(name))) for name in ("finished", "failed", "cancelled")}
    for ended in told.values():
        assert ended["WorkerStarted"] == ended["WorkerExited"] > 0
    assert (told["finished"]["Succeeded"], told["failed"]["Failed"], told["cancelled"]["Cancelled"]) == (1, 1, 1)
    assert told["failed"]["RoundReleased"] == 2


@pytest.mark.usefixtures("processes")
def test_usage_of_0_1_0_is_still_counted(left: Plane) -> None:
    spent = {name: left.client.get(name).usage().worker_seconds for name in ("finished", "failed", "cancelled")}
    assert spent == {"finished": 2.752, "failed": 3.284, "cancelled": 1.001}, "as 0.1.0 counted it"


@pytest.mark.usefixtures("processes")
def test_a_token_of_0_1_0_is_good_for_what_it_was(left: Plane) -> None:
    viewer = muster.Client(url=left.url, token=old.VIEWER)
    assert viewer.get("finished").phase == "succeeded"
    with pytest.raises(muster.Forbidden):
        viewer.get("running").cancel()
    viewer.close()


def _trains(training: muster.DistributedTraining, number: int) -> bool:
    status = fresh(training).training.status
    return status.round == number and status.world_size is not None and status.world_size.ready == 2


@pytest.mark.usefixtures("processes")
def test_a_training_that_ran_goes_on_with_its_world_and_its_budget(left: Plane) -> None:
    """Its workers died with the machine: they are replaced, and that is no failure of the program."""
    running = left.client.get("running")
    eventually(lambda: _trains(running, 2), "both workers of round 2 train")
    assert (running.phase, running.training.status.restarts) == ("ready", 0)
    eventually(lambda: len(left.worker_pids()) == 3, "two workers and a spare")
    assert not left.worker_pids().keys() & {f"running-{n}" for n in range(4)}, "no name is used twice"
    running.cancel()
    with pytest.raises(TrainingCancelled):
        running.result(timeout=60)


@pytest.mark.usefixtures("processes")
def test_a_pool_has_its_leases_requests_and_quarantines(left: Plane) -> None:
    asked = httpx2.get(f"{left.url}/v1/pools/default", headers={"Authorization": f"Bearer {left.api_token}"})
    pool = asked.json()
    held = {gpu: (one["pipeline"], one["cluster"]) for gpu, one in pool["leases"].items()}
    assert held == {
        "0": ("p1", "actor_train"),
        "1": ("p1", "actor_train"),
        "2": ("p1", "actor_infer"),
        "3": ("p3", "actor_infer"),
    }
    assert [(one["pipeline"], one["cluster"]) for one in pool["pending"]] == [("p2", "actor_train")]
    pipelines = {one["id"]: (one["state"], one.get("remaining")) for one in pool["pipelines"]}
    assert pipelines == {"p1": ("detached", 8), "p2": ("detached", None), "p3": ("quarantined", 8)}, "4 of 12 were done"
    assert pool["openRollouts"] == {"p1": 12, "p3": 8}
    assert pool["quarantined"] == {"p3": "expand raised SharingError: ValueError: no memory"}

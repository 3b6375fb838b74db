"""A training ends once, keeps every exit, and takes no orders afterwards."""

from __future__ import annotations

import json
import os
import sqlite3
from pathlib import Path
from typing import Any

import httpx2
import pytest

import muster
from muster import TrainingCancelled, TrainingFailed, UDTerminalState, WaitTimeout
from muster.backends.local.processes import MemoryGroup
from tests.fleet import eventually
from tests.plane import Plane, fresh, reasons


@pytest.mark.shared
@pytest.mark.scenario
def test_success_is_told_with_every_exit_and_nothing_stays(plane: Plane) -> None:
    training = plane.train(world=(2, 2, 2), spares=1)
    training.wait_until_target_world(timeout=30)
    assert training.rank_exits == [] and "rankExits" not in training.training.to_wire()["status"]
    plane.go()
    assert training.wait_until_complete(timeout=30).ready == 0
    assert [(one.rank, one.exit_code, one.termination_reason) for one in training.rank_exits] == [
        (0, 0, "Completed"),
        (1, 0, "Completed"),
    ]
    with pytest.raises(UDTerminalState):
        training.wait_until_complete(timeout=5)
    assert training.result().ready == 0
    plane.no_worker_left()


@pytest.mark.shared
@pytest.mark.scenario
def test_a_failure_names_each_failed_rank(plane: Plane) -> None:
    training = plane.train("demo", "exit=3@1.*", "sleep", world=(2, 2, 2), max_restarts=0, stop_grace_seconds=1)
    with pytest.raises(TrainingFailed) as caught:
        training.result(timeout=30)
    assert "rank 1: exit_code=3 reason=Exit 3" in str(caught.value)
    assert "rank 0" not in str(caught.value), "it was stopped, it did not fail"
    exits = {one.rank: one for one in training.rank_exits}
    assert exits[0].termination_reason == "Stopped" and exits[0].exit_code in (143, 137)
    assert exits[1].stderr_tail == ("rank 1 gives up",)
    assert training.outcome is not None and training.outcome.first_failure is not None
    assert training.outcome.first_failure.rank == 1
    plane.no_worker_left()


@pytest.mark.shared
@pytest.mark.scenario
def test_a_secret_in_the_last_line_is_in_the_log_alone(plane: Plane, tmp_path: Path) -> None:
    program = tmp_path / "blabs.py"
    program.write_text("import os\nraise RuntimeError('wrong password ' + os.environ['PASSWORD'])\n")
    secret: dict[str, Any] = {"env": {"PASSWORD": "hunter2hunter2"}, "secret_env": ["PASSWORD"]}
    training = plane.train(world=(1, 1, 1), script=str(program), max_restarts=0, **secret)
    with pytest.raises(TrainingFailed, match=r"wrong password \*\*\*"):
        training.result(timeout=30)
    shown = json.dumps(training.training.to_wire()), "; ".join(event.message for event in training.events())
    assert all("wrong password ***" in told and "hunter2" not in told for told in shown)


@pytest.mark.shared
@pytest.mark.scenario
def test_a_rank_that_the_kernel_kills_for_memory_is_reported_as_such(plane: Plane, tmp_path: Path) -> None:
    group = MemoryGroup(f"probe-{os.getpid()}")
    if not group.limit(64 << 20):
        pytest.skip("this machine lets nobody set a memory limit")
    group.remove()
    hungry = tmp_path / "hungry.py"
    hungry.write_text(
        "import os\nif os.environ['RANK'] == '1':\n    x = bytearray(400 << 20)\nimport time; time.sleep(60)\n"
    )
    training = plane.train(
        script=str(hungry), world=(2, 2, 2), max_restarts=0, resources={"memory": "200Mi"}, stop_grace_seconds=1
    )
    with pytest.raises(TrainingFailed, match="rank 1: exit_code=137 reason=OOMKilled"):
        training.result(timeout=60)


@pytest.mark.usefixtures("processes")
def test_cancelled_before_any_rank_started_has_an_empty_list_of_exits(tmp_path: Path) -> None:
    plane = Plane(tmp_path)
    try:
        plane.serve(MUSTER_GPUS="1")
        training = plane.train(world=(2, 2, 2), resources={"gpus": 1}, force=True)
        eventually(lambda: fresh(training).training.status.condition("Admitted"), "it was looked at")
        raw = f"{plane.url}/v1/namespaces/default/trainings/demo"
        auth = {"Authorization": f"Bearer {plane.api_token}"}
        assert "rankExits" not in httpx2.get(raw, headers=auth).json()["status"]
        training.cancel()
        with pytest.raises(TrainingCancelled):
            training.result(timeout=10)
        assert httpx2.get(raw, headers=auth).json()["status"]["rankExits"] == []
        plane.crash()
        plane.serve(MUSTER_GPUS="1")
        assert httpx2.get(raw, headers=auth).json()["status"]["rankExits"] == []
        assert plane.client.get("demo").training.status.rank_exits == ()
    finally:
        plane.close()


@pytest.mark.shared
@pytest.mark.scenario
def test_a_cancel_stops_the_ranks_and_says_so(plane: Plane) -> None:
    training = plane.train("demo", "sleep", world=(2, 2, 2), spares=1)
    training.wait_until_target_world(timeout=30)
    training.cancel(grace_seconds=1)
    with pytest.raises(TrainingCancelled):
        training.result(timeout=20)
    assert {one.termination_reason for one in training.rank_exits} == {"Cancelled"}
    assert len(training.rank_exits) == 2
    plane.no_worker_left()


@pytest.mark.shared
def test_ranks_that_exit_0_after_a_stored_cancel_still_give_cancelled(plane: Plane, tmp_path: Path) -> None:
    polite = tmp_path / "polite.py"
    polite.write_text(
        "import signal, sys, time\nsignal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\ntime.sleep(600)\n"
    )
    training = plane.train(script=str(polite), world=(2, 2, 2))
    training.wait_until_target_world(timeout=30)
    eventually(lambda: all(r.phase == "running" for r in fresh(training).ranks), "ranks run")
    training.cancel(grace_seconds=5)
    with pytest.raises(TrainingCancelled):
        training.result(timeout=20)
    assert training.phase == "cancelled"


@pytest.mark.scenario
def test_an_ended_training_refuses_orders_and_answers_edits_around_the_api_with_one_warning(plane: Plane) -> None:
    training = plane.train("demo", "exit=0", world=(1, 1, 3))
    training.result(timeout=30)
    version = training.training.version
    with pytest.raises(UDTerminalState) as caught:
        training.scale(target=2)
    assert (caught.value.phase, caught.value.requested_target) == ("succeeded", 2)
    raw = f"{plane.url}/v1/namespaces/default/trainings/demo"
    auth = {"Authorization": f"Bearer {plane.api_token}"}
    answer = httpx2.post(f"{raw}/scale", json={"target": 2}, headers=auth)
    assert answer.status_code == 409
    assert answer.json()["error"]["code"] == "terminal_state"
    assert answer.json()["error"]["details"] == {"phase": "succeeded", "requestedTarget": 2}
    assert fresh(training).training.version == version, "nothing was written"

    with sqlite3.connect(plane.home / "muster.db") as database:
        (body,) = database.execute("SELECT body FROM objects").fetchone()
        edited = json.loads(body)
        edited["spec"]["worldSize"]["target"] = 3
        database.execute("UPDATE objects SET body = ?", (json.dumps(edited).encode(),))
    eventually(lambda: "UDTerminalState" in reasons(training), "the edit was noticed", 10)
    warning = next(event for event in training.events() if event.reason == "UDTerminalState")
    assert warning.type == "Warning" and "1:3:3" in warning.message
    training.refresh()
    assert training.phase == "succeeded"
    plane.no_worker_left()
    plane.crash()
    plane.serve()
    eventually(lambda: plane.client.get("demo").generation == 2, "it is there again")
    assert reasons(training).count("UDTerminalState") == 1


def test_workers_of_a_training_that_is_removed_around_the_api_are_ended(plane: Plane) -> None:
    training = plane.train(world=(2, 2, 2))
    training.wait_until_target_world(timeout=30)
    logs = plane.home / "logs" / training.training.uid
    assert logs.exists()
    with sqlite3.connect(plane.home / "muster.db") as database:
        database.execute("DELETE FROM objects")
    plane.no_worker_left()
    eventually(lambda: not logs.exists(), "its logs are gone too", 10)
    plane.train("demo", "exit=0", world=(1, 1, 1)).result(timeout=30)


@pytest.mark.shared
def test_a_timeout_of_zero_looks_once_and_tells_a_timeout_from_an_end(plane: Plane) -> None:
    training = plane.train(world=(1, 1, 1))
    with pytest.raises(WaitTimeout) as caught:
        training.wait_until_complete(timeout=0)
    assert isinstance(caught.value, TimeoutError) and isinstance(caught.value, muster.BelowMinimumWorld)
    plane.go()
    training.result(timeout=30)
    assert training.wait(timeout=0).ready == 0
    assert training.wait_until_target_world(timeout=0).ready == 0


@pytest.mark.shared
def test_an_order_that_no_worker_can_carry_out_fails_at_once_with_the_reason(plane: Plane, tmp_path: Path) -> None:
    missing = plane.train("missing", script=str(tmp_path / "nowhere.py"), world=(2, 2, 2), force=True)
    with pytest.raises(TrainingFailed, match=r"no such script: .*nowhere\.py"):
        missing.result(timeout=30)
    nowhere = plane.train("nowhere", working_dir=str(tmp_path / "no-folder"))
    with pytest.raises(TrainingFailed, match=r"working directory .*no-folder does not exist"):
        nowhere.result(timeout=30)


@pytest.mark.scenario
def test_delete_stops_it_and_frees_the_name_and_the_logs(plane: Plane) -> None:
    training = plane.train("demo", "sleep", world=(2, 2, 2), stop_grace_seconds=0.5)
    training.wait_until_target_world(timeout=30)
    uid = training.training.uid
    training.delete()
    with pytest.raises(muster.NotFound):
        plane.client.get("demo")
    assert not (plane.home / "logs" / uid).exists()
    plane.no_worker_left()
    again = plane.train("demo", "exit=0", world=(1, 1, 1))
    assert again.training.uid != uid
    again.result(timeout=30)


@pytest.mark.shared
def test_what_is_finished_for_its_time_to_live_is_removed(plane: Plane) -> None:
    training = plane.train("demo", "exit=0", world=(1, 1, 1), ttl_seconds_after_finished=0.2)
    training.result(timeout=30)
    eventually(lambda: not plane.client.list(), "it is gone", 10)


@pytest.mark.shared
@pytest.mark.scenario
def test_a_deadline_ends_a_training_that_runs_too_long(plane: Plane) -> None:
    training = plane.train("demo", "sleep", world=(1, 1, 1), active_deadline_seconds=0.5, stop_grace_seconds=0.5)
    with pytest.raises(TrainingFailed, match="deadline"):
        training.result(timeout=30)

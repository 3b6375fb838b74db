"""The database is lost, emptied or replaced while workers run: they go on, and nobody is told "no trainings"."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from muster.backends.local import processes
from tests import damage
from tests.fleet import eventually
from tests.plane import Plane


@pytest.mark.parametrize(
    "how",
    [
        pytest.param(damage.delete, marks=pytest.mark.scenario),
        damage.empty_file,
        damage.empty_tables,
        damage.forget_trainings,
        damage.damage_wal,
    ],
)
def test_a_database_that_does_not_know_its_living_workers_is_not_served(
    plane: Plane, how: Callable[[Path], None]
) -> None:
    training = plane.train(world=(2, 2, 2))
    training.wait_until_target_world(timeout=60)
    workers = plane.worker_pids()
    assert sorted(workers) == ["demo-0", "demo-1"]
    plane.crash()
    kept = plane.folder / "kept"
    shutil.copytree(plane.home, kept, ignore=shutil.ignore_patterns("held", "*.lock"))
    how(plane.home)
    left = [path.name for path in damage.database_files(plane.home)]

    shown = plane.muster("ps")
    assert shown.wait() == 7, shown.text
    assert "workers run here (demo-0, demo-1)" in shown.text and "muster server start --forget" in shown.text
    assert "muster server restore FILE" in shown.text and "no trainings" not in shown.text
    assert plane.worker_pids() == workers, "they go on"
    if how in (damage.delete, damage.empty_file):
        assert [path.name for path in damage.database_files(plane.home)] == left, (
            "nothing stands in the way of the right file"
        )

    damage.delete(plane.home)
    for path in damage.database_files(kept):
        shutil.copy(path, plane.home)
    plane.serve()
    training.refresh()
    eventually(lambda: plane.client.get("demo").world.ready == 2, "its workers are adopted")
    assert plane.worker_pids() == workers
    plane.go()
    training.result(timeout=60)


def test_workers_that_nobody_knows_can_be_given_up(plane: Plane) -> None:
    plane.train(world=(2, 2, 2)).wait_until_target_world(timeout=60)
    plane.crash()
    damage.delete(plane.home)
    plane.serve("--forget")
    assert plane.client.list() == []
    plane.no_worker_left()


def test_workers_of_another_home_are_nobodys_business_here(
    plane: Plane, tmp_path_factory: pytest.TempPathFactory
) -> None:
    plane.train(world=(2, 2, 2)).wait_until_target_world(timeout=60)
    assert len(processes.agents(plane.home / "coordinator.addr")) == 2
    assert processes.agents(tmp_path_factory.mktemp("other") / "coordinator.addr") == []
    plane.go()


def test_a_database_that_is_gone_next_to_logs_of_trainings_is_not_served(plane: Plane) -> None:
    plane.train("done", "exit=0", world=(1, 1, 1)).result(timeout=60)
    plane.no_worker_left()
    plane.crash()
    damage.delete(plane.home)
    for mark in ("identity.json", "reached", "logs/.home"):
        (plane.home / mark).unlink()
    for words in (("ps",), ("get", "done"), ("server", "start")):
        shown = plane.muster(*words)
        assert shown.wait() == 7, shown.text
        assert "is missing or empty" in shown.text and "muster server forget" in shown.text
    assert not (plane.home / "muster.db").exists()
    plane.serve("--forget")
    assert plane.client.list() == []
    plane.crash()
    plane.serve()  # given up is given up


def test_another_users_imitation_of_a_worker_keeps_nobody_from_starting(plane: Plane) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can be another user for a moment")
    words = ["--coordinator-file", str(plane.home / "coordinator.addr"), "--run-id", "x", "--name", "x-0"]
    code = "import os, time; os.setuid(65534); print('here', flush=True); time.sleep(600)"
    other = plane.start(sys.executable, "-c", code, *words)
    other.expect("here")
    assert processes.agents(plane.home / "coordinator.addr") == []
    other.kill()


@pytest.mark.parametrize(("taken", "killed"), [("muster.db", False), ("muster.db-wal", True)])
def test_a_database_that_is_taken_away_while_it_is_served_is_saved(plane: Plane, taken: str, killed: bool) -> None:
    training = plane.train(world=(2, 2, 2))
    training.wait_until_target_world(timeout=60)
    workers = plane.worker_pids()
    (plane.home / taken).unlink()
    eventually(lambda: "was removed or replaced while it is in use" in _said(plane, "ps"), "it is told")
    _said(plane, "cancel", "demo", code=7)  # what would be lost is not promised
    if killed:
        plane.crash()
    else:
        _said(plane, "server", "stop")
    (rescued,) = plane.home.glob("muster.db.rescued-*")
    assert "muster server restore" in _said(plane, "ps", code=7)
    _said(plane, "server", "restore", str(rescued))
    plane.serve()
    eventually(lambda: plane.client.get("demo").world.ready == 2, "its workers are adopted")
    assert plane.worker_pids() == workers
    plane.go()
    training.result(timeout=60)


def _said(plane: Plane, *words: str, code: int = 0) -> str:
    shown = plane.muster(*words)
    assert shown.wait() == code, shown.text
    return shown.text

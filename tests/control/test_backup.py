"""A backup is made while trainings run, everything is lost, and it is put back: nobody's process ends for it."""

from __future__ import annotations

import json
import stat
from pathlib import Path

from tests import damage
from tests.fleet import eventually
from tests.plane import Plane, fresh


def _said(plane: Plane, *words: str, code: int = 0) -> str:
    shown = plane.muster(*words)
    assert shown.wait() == code, shown.text
    return shown.text


def test_a_backup_brings_everything_back_after_the_database_is_lost(plane: Plane) -> None:
    training = plane.train(world=(2, 2, 2))
    training.wait_until_target_world(timeout=60)
    workers, kept = plane.worker_pids(), plane.folder / "kept.tar"
    told = json.loads(_said(plane, "server", "backup", str(kept), "-o", "json"))
    assert told["trainings"] == 1 and stat.S_IMODE(kept.stat().st_mode) == 0o600
    assert "exists already" in _said(plane, "server", "backup", str(kept), code=4)
    _said(plane, "server", "backup", str(kept), "--force")
    assert "muster server stop" in _said(plane, "server", "restore", str(kept), code=4)
    plane.crash()
    damage.delete(plane.home)
    assert "muster server restore FILE" in _said(plane, "ps", code=7)

    told = json.loads(_said(plane, "server", "restore", str(kept), "-o", "json"))
    assert told["adopted"] == ["demo-0", "demo-1"] and told["unknown"] == []
    assert plane.worker_pids() == workers, "they go on"
    plane.serve()
    assert "demo" in _said(plane, "ps")
    eventually(lambda: plane.client.get("demo").world.ready == 2, "its workers are adopted")
    assert plane.worker_pids() == workers
    plane.go()
    fresh(training).result(timeout=60)


def test_an_older_backup_is_caught_up_with_what_has_happened_since(plane: Plane) -> None:
    """A worker was lost, another came, a round was formed, a training was submitted: the backup has none of it."""
    training = plane.train(world=(2, 2, 2))
    training.wait_until_target_world(timeout=60)
    kept = plane.folder / "kept.tar"
    _said(plane, "server", "backup", str(kept))
    plane.kill_worker("demo-0")
    eventually(lambda: plane.client.get("demo").training.status.round == 1, "another round")
    eventually(lambda: plane.client.get("demo").world.ready == 2, "of the same size")
    plane.train("later", world=(1, 1, 1)).wait_until_target_world(timeout=60)
    before = plane.client.get("demo").training.metadata.resource_version
    workers = plane.worker_pids()
    assert sorted(workers) == ["demo-1", "demo-2", "later-0"]
    plane.crash()

    told = _said(plane, "server", "restore", str(kept))
    assert "that it does not know: later-0" in told and "next: muster server forget" in told
    assert "muster server forget" in _said(plane, "ps", code=7)
    assert plane.worker_pids() == workers
    plane.serve("--forget")
    eventually(lambda: plane.client.get("demo").world.ready == 2, "its workers are adopted")
    eventually(lambda: "later-0" not in plane.worker_pids(), "it is given up")
    now = plane.client.get("demo").training
    assert now.status.round == 1, "the members knew it"
    assert int(now.metadata.resource_version) > int(before), "no version is given twice"
    assert {name: pid for name, pid in workers.items() if name != "later-0"} == plane.worker_pids()
    plane.kill_worker("demo-2")  # it was started after the backup: is its end noticed, and its name not given again?
    eventually(lambda: plane.client.get("demo").training.status.round == 2, "another round")
    eventually(lambda: sorted(plane.worker_pids()) == ["demo-1", "demo-3"], "a new name")
    plane.go()
    fresh(training).result(timeout=60)


def test_a_restore_is_undone_with_what_it_has_set_aside(plane: Plane) -> None:
    training = plane.train(world=(1, 1, 1))
    kept = plane.folder / "kept.tar"
    _said(plane, "server", "backup", str(kept))
    training.wait_until_target_world(timeout=60)
    plane.train("later", "exit=0", world=(1, 1, 1)).result(timeout=60)
    plane.crash()
    told = json.loads(_said(plane, "server", "restore", str(kept), "-o", "json"))
    _said(plane, "server", "restore", told["before"])
    plane.serve()
    assert sorted(one.name for one in plane.client.list()) == ["demo", "later"]
    plane.go()
    fresh(training).result(timeout=60)
    assert Path(told["before"]).exists()

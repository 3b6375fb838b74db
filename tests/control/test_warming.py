"""A spare is counted as ready when it could take over, and not before."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fleet import eventually
from tests.plane import Plane, fresh

SLOW = "import os, time\nwhile os.path.exists({path!r}):\n    time.sleep(0.05)\n"


@pytest.mark.scenario
@pytest.mark.usefixtures("processes")
def test_a_spare_that_still_imports_is_warming_and_not_ready(tmp_path: Path) -> None:
    plane = Plane(tmp_path)
    gate, folder = plane.folder / "gate", plane.folder / "modules"
    folder.mkdir()
    (folder / "slow_to_import.py").write_text(SLOW.format(path=str(gate)))
    try:
        plane.serve(PYTHONPATH=str(folder))
        env = {"PYTHONPATH": str(folder)}
        training = plane.train(world=(1, 1, 1), spares=1, preload=["slow_to_import"], env=env)
        eventually(lambda: fresh(training).training.status.spares.ready == 1, "a spare", 60)
        gate.touch()
        [spare] = [worker.name for worker in training.training.status.workers if worker.role == "spare"]
        plane.kill_worker(spare)

        def notes() -> list[str]:
            workers = fresh(training).training.status.workers
            return [worker.note for worker in workers if worker.role == "spare" and worker.name != spare]

        eventually(lambda: notes() == ["warming: importing its modules"], "a spare that warms up", 60)
        assert training.training.status.spares.ready == 0
        gate.unlink()
        eventually(lambda: fresh(training).training.status.spares.ready == 1, "a spare again", 60)
        assert notes() == [""]
    finally:
        gate.unlink(missing_ok=True)
        plane.go()
        plane.close()

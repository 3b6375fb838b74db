"""The interpreter of workers: the caller's, checked by the control plane."""

from __future__ import annotations

import asyncio
import sys
import venv
from pathlib import Path

import pytest

from muster.backends.local import interpreters
from tests.plane import Plane, fresh


def an_environment(folder: Path) -> Path:
    """Make a virtual environment that has the packages of ours, and return its interpreter."""
    venv.create(folder, symlinks=True, with_pip=False)
    packages = next(Path(sys.prefix, "lib").glob("python*/site-packages"))
    site = next((folder / "lib").glob("python*/site-packages"))
    (site / "ours.pth").write_text(f"import site; site.addsitedir({str(packages)!r})\n")
    return folder / "bin" / "python"


def test_workers_run_the_python_of_who_typed_muster_run(plane: Plane) -> None:
    python = an_environment(plane.folder / "B")
    (plane.folder / "which.py").write_text("import os, sys; print(sys.prefix, os.environ.get('WANDB_PROJECT'))\n")
    run = plane.start(str(python), "-m", "muster.cli.main", "run", "which.py", "--name", "b", WANDB_PROJECT="mine")
    assert run.wait() == 0, run.text
    assert f"{plane.folder}/B mine\n" in run.text
    described = plane.muster("describe", "b")
    assert described.wait() == 0 and f"{python}" in described.text and "WANDB_PROJECT" in described.text


def test_an_interpreter_that_cannot_be_used_is_named_beside_ours(plane: Plane) -> None:
    bare = plane.folder / "bare"
    venv.create(bare, symlinks=True, with_pip=False)
    open_to_all = plane.folder / "python"
    open_to_all.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    open_to_all.chmod(0o777)
    wrong = {
        "missing": ("/nonexistent/python", "No such file"),
        "bare": (f"{bare}/bin/python", "muster cannot be imported there"),
        "open": (str(open_to_all), "another user can change it"),
    }
    for name, (path, why) in wrong.items():
        training = plane.train(name, world=(1, 1, 1), interpreter=path)
        with pytest.raises(Exception, match=why) as refused:
            training.result(timeout=60)
        assert path in str(refused.value) and sys.executable in str(refused.value)
        assert fresh(training).phase == "failed"


def test_an_interpreter_that_was_refused_is_looked_at_again(tmp_path: Path) -> None:
    venv.create(tmp_path / "B", symlinks=True, with_pip=False)
    python = str(tmp_path / "B" / "bin" / "python")
    with pytest.raises(ValueError, match=r"muster cannot be imported there.*Install muster there"):
        asyncio.run(interpreters.check(python))
    an_environment(tmp_path / "B")  # as the hint says
    asyncio.run(interpreters.check(python))


def test_interpreters_that_hang_leave_the_other_threads_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interpreters, "_PATIENCE_S", 1.0)
    hanging = tmp_path / "python"
    hanging.write_text("#!/bin/sh\nexec sleep 600\n")
    hanging.chmod(0o755)

    async def test() -> None:
        checks = [asyncio.create_task(interpreters.check(str(hanging))) for _ in range(40)]
        await asyncio.sleep(0)
        await asyncio.to_thread(int)  # the control plane reads and writes in these threads
        assert not any(check.done() for check in checks)
        for check in checks[2:]:
            check.cancel()
        answers = await asyncio.gather(*checks, return_exceptions=True)
        assert all("it does not answer" in str(answer) for answer in answers[:2])

    asyncio.run(test())

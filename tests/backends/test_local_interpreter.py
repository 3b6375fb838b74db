"""The interpreter of workers: the caller's, checked by the control plane."""

from __future__ import annotations

import sys
import venv
from pathlib import Path

import pytest

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

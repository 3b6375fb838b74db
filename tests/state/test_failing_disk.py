"""A durable folder on a disk that fails: real processes, whose system calls return errors."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from muster.state import disk
from tests.failing_disk import FailingDisk, build

PROGRAM = Path(__file__).parents[1] / "programs" / "durable.py"


@pytest.fixture
def failing(tmp_path: Path) -> FailingDisk:
    return build(tmp_path)


@pytest.fixture(scope="module")
def three_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("three") / "kept"
    assert "ends with 3" in train(folder, 3).stdout
    return folder


@pytest.fixture
def folder(three_steps: Path, tmp_path: Path) -> Path:
    return shutil.copytree(three_steps, tmp_path / "kept")


def train(folder: Path, steps: int, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), str(folder), str(steps)]
    return subprocess.run(command, env=os.environ | env, capture_output=True, text=True, timeout=120)


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("call", "error", "part"),
    [
        ("read", "EIO", ".safetensors"),
        ("read", "ESTALE", ".safetensors"),
        ("open", "EACCES", ".safetensors"),
        ("open", "EMFILE", ".safetensors"),
        ("opendir", "EIO", "/kept"),
        ("opendir", "ESTALE", "/step-"),
        ("readdir", "EIO", "/kept"),
        ("readdir", "ESTALE", "/step-"),
    ],
)
def test_a_step_that_cannot_be_read_fails_the_start_and_costs_nothing(
    failing: FailingDisk, folder: Path, call: str, error: str, part: str
) -> None:
    before = content(folder)
    failing.fail(call, error, part)
    refused = train(folder, 9, **failing.env)
    assert refused.returncode != 0 and "begins" not in refused.stdout, refused
    last = refused.stderr.splitlines()[-1]
    assert "StateUnusable" in last and str(folder) in last and "cannot be read" in last and "Start again" in last
    assert content(folder) == before
    failing.recover()
    assert "begins at 3 with 3" in train(folder, 9, **failing.env).stdout


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(("call", "error"), [("write", "ENOSPC"), ("fsync", "EIO"), ("open", "EDQUOT")])
def test_a_disk_that_takes_no_more_loses_nothing_and_is_told_of(
    failing: FailingDisk, folder: Path, call: str, error: str
) -> None:
    failing.fail(call, error, "/kept/step-000000000006")
    trained = train(folder, 6, **failing.env)
    assert "begins at 3" in trained.stdout and "ends with 15" in trained.stdout
    assert f"nothing can be written to {folder}: {os.strerror(getattr(errno, error))}" in trained.stderr
    assert set(disk.steps(folder)) == {4, 5}
    failing.fail(call, error, "/.rank-")
    assert "ends with 36" in train(folder, 9, **failing.env).stdout
    assert set(disk.steps(folder)) == {4, 5}, "no older step goes before a newer one is whole"
    failing.recover()
    assert "begins at 5 with 10" in train(folder, 9).stdout

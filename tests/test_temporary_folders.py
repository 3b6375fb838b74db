"""Temporary folders of killed processes, made by real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster import files

MAKER = "import sys, signal; from muster import files; print(files.temporary(), flush=True); signal.pause()"


@pytest.fixture(autouse=True)
def parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def maker() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-c", MAKER], stdout=subprocess.PIPE, text=True) as process:
        yield process
        process.kill()


def folder_of(process: subprocess.Popen[str]) -> Path:
    assert process.stdout is not None
    return Path(process.stdout.readline().strip())


def test_the_next_start_removes_the_folder_of_a_killed_process_and_no_other(
    parent: Path, maker: subprocess.Popen[str]
) -> None:
    abandoned = folder_of(maker)
    (abandoned / "deep").mkdir()
    (abandoned / "deep" / "file").touch()
    foreign = parent / "muster-of-somebody"
    foreign.mkdir()
    own = Path(files.temporary())
    assert abandoned.is_dir(), "its process lives"
    maker.send_signal(signal.SIGKILL)
    maker.wait()
    later = Path(files.temporary())
    assert not abandoned.exists()
    assert own.is_dir() and later.is_dir() and foreign.is_dir()


def test_a_pid_that_another_process_has_by_now_is_no_owner(parent: Path) -> None:
    own = Path(files.temporary())
    pid, started = own.name.split("-")[1:3]
    former = parent / own.name.replace(f"-{pid}-{started}-", f"-{pid}-{int(started) - 1}-")
    former.mkdir()
    elsewhere = parent / own.name.replace(files._process_space(), "0123abcd-effffffc").replace(started, "1")
    elsewhere.mkdir()
    files.temporary()
    assert own.is_dir()
    assert not former.exists()
    assert elsewhere.is_dir(), "another boot or pid namespace: nothing is known of its process"


def test_a_link_with_such_a_name_is_not_followed(parent: Path) -> None:
    own = Path(files.temporary())
    target = parent / "target"
    target.mkdir()
    (target / "kept").touch()
    link = parent / own.name.replace(own.name.split("-")[2], "1", 1)
    os.symlink(target, link)
    files.temporary()
    assert link.is_symlink() and (target / "kept").exists()

"""One control plane on one home, also when the lock files or the home itself are removed: real processes."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from muster import home_lock
from muster.daemon.plane import REPLACED
from muster.sdk import home as homes

BOUND_S = 60
Start = Callable[[], "subprocess.Popen[str]"]


@pytest.fixture
def home(tmp_path: Path) -> Path:
    path = tmp_path / "home"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def start(home: Path) -> Iterator[Start]:
    """Start a control plane on the home, and return it when it serves or has ended."""
    processes: list[subprocess.Popen[str]] = []

    def begin() -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "muster.daemon", "--home", str(home), "--listen", "127.0.0.1:0"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        processes.append(process)
        assert process.stdout is not None
        process.stdout.readline()
        return process

    yield begin
    for process in processes:
        process.kill()
        process.communicate()


def remove_locks(home: Path) -> None:
    locks = list(home.glob("*.lock"))
    assert locks
    for path in locks:
        path.unlink()


@pytest.mark.scenario
@pytest.mark.usefixtures("processes")
def test_removing_the_lock_files_lets_no_second_control_plane_in(home: Path, start: Start) -> None:
    first = start()
    remove_locks(home)
    second = start()
    _, said = second.communicate(timeout=BOUND_S)
    assert second.returncode == 1
    assert f"another control plane serves {home}" in said
    assert first.poll() is None
    assert homes.is_locked(home)
    assert not homes.wait_until_unlocked(home, 0.1)
    first.terminate()
    first.wait(BOUND_S)
    assert homes.wait_until_unlocked(home, BOUND_S)
    assert not homes.is_locked(home)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("end", ["moved", "replaced"])
def test_a_control_plane_whose_home_is_moved_ends_and_says_why(home: Path, start: Start, end: str) -> None:
    first = start()
    home.rename(home.with_name("elsewhere"))
    if end == "replaced":
        home.mkdir()
    _, said = first.communicate(timeout=BOUND_S)
    assert first.returncode == REPLACED
    assert f"its home {home}, or the lock in it, was moved or removed" in said


def test_a_file_system_that_locks_no_folders_has_the_file_s_lock(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = fcntl.flock

    def flock(opened: int, operation: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{opened}"):
            raise OSError(9, "Bad file descriptor")  # what Linux answers on NFS
        real(opened, operation)

    monkeypatch.setattr(fcntl, "flock", flock)
    held = home_lock.HomeLock(home)
    assert home_lock.is_locked(home) and held.is_ours()
    with pytest.raises(BlockingIOError):
        home_lock.HomeLock(home)
    remove_locks(home)
    assert not held.is_ours()
    held.release()


def test_a_link_in_the_place_of_the_lock_file_is_not_followed(home: Path, tmp_path: Path) -> None:
    (home / home_lock.LOCK_FILE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        home_lock.HomeLock(home)
    assert not (tmp_path / "elsewhere").exists()

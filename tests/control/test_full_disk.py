"""The disk is full: it is told, nothing that is shown is untrue, trainings can be ended, and all goes on by itself."""

from __future__ import annotations

import contextlib
import resource
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleet import eventually
from tests.plane import Plane, fresh


@contextlib.contextmanager
def a_disk(at: Path, options: str) -> Iterator[None]:
    at.mkdir(parents=True, exist_ok=True)
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"{options},mode=0700", "none", str(at)], capture_output=True)
    if made.returncode:
        pytest.skip(f"no disk can be mounted here: {made.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(at)], check=True)


def fill(at: Path) -> Path:
    """Somebody else takes every block."""
    with contextlib.suppress(OSError), open(at / "filler", "ab", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)
    return at / "filler"


def fill_with_files(at: Path) -> list[Path]:
    """Blocks are left, but no file can be made."""
    made: list[Path] = []
    with contextlib.suppress(OSError):
        while True:
            made.append(at / f"filler-{len(made)}")
            made[-1].touch(exist_ok=False)
    return made[:-1]


def ready(plane: Plane) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"{plane.url}/readyz", timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        return refused.code, refused.read().decode()


def said(plane: Plane, *words: str, code: int = 0) -> str:
    shown = plane.muster(*words)
    assert shown.wait() == code, shown.text
    return shown.text


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Plane]:
    """A control plane whose home is a disk that can be filled."""
    plane = Plane(tmp_path)
    with a_disk(plane.home, "size=8m,nr_inodes=400"):
        try:
            plane.serve()
            yield plane
        finally:
            plane.close()


@pytest.mark.usefixtures("processes")
def test_a_full_disk_is_told_and_what_runs_heals_and_can_be_ended(full: Plane) -> None:
    plane = full
    training = plane.train(world=(2, 2, 2))
    training.wait_until_target_world(timeout=60)
    plane.train("other", world=(1, 1, 1)).wait_until_target_world(timeout=60)
    assert ready(plane)[0] == 200
    top = plane.muster("top", "-f")
    top.expect("demo  ready")
    filler = fill(plane.home)
    eventually(lambda: ready(plane)[0] == 503, "it is not ready")
    assert "is full" in ready(plane)[1]
    for words in (("ps",), ("describe", "demo"), ("explain", "demo"), ("top",)):
        assert "is full" in said(plane, *words)
    top.expect(r"warning: the disk of \S+ is full .* since \d\d:\d\d:\d\d UTC")
    assert "is full" in said(plane, "run", "--name", "new", "--detach", "--command", "--", "/bin/true", code=7)
    began = time.monotonic()
    plane.kill_worker("demo-0")
    eventually(lambda: fresh(training).training.status.round == 1, "what is shown is true")
    assert time.monotonic() - began < 10
    said(plane, "cancel", "other")
    eventually(lambda: plane.client.get("other").training.status.phase == "cancelled", "it is ended")
    said(plane, "delete", "other")
    eventually(lambda: "other" not in [one.name for one in plane.client.list()], "and removed")
    filler.unlink()
    eventually(lambda: ready(plane)[0] == 200, "it is ready again")
    assert "is full" not in said(plane, "ps")
    top.expect("the control plane can write again")
    top.kill()
    top.wait()
    plane.go()
    training.result(timeout=60)


def limit_files(plane: Plane, size: int) -> None:
    """A file can be no longer than that: a stand-in for a disk that takes nothing at all, not even what is kept."""
    assert plane.daemon is not None
    resource.prlimit(plane.daemon.proc.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def test_what_is_shown_while_nothing_can_be_written_is_said_to_be_old(plane: Plane) -> None:
    training = plane.train(world=(2, 2, 2))
    training.wait_until_target_world(timeout=60)
    limit_files(plane, 0)
    eventually(lambda: ready(plane)[0] == 503, "it is not ready")
    plane.kill_worker("demo-0")
    assert "may be as old as that" in said(plane, "ps")
    assert "cannot" in said(plane, "cancel", "demo", code=7)
    limit_files(plane, resource.RLIM_INFINITY)
    eventually(lambda: ready(plane)[0] == 200, "it is ready again")
    eventually(lambda: fresh(training).training.status.round == 1, "what happened meanwhile is written")
    eventually(lambda: fresh(training).world.ready == 2, "and it goes on by itself")
    limit_files(plane, 0)
    plane.kill_worker("demo-1")
    eventually(lambda: ready(plane)[0] == 503, "it is not ready")
    began = time.monotonic()
    said(plane, "server", "stop")
    assert time.monotonic() - began < 20, "a stop waits for no disk"
    plane.serve()
    eventually(lambda: fresh(training).world.ready == 2, "and it goes on by itself")
    plane.go()
    training.result(timeout=60)


@pytest.mark.usefixtures("processes")
def test_a_worker_that_cannot_be_started_says_why_and_is_started_when_there_is_room(full: Plane) -> None:
    plane = full
    training = plane.train(world=(2, 2, 2))
    training.wait_until_target_world(timeout=60)
    names = fill_with_files(plane.home)
    eventually(lambda: ready(plane)[0] == 503, "it is not ready")
    plane.kill_worker("demo-0")
    eventually(lambda: "No space left on device" in said(plane, "ps"), "why nothing comes")
    assert "1/2" in said(plane, "ps") or "0/2" in said(plane, "ps")
    assert "No space left on device" in said(plane, "events", "demo")
    for name in names:
        name.unlink()
    eventually(lambda: fresh(training).world.ready == 2, "and goes on by itself", 60)
    plane.go()
    training.result(timeout=60)


@pytest.mark.usefixtures("processes")
def test_a_control_plane_starts_on_a_full_disk_and_ends_what_runs(full: Plane) -> None:
    plane = full
    plane.train(world=(1, 1, 1)).wait_until_target_world(timeout=60)
    eventually(lambda: (plane.home / "reserve").exists(), "room is kept")
    fill(plane.home)
    plane.crash()
    plane.serve()
    said(plane, "cancel", "demo")
    eventually(lambda: plane.client.get("demo").training.status.phase == "cancelled", "it is ended")
    assert said(plane, "server", "stop")
    plane.serve()
    assert plane.client.get("demo").training.status.phase == "cancelled"

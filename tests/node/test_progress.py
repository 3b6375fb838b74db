"""A rank tells its step through a file of the agent's; without an agent nothing happens."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import muster
from muster.node import progress, word
from tests.fleet import Fleet, eventually


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = str(tmp_path / "progress")
    progress.create(path)
    monkeypatch.setenv(progress.FILE_VARIABLE, path)
    return path


def test_nothing_is_known_before_the_first_step(file: str) -> None:
    assert progress.read(file) is None


@pytest.mark.parametrize("step", [0, 1, -1, 2**40, True])
def test_the_last_step_is_read_with_its_time(file: str, step: int) -> None:
    before = time.monotonic()
    progress.progress(7)
    progress.progress(step)
    mark = progress.read(file)
    assert mark is not None and mark[0] == step
    assert before <= mark[1] <= time.monotonic()


def test_the_same_step_again_has_a_later_time(file: str) -> None:
    progress.progress(3)
    first = progress.read(file)
    progress.progress(3)
    second = progress.read(file)
    assert first is not None and second is not None and second[1] > first[1]


def test_any_number_that_is_whole_will_do(file: str) -> None:
    class Whole:
        def __int__(self) -> int:
            return 12

    progress.progress(Whole())  # type: ignore[arg-type]
    mark = progress.read(file)
    assert mark is not None and mark[0] == 12


def test_each_file_gets_its_own_steps(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    progress.progress(1)
    other = str(tmp_path / "other")
    progress.create(other)
    monkeypatch.setenv(progress.FILE_VARIABLE, other)
    progress.progress(2)
    assert [mark[0] for path in (file, other) if (mark := progress.read(path))] == [1, 2]


def test_a_file_made_anew_is_unread_again(file: str) -> None:
    progress.progress(5)
    progress.create(file)
    assert progress.read(file) is None


@pytest.mark.parametrize("value", [None, "", "/nowhere/at/all", "empty"])
def test_without_an_agent_it_does_nothing(value: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").touch()
    monkeypatch.delenv(progress.FILE_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(progress.FILE_VARIABLE, value)
    muster.progress(1)
    muster.progress(2)
    assert [path.name for path in tmp_path.iterdir()] == ["empty"] and not Path("empty").stat().st_size


@pytest.mark.parametrize("content", [None, b"", b"short"], ids=["missing", "empty", "short"])
def test_a_file_that_cannot_be_read_tells_nothing(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "progress"
    if content is not None:
        path.write_bytes(content)
    assert progress.read(str(path)) is None


@pytest.mark.parametrize("read_by_somebody", [False, True])
def test_an_agent_does_not_wait_for_what_a_rank_puts_in_the_place_of_its_file(
    tmp_path: Path, read_by_somebody: bool
) -> None:
    path = str(tmp_path / "progress")
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK) if read_by_somebody else None
    found: list[object] = []

    def look() -> None:
        found.extend((progress.read(path), progress.read_first(path), word.asked(path)))
        word.over(path)
        found.append("done")

    agent = threading.Thread(target=look, daemon=True)
    agent.start()
    agent.join(10)
    assert found == [None, None, word.Asked(0, 0), "done"]
    if reader is not None:
        os.close(reader)


def test_a_rank_needs_only_the_standard_library_and_leaves_its_step_when_killed(file: str) -> None:
    script = """\
import os, signal, sys, muster
muster.progress(41)
muster.progress(42)
foreign = {name.partition(".")[0] for name in sys.modules} & {"torch", "httpx2", "pydantic", "typer", "asyncio"}
print(sorted(foreign), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], env=os.environ, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")
    mark = progress.read(file)
    assert mark is not None and mark[0] == 42 and mark[1] <= time.monotonic()


def test_a_hang_timeout_without_steps_never_fires_and_says_so(fleet: Fleet) -> None:
    fleet.coordinator()
    node = fleet.node("a", "--nnodes", "1", "--hang-timeout", "0.5", program=fleet.probe("wait"))

    def kinds() -> list[str]:
        return [one["kind"] for one in (fleet.view() or {"story": []})["story"]]

    eventually(lambda: "unwatched" in kinds(), "told that a hang would not be noticed")
    fleet.go()
    assert node.wait() == 0
    assert "recall" not in node.text and "round 1" not in node.text

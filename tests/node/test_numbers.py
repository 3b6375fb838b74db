"""A rank's numbers reach its agent through mapped memory: all that can be numbers, in order, and nothing else."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import muster
from muster.node import numbers, progress
from muster.node.numbers import FILE_SIZE, SLOTS, Reader
from muster.types.numbers import MAX_NAMES


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = str(tmp_path / "numbers")
    numbers.create(path)
    monkeypatch.setenv(numbers.FILE_VARIABLE, path)
    monkeypatch.delenv(progress.FILE_VARIABLE, raising=False)
    return path


def test_numbers_are_read_once_and_in_order(file: str) -> None:
    reader = Reader(file)
    assert reader.fresh() == []
    before = time.monotonic()
    muster.log(1, loss=0.5, lr=1e-4)
    muster.log(step=2, loss=0.25)
    found = reader.fresh()
    assert [(one.seq, one.name, one.step, one.value) for one in found] == [
        (1, "loss", 1, 0.5),
        (2, "lr", 1, 1e-4),
        (3, "loss", 2, 0.25),
    ]
    assert all(before <= one.at <= time.monotonic() for one in found)
    assert reader.fresh() == []
    muster.log(3, loss=0.1)
    assert [one.seq for one in reader.fresh()] == [4]


def test_without_a_step_it_is_the_one_that_was_last_reported(
    file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    muster.log(loss=1.0)
    mark = str(tmp_path / "progress")
    progress.create(mark)
    monkeypatch.setenv(progress.FILE_VARIABLE, mark)
    muster.progress(41)
    muster.log(loss=2.0)
    assert [(one.step, one.value) for one in Reader(file).fresh()][-1] == (41, 2.0)


def test_what_is_like_a_number_will_do_and_what_is_none_is_said(file: str) -> None:
    class Scalar:
        def __float__(self) -> float:
            return 0.75

    muster.log(1, loss=Scalar(), yes=True, bad=math.nan, worse=-math.inf)  # type: ignore[arg-type]
    read = {one.name: one.value for one in Reader(file).fresh()}
    assert read["loss"] == 0.75 and read["yes"] == 1.0
    assert math.isnan(read["bad"]) and read["worse"] == -math.inf
    with pytest.raises((TypeError, ValueError)):
        muster.log(1, loss="a lot")  # type: ignore[arg-type]


def test_names_that_cannot_be_kept_are_dropped(file: str) -> None:
    muster.log(1, **{"": 1.0, "x" * 65: 1.0, "a\nb": 1.0, "world_size": 1.0, "train/loss é": 1.0})
    assert [one.name for one in Reader(file).fresh()] == ["train/loss é"]


def test_only_so_many_names_have_room(file: str) -> None:
    for count in range(2 * MAX_NAMES):
        muster.log(1, **{f"n{count}": 1.0})
    assert [one.name for one in Reader(file).fresh()] == [f"n{count}" for count in range(MAX_NAMES)]


def test_a_rank_that_is_faster_than_its_reader_overwrites_its_own_oldest(file: str) -> None:
    reader = Reader(file)
    muster.log(0, loss=0.0)
    assert len(reader.fresh()) == 1
    for step in range(1, SLOTS + 101):
        muster.log(step, loss=1.0)
    found = [one.step for one in reader.fresh()]
    assert found == list(range(101, SLOTS + 101))
    muster.log(9, loss=1.0)
    assert [one.step for one in reader.fresh()] == [9]


@pytest.mark.parametrize(
    "content",
    [None, b"", b"short", b"\xff" * FILE_SIZE, os.urandom(FILE_SIZE)],
    ids=["missing", "empty", "short", "full", "junk"],
)
def test_junk_tells_nothing(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    if content is not None:
        path.write_bytes(content)
    assert Reader(str(path)).fresh() == []


@pytest.mark.parametrize("kind", ["link", "pipe", "folder"])
def test_what_is_no_file_is_not_read_and_holds_nobody_up(kind: str, tmp_path: Path, file: str) -> None:
    path = tmp_path / "other"
    if kind == "link":
        path.symlink_to(file)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.mkdir()
    muster.log(1, loss=1.0)
    assert Reader(str(path)).fresh() == []


@pytest.mark.parametrize("value", [None, "", "/nowhere/at/all", "empty"])
def test_without_an_agent_it_does_nothing(value: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").touch()
    monkeypatch.delenv(numbers.FILE_VARIABLE, raising=False)
    if value is not None:
        monkeypatch.setenv(numbers.FILE_VARIABLE, value)
    muster.log(1, loss=1.0)
    muster.log(loss=2.0)
    assert [path.name for path in tmp_path.iterdir()] == ["empty"] and not Path("empty").stat().st_size


def test_what_a_rank_forks_is_no_rank(file: str) -> None:
    muster.log(1, loss=1.0)
    child = os.fork()
    if child == 0:
        muster.log(2, loss=2.0)
        os._exit(0)
    os.waitpid(child, 0)
    assert [one.step for one in Reader(file).fresh()] == [1]


def test_a_rank_needs_only_the_standard_library_and_leaves_its_numbers_when_killed(file: str) -> None:
    script = """\
import os, signal, sys, muster
muster.log(7, loss=0.5)
foreign = {name.partition(".")[0] for name in sys.modules} & {"torch", "httpx2", "pydantic", "typer", "asyncio"}
print(sorted(foreign), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], env=os.environ, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")
    assert [(one.name, one.step, one.value) for one in Reader(file).fresh()] == [("loss", 7, 0.5)]


def test_a_call_makes_no_system_call_that_waits_and_takes_microseconds(file: str) -> None:
    muster.log(0, loss=1.0, lr=1.0)
    took = []
    for step in range(2000):
        began = time.perf_counter()
        muster.log(step, loss=1.0, lr=1.0)
        took.append(time.perf_counter() - began)
    assert sorted(took)[len(took) // 2] < 1e-4, "the median call, on however busy a machine"

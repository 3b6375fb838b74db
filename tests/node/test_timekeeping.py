"""When ranks write is noted beside their files, without them, and never more often than is of use."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from muster import files, log_times
from muster.log_times import Mark
from muster.node import timekeeping
from muster.node.timekeeping import Timekeeper

BOUND_S = 20.0


@pytest.fixture
def keeper() -> Iterator[Timekeeper]:
    keeper = Timekeeper()
    yield keeper
    keeper.finish(BOUND_S)


def marks(path: Path) -> list[Mark]:
    try:
        with files.reading(log_times.beside(str(path))) as opened:
            return log_times.after(opened, -1, log_times.MOST)
    except OSError:
        return []


def noted(path: Path, size: int) -> bool:
    return [mark.size for mark in marks(path)[-1:]] == [size]


def until(true: Callable[[], bool]) -> None:
    bound = time.monotonic() + BOUND_S
    while not true():
        assert time.monotonic() < bound, "it did not happen"
        time.sleep(0.002)


def a_file(folder: Path, name: str = "rank-0.out") -> Path:
    path = folder / name
    path.touch()
    return path


def append(path: Path, text: str) -> None:
    with open(path, "a") as file:
        file.write(text)


def test_a_mark_says_when_a_file_has_grown(tmp_path: Path, keeper: Timekeeper) -> None:
    path = a_file(tmp_path)
    keeper.follow(str(path))
    until(lambda: len(marks(path)) == 1)
    before = time.time_ns()
    append(path, "one\n")
    until(lambda: len(marks(path)) == 2)
    append(path, "two\n")
    until(lambda: len(marks(path)) == 3)
    assert [mark.size for mark in marks(path)] == [0, 4, 8]
    assert before - 20_000_000 <= marks(path)[1].time_ns <= marks(path)[2].time_ns <= time.time_ns()


def test_what_is_written_by_turns_is_noted_in_that_order(tmp_path: Path, keeper: Timekeeper) -> None:
    paths = [a_file(tmp_path, f"rank-{rank}.out") for rank in (0, 1)]
    for path in paths:
        keeper.follow(str(path))
        until(functools.partial(noted, path, 0))
    for turn in range(6):
        append(paths[turn % 2], f"{turn}\n")
        until(functools.partial(noted, paths[turn % 2], paths[turn % 2].stat().st_size))
    times = [
        (mark.time_ns, mark.size) for pair in zip(*(marks(path)[1:] for path in paths), strict=True) for mark in pair
    ]
    assert times == sorted(times, key=lambda one: one[0])


@pytest.mark.parametrize("watches", [True, False])
def test_a_rank_that_never_pauses_costs_a_mark_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watches: bool
) -> None:
    if not watches:  # a user has only so many
        monkeypatch.setattr(timekeeping._Growth, "watch", lambda self, kept: False)
    keeper, path = Timekeeper(), a_file(tmp_path)
    keeper.follow(str(path))
    began = time.monotonic()
    with open(path, "ab", buffering=0) as file:
        while time.monotonic() - began < 0.5:
            file.write(b"line\n")
    keeper.finish(BOUND_S)
    took = time.monotonic() - began
    found = marks(path)
    assert found[-1].size == path.stat().st_size
    assert 3 <= len(found) <= took / timekeeping.APART_S + 4
    assert list(log_times.believed(found[1:], found[-1].size, time.time_ns())) == found[1:]


def test_nothing_is_done_while_nothing_is_printed(
    tmp_path: Path, keeper: Timekeeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, looks = a_file(tmp_path), list[str]()
    look = timekeeping._look

    def counted(kept: timekeeping._Kept) -> None:
        looks.append(kept.path)
        look(kept)

    monkeypatch.setattr(timekeeping, "_look", counted)
    keeper.follow(str(path))
    until(lambda: len(marks(path)) == 1)
    other = a_file(tmp_path, "rank-1.out")
    keeper.follow(str(other))
    append(other, "x\n")
    until(lambda: bool(marks(other)) and marks(other)[-1].size == 2)
    assert looks.count(str(path)) == 1


def test_a_file_that_is_let_go_is_noted_to_its_end_and_forgotten(tmp_path: Path, keeper: Timekeeper) -> None:
    path = a_file(tmp_path)
    keeper.follow(str(path))
    append(path, "last words")
    keeper.let_go(str(path))
    until(lambda: not keeper._files)
    assert marks(path)[-1].size == 10
    append(path, "more")
    keeper.finish(BOUND_S)
    assert marks(path)[-1].size == 10


def test_what_was_written_before_the_first_look_is_noted_in_its_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine that is so busy that the thread comes late."""
    monkeypatch.setattr(Timekeeper, "_wake", lambda self: None)
    keeper = Timekeeper()
    paths = [a_file(tmp_path, f"rank-{rank}.out") for rank in (0, 1)]
    for path in paths:
        keeper.follow(str(path))
    for path in reversed(paths):
        append(path, "x\n")
        until(lambda: os.stat(a_file(tmp_path, "clock")).st_mtime_ns > paths[1].stat().st_mtime_ns)
    for path in paths:
        timekeeping._look(keeper._files[str(path)])
    later, earlier = (marks(path) for path in paths)
    assert [mark.size for mark in (*later, *earlier)] == [2, 2]
    assert earlier[0].time_ns < later[0].time_ns


def test_a_rank_cannot_date_its_lines(tmp_path: Path, keeper: Timekeeper) -> None:
    path = a_file(tmp_path)
    keeper.follow(str(path))
    until(lambda: len(marks(path)) == 1)
    for count, when in enumerate((4 * 10**18, 1), start=1):
        append(path, "x\n")
        os.utime(path, ns=(when, when))
        until(functools.partial(noted, path, 2 * count))
    times = [mark.time_ns for mark in marks(path)]
    assert times == sorted(times) and times[-1] <= time.time_ns()


def test_a_place_where_nothing_can_be_noted_holds_nobody_up(tmp_path: Path, keeper: Timekeeper) -> None:
    path, other = a_file(tmp_path), a_file(tmp_path, "rank-1.out")
    os.mkfifo(log_times.beside(str(path)))
    keeper.follow(str(path))
    keeper.follow(str(other))
    append(path, "x\n")
    append(other, "x\n")
    until(lambda: bool(marks(other)) and marks(other)[-1].size == 2)


def test_disabled_it_does_nothing(tmp_path: Path) -> None:
    keeper, path = Timekeeper(enabled=False), a_file(tmp_path)
    keeper.follow(str(path))
    keeper.let_go(str(path))
    keeper.finish(BOUND_S)
    assert os.listdir(tmp_path) == [path.name]

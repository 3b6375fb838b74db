"""Marks beside a file: which are believed, how many there are, and what else may lie there."""

from __future__ import annotations

import itertools
import os
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster import files, log_times, trimming
from muster.log_times import MOST, Mark

MARKS = st.lists(st.builds(Mark, st.integers(0, 100), st.integers(0, 100)), max_size=30)


@pytest.mark.parametrize(
    ("time_ns", "shown"),
    [
        (0, b"1970-01-01T00:00:00.000Z "),
        (1_769_860_800_054_999_999, b"2026-01-31T12:00:00.054Z "),
        (1_769_860_799_999_999_999, b"2026-01-31T11:59:59.999Z "),
    ],
)
def test_a_time_is_shown_in_utc_with_milliseconds(time_ns: int, shown: bytes) -> None:
    assert log_times.stamp(time_ns) == shown


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([(1, 10), (2, 20), (2, 30)], [(1, 10), (2, 20), (2, 30)]),
        ([(1, 10), (2, 10), (0, 20), (3, 5)], [(1, 10)]),
        ([(1, 101), (1, 100)], [(1, 100)]),
        ([(51, 10), (50, 20)], [(50, 20)]),
        ([(0, 0), (0, 0), (7, 3)], [(7, 3)]),
    ],
)
def test_only_what_can_be_true_is_believed(found: list[tuple[int, int]], expected: list[tuple[int, int]]) -> None:
    assert list(log_times.believed([Mark(*one) for one in found], end=100, now_ns=50)) == expected


@given(MARKS, st.integers(0, 100), st.integers(0, 100))
def test_believed_marks_ascend_within_bounds(found: list[Mark], end: int, now_ns: int) -> None:
    kept = list(log_times.believed(found, end, now_ns))
    assert all(one.size < two.size and one.time_ns <= two.time_ns for one, two in itertools.pairwise(kept))
    assert all(mark.size <= end and mark.time_ns <= now_ns for mark in kept)


@given(st.integers(-5, 1000), st.integers(0, 1000), st.integers(0, 10_000))
def test_a_guess_covers_all_of_a_file(begun_ns: int, ended_ns: int, size: int) -> None:
    marks = log_times.spread(begun_ns, ended_ns, size)
    assert list(log_times.believed(marks, size, ended_ns)) == marks
    assert (marks[-1] if size else Mark(ended_ns, 0)) == Mark(ended_ns, size) if size else marks == []


@settings(max_examples=15)  # of a hundred thousand marks each
@given(st.integers(0, 3), st.integers(0, 1 << 40))
def test_thinned_marks_are_few_and_no_line_is_much_older_than_shown(factor: int, pause_ns: int) -> None:
    count = MOST // 2 + factor * MOST // 4
    marks = [Mark(number * 10 + (number > 100) * pause_ns, number + 1) for number in range(count)]
    kept = log_times.thinned(marks, begins=0)
    assert len(kept) <= MOST * 3 // 4
    assert kept[-MOST // 2 :] == marks[-MOST // 2 :], "the newer half is as it was"
    span = marks[-1].time_ns - marks[0].time_ns
    shown = iter(kept)
    covering = next(shown)
    for mark in marks:
        while covering.size < mark.size:
            covering = next(shown)
        assert covering.time_ns - mark.time_ns <= span // (MOST // 8) + 1


def test_marks_of_what_was_cut_off_are_not_kept() -> None:
    marks = [Mark(number, number + 1) for number in range(MOST)]
    assert log_times.thinned(marks, begins=MOST - 10) == marks[-10:]


# Files --------------------------------------------------------------------------------------------


def all_marks(path: Path, size: int = 0, most: int = 2 * MOST) -> list[Mark]:
    with files.reading(log_times.beside(str(path))) as opened:
        return log_times.after(opened, size, most)


def test_marks_are_found_from_any_size_forwards_and_backwards(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.out"
    for number in range(1, 100):
        log_times.note(str(path), Mark(number, number * 10))
    assert all_marks(path, 0, 3) == [(1, 10), (2, 20), (3, 30)]
    assert all_marks(path, 505, 2) == [(51, 510), (52, 520)]
    assert all_marks(path, 990, 2) == []
    with files.reading(log_times.beside(str(path))) as opened:
        assert log_times.before(opened, 990, 2) == [(98, 980), (99, 990)]
        assert log_times.before(opened, 15, 2) == [(1, 10)]
        assert log_times.before(opened, 5, 2) == []


def test_however_long_a_file_is_written_to_its_marks_take_little(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.out"
    beside = Path(log_times.beside(str(path)))
    beside.write_bytes(b"".join(struct.pack("<QQ", number, number) for number in range(1, MOST + 1)))
    log_times.note(str(path), Mark(MOST + 1, MOST + 1))
    kept = all_marks(path)
    assert len(kept) < MOST * 3 // 4 and kept[-1] == (MOST + 1, MOST + 1)
    assert os.listdir(tmp_path) == [beside.name]
    log_times.note(str(path), Mark(MOST + 2, MOST + 2))
    assert all_marks(path) == [*kept, (MOST + 2, MOST + 2)]


def test_a_part_of_a_mark_is_written_over(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.out"
    log_times.note(str(path), Mark(1, 10))
    with open(log_times.beside(str(path)), "ab") as file:
        file.write(b"torn")
    assert all_marks(path) == [(1, 10)]
    log_times.note(str(path), Mark(2, 20))
    assert all_marks(path) == [(1, 10), (2, 20)]


def too_long(path: Path) -> None:
    path.touch()
    os.truncate(path, 1 << 40)


def noise(path: Path) -> None:
    path.write_bytes(bytes(range(256)) * 64)


@pytest.mark.parametrize("plant", [too_long, noise])
def test_what_is_not_ours_is_read_within_bounds(tmp_path: Path, plant: Callable[[Path], None]) -> None:
    path = tmp_path / "rank-0.out"
    plant(Path(log_times.beside(str(path))))
    found = all_marks(path, 500)
    assert len(found) <= 1024
    assert all(mark.size <= 1000 for mark in log_times.believed(found, 1000, 1 << 62))


@pytest.mark.parametrize("plant", [os.mkfifo, lambda path: os.symlink("/etc/passwd", path)])
def test_nothing_but_a_file_is_written(tmp_path: Path, plant: Callable[[str], None]) -> None:
    path = tmp_path / "rank-0.out"
    plant(log_times.beside(str(path)))
    with pytest.raises(OSError):
        log_times.note(str(path), Mark(1, 10))


def test_marks_are_cut_with_their_files(tmp_path: Path) -> None:
    keep = 1 << 17
    for number in range(3):
        folder = tmp_path / f"round-{number}"
        folder.mkdir()
        (folder / "rank-0.out").write_bytes(b"x" * keep)
        marks = b"".join(struct.pack("<QQ", size, size) for size in range(1, MOST))
        (folder / "rank-0.out.times").write_bytes(marks)
    trimming.cut_rounds(tmp_path, keep)
    assert trimming.taken(tmp_path) < 2 * keep + keep // 2
    left = all_marks(tmp_path / "round-2" / "rank-0.out", 1000)
    assert left[-1] == (MOST - 1, MOST - 1) and list(log_times.believed(left, MOST, MOST))
    assert trimming.on_disk(os.stat(tmp_path / "round-0" / "rank-0.out.times")) == 0

"""What rank 0 logs is told once, all of it again after a reconnect, and what a worker uses from time to time."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.node import measuring, numbers
from muster.node.measuring import Measuring
from muster.node.numbers import Reader
from muster.node.resources import Watch
from muster.types import frames
from muster.types.frames import Frame, MetricsFrame, WelcomeFrame
from muster.types.measured import WorkerUse
from muster.types.numbers import MAX_NAMES, MAX_POINTS


class Line:
    """A connection that can be down."""

    def __init__(self) -> None:
        self.up = True
        self.sent: list[MetricsFrame] = []

    def send(self, frame: Frame) -> bool:
        if self.up:
            read = frames.read(frames.write(frame))  # as it would be heard
            assert isinstance(read, MetricsFrame)
            self.sent.append(read)
        return self.up

    def steps(self) -> list[int | None]:
        told, self.sent = self.sent, []
        return [point.step for frame in told for point in frame.points]


class Looks(Watch):
    """Nothing is looked at; it says what it was given."""

    def __init__(self, *found: WorkerUse | None) -> None:
        super().__init__(WorkerUse)
        self._found = list(found)

    def take(self) -> WorkerUse | None:
        return self._found.pop(0) if self._found else None


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    path = str(tmp_path / "numbers")
    numbers.create(path)
    monkeypatch.setenv(numbers.FILE_VARIABLE, path)
    return path


def begun(file: str, line: Line, number: int = 0) -> Measuring:
    mine = Measuring(line.send, Looks())
    mine.begin(number, Reader(file), 2)
    return mine


def test_numbers_are_told_once_with_their_age_and_round(file: str) -> None:
    line = Line()
    mine = begun(file, line, number=3)
    numbers.log(5, loss=0.5, odd=math.nan)
    mine.tell()
    mine.tell()
    [frame] = line.sent
    assert (frame.round, frame.names) == (3, ("loss", "odd"))
    assert [(one.seq, one.name, one.step, one.value) for one in frame.points] == [(1, 0, 5, 0.5), (2, 1, 5, None)]
    assert all(0 <= one.age_s < 5 for one in frame.points)


def test_who_was_away_hears_all_that_is_left_of_every_round(file: str, tmp_path: Path) -> None:
    line = Line()
    mine = begun(file, line)
    numbers.log(1, loss=1.0)
    mine.tell()
    line.up = False
    for step in range(2, 5):
        numbers.log(step, loss=1.0)
        mine.tell()
    other = str(tmp_path / "next")
    numbers.create(other)
    numbers.log(5, loss=1.0)
    mine.begin(1, Reader(other), 2)  # what came last in the round before is not lost
    line.up = True
    line.sent.clear()
    mine.hear(WelcomeFrame())
    mine.tell()
    assert [frame.round for frame in line.sent] == [0]
    assert line.steps() == [1, 2, 3, 4, 5]


def test_messages_are_of_one_round_each(file: str, tmp_path: Path) -> None:
    line = Line()
    mine = begun(file, line)
    numbers.log(1, loss=1.0)
    other = str(tmp_path / "next")
    numbers.create(other)
    mine.begin(1, Reader(other), 2)
    mine._unsent += [one._replace(round=1) for one in mine._unsent]
    mine.tell()
    assert [frame.round for frame in line.sent] == [0, 1]


def test_a_burst_and_a_long_outage_stay_bounded(file: str) -> None:
    line = Line()
    mine = begun(file, line)
    line.up = False
    for look in range(30):
        for step in range(1000):
            numbers.log(look * 1000 + step, loss=1.0, lr=2.0)
        mine.tell()
    assert len(mine._unsent) <= measuring.MOST_KEPT
    line.up = True
    mine.hear(WelcomeFrame())
    for _ in range(10):
        mine.tell()
    assert all(len(frame.points) <= MAX_POINTS for frame in line.sent)
    steps = [step for step in line.steps() if step is not None]
    assert len(steps) <= measuring.MOST_KEPT and max(steps) == 29_999
    assert min(steps) < 100, "the beginning of the outage is there, too"
    assert mine._unsent == []


def test_a_rank_that_names_its_numbers_anew_at_every_look_fills_neither_memory_nor_messages(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    line = Line()
    mine = begun(str(path), line)
    line.up = False
    for look in range(10):
        content = bytearray(numbers.FILE_SIZE)
        for place in range(MAX_NAMES):
            name = f"{look}-{place}".encode()
            content[place * numbers._NAME_ROOM : place * numbers._NAME_ROOM + len(name)] = name
            seq = look * MAX_NAMES + place + 1
            numbers._SLOT.pack_into(content, numbers._NAMES + (seq - 1) * numbers._SLOT.size, place, 1, 1.0, 0.5, seq)
        path.write_bytes(content)
        mine.tell()
    assert len(mine._unsent) <= MAX_NAMES
    line.up = True
    mine.tell()
    assert sum(len(frame.points) for frame in line.sent) == MAX_NAMES


_whole = st.integers(-(1 << 63), (1 << 63) - 1)
_slots = st.tuples(
    st.integers(0, 5000), st.integers(0, 70), _whole, st.floats(), st.floats(), st.integers(0, (1 << 64) - 1)
)


@given(st.lists(_slots, max_size=20), st.binary(max_size=600))
def test_whatever_a_rank_writes_the_coordinator_can_read_what_it_is_told(
    slots: list[tuple[int, int, int, float, float, int]], names: bytes
) -> None:
    """A message that cannot be read costs the worker its connection."""
    content = bytearray(numbers.FILE_SIZE)
    content[: len(names)] = names
    for place, *slot in slots:
        at = numbers._NAMES + place % numbers.SLOTS * numbers._SLOT.size
        numbers._SLOT.pack_into(content, at, *slot)
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        line = Line()
        mine = begun(file.name, line)
        for _ in range(3):
            mine.tell()
        mine.hear(WelcomeFrame())
        mine.tell()
    assert all(len(frame.names) <= MAX_NAMES and len(frame.points) <= MAX_POINTS for frame in line.sent)


def test_what_a_worker_uses_is_told_when_it_is_known(file: str) -> None:
    line = Line()
    mine = Measuring(line.send, Looks(None, WorkerUse(cpu_percent=12.5, memory_bytes=7), WorkerUse(cpu_percent=99.0)))
    for _ in range(4):
        mine.tell()
    assert [frame.use for frame in line.sent] == [WorkerUse(cpu_percent=12.5, memory_bytes=7)], "not at every look"

"""In which order lines of several streams are shown."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from muster.core.training.log_order import in_order


@dataclass
class Lines:
    """A stream in memory; a time without lines is one at which a line had no end yet."""

    name: str
    pieces: list[tuple[int, int]]  # when, and how many lines
    written: int = 0
    times: list[int] = field(default_factory=list)

    def due(self) -> int | None:
        return self.pieces[0][0] if self.pieces else None

    def take(self) -> bytes:
        when, count = self.pieces.pop(0)
        self.times += [when] * count
        self.written += count
        return b"".join(f"{when} {self.name} {self.written - count + at}\n".encode() for at in range(count))


PIECES = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 3)), max_size=10).map(sorted)


def shown(streams: list[list[tuple[int, int]]], until: int | None = None) -> list[tuple[int, int, int]]:
    sources = [Lines(str(number), list(pieces)) for number, pieces in enumerate(streams)]
    text = b"".join(in_order(sources, until)).decode()
    lines = [line.split() for line in text.splitlines()]
    return [(int(when), int(name), int(number)) for when, name, number in lines]


@given(st.lists(PIECES, max_size=6))
def test_all_lines_come_once_in_order_of_time_and_those_of_a_stream_as_they_were(
    streams: list[list[tuple[int, int]]],
) -> None:
    found = shown(streams)
    assert found == sorted(found)
    assert len(found) == sum(count for pieces in streams for _, count in pieces)
    for name in range(len(streams)):
        numbers = [number for _, one, number in found if one == name]
        assert numbers == list(range(len(numbers)))


@given(st.lists(PIECES, max_size=6), st.integers(0, 20))
def test_what_was_written_later_waits(streams: list[list[tuple[int, int]]], until: int) -> None:
    assert shown(streams, until) == [line for line in shown(streams) if line[0] <= until]

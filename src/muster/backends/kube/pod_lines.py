"""What is a line of a Pod's output? The time that the kubelet has put before it, and what an agent said in it.

An agent copies what its ranks write with their rank in front, and says itself which round they belong to; its own
lines are not shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

LONGEST = 1 << 20  # of a line: what has no end is cut

_TIME = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d) ")
_LONGEST_TIME = 40
_RANK = re.compile(rb"\[(\d{1,9})\] (.*)", re.DOTALL)
_ROUND = re.compile(rb"muster-node\[[^]]{0,300}\] round (\d{1,18}): ")


@dataclass(frozen=True)
class RankLine:
    round: int
    rank: int
    text: bytes
    time_ns: int = 0  # 0: nobody knows; never earlier than that of the line before it

    @property
    def place(self) -> tuple[int, int, int]:
        """Where it belongs among those of other Pods."""
        return self.round, self.time_ns, self.rank


class Reader:
    """Takes one Pod's output piece by piece; lines that were taken before are passed over."""

    def __init__(self) -> None:
        self._taken = 0
        self._round = -1
        self._last_ns = 0
        self.begin()

    def begin(self) -> None:
        """From the first line again."""
        self._at, self._rest = 0, b""
        self._timed = False  # the time of the line that has begun is read
        self._time_ns = 0

    def take(self, chunk: bytes) -> Iterator[RankLine]:
        for text in self._cut(chunk):
            self._at += 1
            if self._at <= self._taken:
                continue
            self._taken = self._at
            if (begun := _ROUND.match(text)) is not None:
                self._round = int(begun[1])
            elif (said := _RANK.fullmatch(text)) is not None:
                self._last_ns = max(self._last_ns, self._time_ns)
                yield RankLine(self._round, int(said[1]), said[2], self._last_ns)

    def finish(self) -> Iterator[RankLine]:
        """A line that was not finished."""
        return self.take(b"\n") if self._rest else iter(())

    def _cut(self, chunk: bytes) -> Iterator[bytes]:
        """Lines without their time, cut to the same pieces however they came, so that they can be counted."""
        *whole, self._rest = (self._rest + chunk).split(b"\n")
        for text in whole:
            text = self._without_time(text)
            yield from (text[at : at + LONGEST] for at in range(0, len(text) or 1, LONGEST))
            self._timed = False
        if len(self._rest) > _LONGEST_TIME:
            self._rest = self._without_time(self._rest)
        while len(self._rest) > LONGEST:
            yield self._rest[:LONGEST]
            self._rest = self._rest[LONGEST:]

    def _without_time(self, text: bytes) -> bytes:
        if self._timed:
            return text
        self._timed = True
        if (found := _TIME.match(text)) is None:
            return text
        self._time_ns = _nanoseconds(found)
        return text[found.end() :]


def _nanoseconds(found: re.Match[bytes]) -> int:
    """Since 1970; 0 for a time that cannot be."""
    zone = "+00:00" if found[3] == b"Z" else found[3].decode()
    try:
        seconds = datetime.fromisoformat(found[1].decode() + zone).astimezone(UTC).timestamp()
    except (ValueError, OverflowError):
        return 0
    return max(0, int(seconds) * 10**9 + int((found[2] or b"0").ljust(9, b"0")))

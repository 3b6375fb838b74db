"""Which lines of a log are shown? Those with some text, the last of them, and where a round begins."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

LINE_COSTS = 200  # bytes of memory that a line takes besides its text


class RoundMarkers:
    """Says where a round begins, once for each."""

    def __init__(self, wanted: bool, timestamps: bool = False) -> None:
        self._wanted = wanted
        self._timestamps = timestamps
        self._told = -1

    def before(self, number: int, lines: bytes = b"") -> bytes:
        """What stands before the next lines, which are of that round; with the time of the first if they have times."""
        if not self._wanted or number <= self._told:
            return b""
        self._told = number
        stamp = lines[: lines.find(b" ") + 1] if self._timestamps else b""
        return stamp + b"(muster: round %d)\n" % number


def matching(chunk: bytes, text: bytes, *, timestamps: bool = False) -> Iterator[bytes]:
    """The lines of a chunk of whole lines that have this text; it is in small letters, they may have large ones.

    The time before a line is not part of it.
    """
    if text in chunk.lower():  # most chunks have none: they are not taken apart
        for line in chunk.removesuffix(b"\n").split(b"\n"):
            if text in (line.partition(b" ")[2] if timestamps else line).lower():
                yield line + b"\n"


class Newest:
    """The last of many lines, so many and, with what each of them costs, so long at most."""

    def __init__(self, most: int, room: int) -> None:
        self.lines: deque[bytes] = deque()
        self._most = most
        self._room = room

    def take(self, lines: Iterable[bytes]) -> None:
        for line in lines:
            self.lines.append(line)
            self._room -= len(line) + LINE_COSTS
            while self.lines and (len(self.lines) > self._most or self._room < 0):
                self._room += len(self.lines.popleft()) + LINE_COSTS

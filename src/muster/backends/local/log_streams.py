"""One file of a rank as a stream: its next whole lines, and when they were written.

On a thread. A stream holds a bounded piece of its file and of the marks beside it, however long both are, and no file.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from muster import log_times, trimming
from muster.backends.local import log_files
from muster.backends.local.log_files import RankFile
from muster.log_times import Mark

CHUNK = 1 << 18
AHEAD = 1 << 22  # bytes that are read before they are due, of all files together
MARKS = 1 << 16  # that are held of all files together
FEWEST_MARKS = 16  # of one
MOST_NOTES = 128


@dataclass
class Position:
    """How far a reader is with a file."""

    offset: int = 0
    last_ns: int = 0  # when what was shown last was written
    notes: deque[Mark] = field(default_factory=lambda: deque(maxlen=MOST_NOTES))  # what the reader itself has seen
    looked: bool = False
    guessed: int = 0  # up to there nobody noted a time

    def look(self, file: RankFile, now_ns: int) -> None:
        """What has no mark is as old as the last write, as it was seen first."""
        if file.size > (self.notes[-1].size if self.notes else self.offset):
            before = self.notes[-1].time_ns if self.notes else self.last_ns
            self.notes.append(Mark(max(before, min(max(file.changed_ns, 0), now_ns)), file.size))


@dataclass(frozen=True)
class Reading:
    """What is asked of all streams of a look."""

    root: Path
    tag: bool  # with the rank before each line
    timestamps: bool
    over: bool  # a line that has no end gets none
    now_ns: int
    files: int = 1

    @property
    def ahead(self) -> int:
        return min(CHUNK, AHEAD // max(self.files, 1))

    @property
    def marks(self) -> int:
        return max(FEWEST_MARKS, MARKS // max(self.files, 1))


def guess(file: RankFile, now_ns: int) -> list[Mark]:
    return log_times.spread(file.begun_ns, min(max(file.changed_ns, 0), now_ns), file.size)


class Stream:
    def __init__(self, file: RankFile, end: int, position: Position, reading: Reading) -> None:
        self._file = file
        self._end = min(file.size, end)
        self._at = position
        self._reading = reading
        self._marks: deque[Mark] = deque()
        self._more = True  # marks beside the file that were not read yet
        self._past = 0  # up to there the next line has no end
        self._buffer, self._from = b"", 0

    def due(self) -> int | None:
        """When what comes next was written; None if nothing does."""
        if self._at.offset >= self._end:
            return None
        return max(self._at.last_ns, self._mark().time_ns)

    def take(self) -> bytes:
        """The next lines that were written at one time; nothing if the line goes on after that."""
        mark = self._mark()
        until = min(mark.size, self._end)
        try:
            gone = self._fill(min(until - self._at.offset, CHUNK))
        except OSError:
            self._end = 0
            return b""
        self._at.last_ns = max(self._at.last_ns, mark.time_ns)
        if gone:
            self._at.offset += gone
            return self._shown(b"(muster: %d bytes of older output were dropped)\n" % gone, mark)
        first = self._at.offset - self._from
        last = min(first + min(until - self._at.offset, CHUNK), len(self._buffer))
        cut = self._buffer.rfind(b"\n", max(first, self._past - self._from), last) + 1
        if not cut and last - first < CHUNK:  # one that is longer is cut
            if until < self._end and last - first == until - self._at.offset:
                self._past = until
                return b""
            if not self._reading.over or last == first:
                self._end = 0
                return b""
        lines = self._buffer[first : cut or last]
        self._at.offset += len(lines)
        if len(self._buffer) > self._reading.ahead:
            self._buffer = b""
        return self._shown(lines, mark)

    def _shown(self, lines: bytes, mark: Mark) -> bytes:
        stamp = b""
        if self._reading.timestamps:
            known = mark.size > self._at.guessed
            stamp = log_times.stamp(self._at.last_ns) if known else log_times.UNKNOWN
        before = stamp + (b"[%d] " % self._file.rank if self._reading.tag else b"")
        text = lines.removesuffix(b"\n")
        return before + (text.replace(b"\n", b"\n" + before) if before else text) + b"\n"

    def _fill(self, most: int) -> int:
        """Have so many of the next bytes; returns how many of them are gone for ever, if some are."""
        at = self._at.offset
        if self._from <= at and at + most <= self._from + len(self._buffer):
            return 0
        with log_files.reading(self._reading.root, self._file) as opened:
            begins, data = trimming.read(opened, min(max(most, self._reading.ahead), self._end - at), at)
            if begins > at:
                data = trimming.read(opened, min(CHUNK, self._end - begins), begins)[1] if begins < self._end else b""
                self._buffer = b""
                return (
                    min(begins + data.find(b"\n") + 1, self._end) - at
                )  # go on with the first whole line that is left
        self._from, self._buffer = at, data
        return 0

    def _mark(self) -> Mark:
        """The first that has more than what was shown. What was seen at this look is the last."""
        floor = max(self._at.offset, self._past)
        while True:
            while self._marks and self._marks[0].size <= floor:
                self._marks.popleft()
            if self._marks:
                return self._marks[0]
            if not self._more:
                break
            self._refill(floor)
        notes = self._at.notes
        while notes and notes[0].size <= floor:
            notes.popleft()
        return notes[0] if notes else Mark(self._at.last_ns, self._end)

    def _refill(self, floor: int) -> None:
        now_ns, most = self._reading.now_ns, self._reading.marks
        found: list[Mark] = []
        try:
            with log_files.reading_times(self._reading.root, self._file) as opened:
                found = log_times.after(opened, floor, most)
                none = not found and not log_times.before(opened, floor, 1)
        except OSError:
            none = True
        if none and not self._at.looked:
            self._at.notes.clear()
            self._at.notes.extend(guess(self._file, now_ns))
            self._at.guessed = self._file.size
        self._at.looked = True
        believed = log_times.believed(found, self._file.size, now_ns, Mark(self._at.last_ns, floor))
        self._marks.extend(believed)
        self._more = len(found) == most and bool(self._marks)

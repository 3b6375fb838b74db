"""Which are the last lines of several files together? Found from their ends, mark by mark, the newest first.

On a thread, in turns: nothing is read but the lines that are shown, and of no file more than a limit.
"""

from __future__ import annotations

import heapq
import os
from collections.abc import Sequence
from pathlib import Path

from muster import log_times
from muster.backends.local import log_files, log_streams
from muster.backends.local.log_files import RankFile
from muster.log_times import Mark

CHUNK = 1 << 18
MOST = 1 << 24  # bytes of a file
A_TURN = 1 << 20  # bytes that are looked at in one turn
A_LOOK = 1 << 12  # bytes that a look costs, whatever is found
TOGETHER = 16  # files whose ends are looked for in one turn


class Tail:
    """How many of its last lines each file shows, in order of files. Unless `whole`, one that still grows is none."""

    def __init__(self, root: Path, found: Sequence[RankFile], most: int, *, whole: bool, now_ns: int) -> None:
        self.counts = [0] * len(found)
        self._ends = [_End(root, file, whole, now_ns, len(found)) for file in found]
        self._left = most
        self._heap: list[tuple[int, int]] | None = None

    def turn(self) -> bool:
        """Go on; True if there is more to be done."""
        spent = 0
        if self._heap is None:
            self._heap = [(-due, -at) for at, end in enumerate(self._ends) if (due := end.due()) is not None]
            heapq.heapify(self._heap)
        while self._heap and self._left > 0:
            at = -self._heap[0][1]
            count, read = self._ends[at].take(self._left)
            self.counts[at] += count
            self._left -= count
            due = self._ends[at].due()
            heapq.heappop(self._heap) if due is None else heapq.heapreplace(self._heap, (-due, -at))
            spent += read + A_LOOK
            if spent > A_TURN:
                return True
        return False


class _End:
    """A file from its end: the last lines that were written at one time, then those before them."""

    def __init__(self, root: Path, file: RankFile, whole: bool, now_ns: int, files: int) -> None:
        self._root = root
        self._file = file
        self._now_ns = now_ns
        self._most_marks = max(log_streams.FEWEST_MARKS, log_streams.MARKS // files)
        self._mark = Mark(min(max(file.changed_ns, 0), now_ns), file.size)  # what is shown next is up to here
        self._before: list[Mark] = []  # marks before that, the last of them at the end
        self._more: bool | None = None  # whether there are still others; None: nobody has looked
        self._unfinished = whole
        self._end = file.size  # what was looked at begins here

    def due(self) -> int | None:
        if self._more is None:
            self._begin()
        return self._mark.time_ns if self._end > 0 and self._file.size - self._end < MOST else None

    def take(self, most: int) -> tuple[int, int]:
        """How many lines there are at that time, or as many as are wanted, and how much was read to find that out."""
        lower = self._next()
        lowest = max(lower.size, self._file.size - MOST)
        found, began = 0, self._end
        try:
            with log_files.reading(self._root, self._file) as opened:
                if self._unfinished and os.pread(opened, 1, self._end - 1) != b"\n":
                    found = 1
                self._unfinished = False
                while self._end > lowest and found < most:
                    step = min(CHUNK, self._end - lowest)
                    self._end -= step
                    found += os.pread(opened, step, self._end).count(b"\n")
        except OSError:
            self._end = 0
            return 0, 0
        self._mark = Mark(min(lower.time_ns, self._mark.time_ns), lower.size)
        return min(found, most), began - self._end

    def _begin(self) -> None:
        """What is behind the last mark is as old as the last write; if there is none, all is a guess."""
        self._refill(self._file.size)
        if not self._before:
            self._before = log_streams.guess(self._file, self._now_ns)
        while self._before and self._before[-1].size == self._file.size:
            if (mark := self._before.pop()).time_ns <= self._now_ns:
                self._mark = mark  # the first that has all of it

    def _next(self) -> Mark:
        """The mark before the one that is shown."""
        if not self._before and self._more:
            self._refill(self._end - 1)
        while self._before:
            mark = self._before.pop()
            following = self._before[-1].size if self._before else -1
            if following < mark.size < self._end and mark.time_ns <= self._now_ns:
                return mark
        return log_times.NONE

    def _refill(self, size: int) -> None:
        try:
            with log_files.reading_times(self._root, self._file) as opened:
                self._before = log_times.before(opened, size, self._most_marks)
        except OSError:
            self._before = []
        self._more = len(self._before) == self._most_marks


def begins(root: Path, shown: Sequence[tuple[RankFile, int]], whole: bool) -> list[int]:
    """Where the last lines of each begin."""
    return [_begin(root, file, count, whole) for file, count in shown]


def _begin(root: Path, file: RankFile, count: int, whole: bool) -> int:
    """Found backwards and within a limit. Unless `whole`, a line that still grows is none."""
    at = file.size
    try:
        with log_files.reading(root, file) as opened:
            left = count + 1  # the newline before the first of them
            if whole and at and os.pread(opened, 1, at - 1) != b"\n":
                left -= 1  # the last line has none
            if not left:
                return at
            while at > 0 and file.size - at < MOST:
                step = min(CHUNK, at)
                data = os.pread(opened, step, at - step)
                newlines = data.count(b"\n")
                if newlines < left:
                    left -= newlines
                    at -= step
                    continue
                place = len(data)
                for _ in range(left):
                    place = data.rfind(b"\n", 0, place)
                return at - step + place + 1
    except OSError:
        return file.size
    return at

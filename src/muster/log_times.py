"""When was a line written, in a file that somebody else appends to? Marks beside the file tell.

A mark is a time of day and how long the file was then. A line is as old as the first mark that has all of it. Whoever
writes the file does not know of them, and nobody waits for them: they may be missing, and lines are then as old as the
last write to the file. Ranks can write where marks are: what cannot be one is passed over, and every look is bounded.
Standard library only.
"""

from __future__ import annotations

import contextlib
import functools
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from typing import NamedTuple

from muster import files, trimming

MOST = 1 << 15  # marks beside one file, which take half a megabyte
UNKNOWN = b"- "  # in the place of a time
_MARK = struct.Struct("<QQ")


class Mark(NamedTuple):
    time_ns: int  # since 1970
    size: int


NONE = Mark(0, 0)


def beside(path: str) -> str:
    """The file that has the marks of another."""
    return path + trimming.TIMES


def stamp(time_ns: int) -> bytes:
    """As it stands before a line: RFC 3339, UTC, with milliseconds."""
    seconds, rest = divmod(time_ns, 10**9)
    return b"%s.%03dZ " % (_second(seconds), rest // 10**6)


@functools.lru_cache(maxsize=64)  # many lines have the same one
def _second(seconds: int) -> bytes:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S").encode()


def believed(found: Iterable[Mark], end: int, now_ns: int, after: Mark = NONE) -> Iterator[Mark]:
    """Those that can be true of a file of that length, after one that is."""
    for mark in found:
        if after.size < mark.size <= end and after.time_ns <= mark.time_ns <= now_ns:
            after = mark
            yield mark


def spread(begun_ns: int, ended_ns: int, size: int, pieces: int = 64) -> list[Mark]:
    """What marks would be if nobody made any: as if all had been written evenly."""
    begun_ns = min(max(begun_ns, 0), ended_ns)
    ends = sorted({size * number // pieces for number in range(1, pieces + 1)} - {0})
    return [Mark(begun_ns + (ended_ns - begun_ns) * end // size, end) for end in ends]


def thinned(marks: Sequence[Mark], begins: int) -> list[Mark]:
    """So few that there is room for many more: the newer half as it is, of those before it some, evenly in time.

    None is needed of what was cut off: what is left of the file begins at `begins`.
    """
    kept = [mark for mark in marks if mark.size > begins]
    old, new = kept[: -MOST // 2], kept[-MOST // 2 :]
    if not old:
        return new
    apart = (old[-1].time_ns - old[0].time_ns) // (MOST // 8) + 1
    pairs = zip(old, [*old[1:], new[0]], strict=True)
    return [mark for mark, following in pairs if mark.time_ns // apart != following.time_ns // apart] + new


# Files --------------------------------------------------------------------------------------------


def after(opened: int, size: int, most: int) -> list[Mark]:
    """The next marks that are beyond that size, as they stand there."""
    index = _first_beyond(opened, size)
    return _some(opened, index, min(most, _count(opened) - index))


def before(opened: int, size: int, most: int) -> list[Mark]:
    """The last marks that are not beyond that size, as they stand there."""
    end = _first_beyond(opened, size)
    return _some(opened, max(0, end - most), min(end, most))


def _some(opened: int, index: int, most: int) -> list[Mark]:
    data = os.pread(opened, most * _MARK.size, index * _MARK.size)
    return [Mark(*found) for found in _MARK.iter_unpack(data[: len(data) // _MARK.size * _MARK.size])]


def _count(opened: int) -> int:
    """How many marks there are; none where there are more than we ever leave."""
    count = os.fstat(opened).st_size // _MARK.size
    return count if count <= 2 * MOST else 0


def _first_beyond(opened: int, size: int) -> int:
    """Sizes ascend if it is ours; if not, some place in it."""
    low, high = 0, _count(opened)
    while low < high:
        middle = (low + high) // 2
        found = _some(opened, middle, 1)
        if found and found[0].size <= size:  # what was given back to the disk reads as zeros
            low = middle + 1
        else:
            high = middle
    return low


def note(path: str, mark: Mark, begins: int = 0) -> None:
    """Write down a mark of that file; OSError if it cannot be. There is one who does that for a file."""
    name = beside(path)
    with files.appending(name):
        pass  # there is one now
    with files.changing(name) as opened:
        count = os.fstat(opened).st_size // _MARK.size  # a part of one, from a disk that was full, is written over
        if count < MOST:
            os.pwrite(opened, _MARK.pack(*mark), count * _MARK.size)
            return
        kept = thinned([*believed(_some(opened, 0, MOST), mark.size, mark.time_ns), mark], begins)
    _replace(name, b"".join(_MARK.pack(*one) for one in kept))


def _replace(name: str, data: bytes) -> None:
    draft = f"{name}.new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(draft)
    opened = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    try:
        os.write(opened, data)
    finally:
        os.close(opened)
    os.replace(draft, name)

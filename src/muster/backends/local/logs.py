"""What ranks wrote: files of all workers, in order of rounds and ranks, as they are or as they grow.

Ranks own these folders and may put anything there, of any size: no link is followed, only regular files are read, and
every look and every piece is bounded. All of it happens on a few threads, which readers take in turn: the event loop
keeps workers alive and never waits for a disk. A reader holds one piece and no file; one that leaves, leaves nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from muster import files, trimming
from muster.ports import LogQuery

LOOK_S = 0.05  # how often a followed file is looked at: what writes it does not tell us
RESTS = 10  # times as long as a look takes, so that one over many files does not become all that there is
LONGEST_REST_S = 2.0
CHUNK = 1 << 18
MOST_TAIL = 1 << 24
MOST_ENTRIES = 100_000  # of folders, in one look
AT_ONCE = 4

T = TypeVar("T")

_threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="logs")


@dataclass(frozen=True, order=True)
class _Round:
    number: int
    worker: str
    folder: str


@dataclass(frozen=True, order=True)
class _File:
    rank: int
    error: bool
    round: _Round
    name: str
    size: int

    @property
    def place(self) -> tuple[str, str, str]:
        return self.round.worker, self.round.folder, self.name


async def _aside(work: Callable[..., T], *args: object) -> T:
    """On a thread, after those who asked before. Whoever leaves while it waits is not served any more."""
    return await asyncio.get_running_loop().run_in_executor(_threads, work, *args)


async def read(root: Path, query: LogQuery, ended: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
    """Whole lines. With several ranks each has its rank in front."""
    loop = asyncio.get_running_loop()
    reader = _FileReader(root, query)
    if query.tail is not None:
        await reader.pass_over(query.tail, whole=not query.follow or ended())
    while True:
        over, began = not query.follow or ended(), loop.time()
        rounds = await reader.rounds()
        spent = loop.time() - began
        last = rounds[-1][0] if rounds else 0
        for number, folders in rounds:
            for file in await _aside(_files, root, folders, query.rank):
                # Ranks of a round are gone before there is another: an unfinished line stays as it is.
                while chunk := await reader.next(file, over=over or number < last):
                    yield chunk
            if over:
                reader.leave_behind(number + 1)
        if over:
            return
        reader.leave_behind(last - 1)
        await asyncio.sleep(min(max(LOOK_S, spent * RESTS), LONGEST_REST_S))


class _FileReader:
    """How far one reader is."""

    def __init__(self, root: Path, query: LogQuery) -> None:
        self._root = root
        self._query = query
        self._offsets: dict[tuple[str, str, str], int] = {}
        self._ends: dict[tuple[str, str, str], int] = {}  # where they differ from that of the file
        self._floor = 0  # rounds before it are read, or passed over

    async def rounds(self) -> list[tuple[int, list[_Round]]]:
        found = await _aside(_rounds, self._root, self._query.round)
        wanted = (one for one in found if one.number >= self._floor)
        return [(number, list(folders)) for number, folders in itertools.groupby(wanted, lambda one: one.number)]

    async def next(self, file: _File, *, over: bool) -> bytes:
        """The next whole lines of a file; at the very end also a line that is not finished."""
        at = self._offsets.get(file.place, 0)
        end = min(file.size, self._ends.get(file.place, file.size))  # what grows as fast as it is read has no other end
        if at >= end:
            return b""
        taken, shown = await _aside(_piece, self._root, file, at, end, over, self._query.rank is None)
        self._offsets[file.place] = at + taken
        return shown

    async def pass_over(self, count: int, *, whole: bool) -> None:
        """Begin with the last lines of each rank's files of the last round; older rounds are passed over."""
        for number, folders in reversed(await self.rounds()):
            if found := await _aside(_files, self._root, folders, self._query.rank):
                self._floor = number
                for file in found:
                    self._offsets[file.place] = await _aside(_tail, self._root, file, count, whole)
                    if not self._query.follow:
                        self._ends[file.place] = file.size
                return

    def leave_behind(self, floor: int) -> None:
        if floor > self._floor:
            self._floor = floor
            self._offsets = {
                place: at for place, at in self._offsets.items() if int(place[1].removeprefix("round-")) >= floor
            }


# On a thread --------------------------------------------------------------------------------------


def last_words(root: Path, worker: str, most: int) -> bytes:
    """The end of what a worker's agent wrote."""
    try:
        with files.folder(root) as top, files.folder(worker, top) as own, files.reading("worker.log", own) as opened:
            return os.pread(opened, most, max(0, os.fstat(opened).st_size - most))
    except OSError:
        return b""


def cut(root: Path, keep: int) -> None:
    """Keep only the newest of what each rank wrote, and of what each agent said. OSError where that cannot be done."""
    budget = trimming.Budget(keep)
    for one in reversed(_rounds(root, None)):
        with _if_there(), _round_folder(root, one) as opened:
            budget.spend(opened)
    with _if_there(), files.folder(root) as top:
        for worker in _names(top, MOST_ENTRIES):
            with _if_there(), files.folder(worker, top) as own:
                trimming.cut_in(own, "worker.log", keep)


@contextmanager
def _if_there() -> Iterator[None]:
    """Ranks own these folders: what is gone, or is something else, is passed over."""
    try:
        yield
    except OSError as error:
        if error.errno in trimming.UNABLE:
            raise


def _rounds(root: Path, number: int | None) -> list[_Round]:
    found: list[_Round] = []
    left = MOST_ENTRIES
    try:
        with files.folder(root) as top:
            for worker in _names(top, left):
                left -= 1
                for name in _names_in(worker, top, left):
                    left -= 1
                    named = trimming.ROUND_FOLDER.fullmatch(name)
                    if named is not None and number in (None, int(named[1])):
                        found.append(_Round(int(named[1]), worker, name))
    except OSError:
        return []
    return sorted(found)


def _names(opened: int, most: int) -> list[str]:
    with os.scandir(opened) as entries:
        return [entry.name for entry in itertools.islice(entries, max(most, 0))]


def _names_in(name: str, within: int, most: int) -> list[str]:
    try:
        with files.folder(name, within) as opened:
            return _names(opened, most)
    except OSError:
        return []


def _files(root: Path, folders: list[_Round], rank: int | None) -> list[_File]:
    """Those of one round, in order of ranks."""
    found: list[_File] = []
    left = MOST_ENTRIES
    for one in folders:
        try:
            with _round_folder(root, one) as last:
                for name in _names(last, left):
                    left -= 1
                    found += _file(last, one, name, rank)
        except OSError:
            continue
    return sorted(found)


def _file(opened: int, where: _Round, name: str, rank: int | None) -> Iterator[_File]:
    named = trimming.RANK_FILE.fullmatch(name)
    if named is None or rank not in (None, int(named[1])):
        return
    try:
        known = os.stat(name, dir_fd=opened, follow_symlinks=False)
    except OSError:
        return
    if files.is_plain(known):
        yield _File(int(named[1]), named[2] == "err", where, name, known.st_size)


@contextmanager
def _round_folder(root: Path, which: _Round) -> Iterator[int]:
    with files.folder(root) as top, files.folder(which.worker, top) as own, files.folder(which.folder, own) as opened:
        yield opened


@contextmanager
def _opened(root: Path, file: _File) -> Iterator[int]:
    with _round_folder(root, file.round) as folder, files.reading(file.name, folder) as opened:
        yield opened


def _piece(root: Path, file: _File, at: int, end: int, over: bool, tag: bool) -> tuple[int, bytes]:
    """How much was taken from that place on, and the lines to show for it. One that is longer than a piece is cut."""
    try:
        with _opened(root, file) as opened:
            begins, data = trimming.read(opened, min(CHUNK, end - at), at)
    except OSError:
        return 0, b""
    mark = b"[%d] " % file.rank if tag else b""
    if begins > at:  # go on with the first whole line that is left
        gone = min(begins + data.find(b"\n") + 1, end) - at
        return gone, mark + b"(muster: %d bytes of older output were dropped)\n" % gone
    cut = data.rfind(b"\n") + 1
    if not data or (cut == 0 and not over and len(data) < CHUNK):
        return 0, b""
    whole = data[:cut] or data
    shown = whole.removesuffix(b"\n").replace(b"\n", b"\n" + mark) if tag else whole.removesuffix(b"\n")
    return len(whole), mark + shown + b"\n"


def _tail(root: Path, file: _File, count: int, whole: bool) -> int:
    """Where the last lines begin, found backwards and within a limit. Unless `whole`, one that still grows is none."""
    at = file.size
    try:
        with _opened(root, file) as opened:
            left = count + 1  # the newline before the first of them
            if whole and at and os.pread(opened, 1, at - 1) != b"\n":
                left -= 1  # the last line has none
            if not left:
                return at
            while at > 0 and file.size - at < MOST_TAIL:
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

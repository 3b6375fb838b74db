"""Which files of ranks are there? Found and opened with care: ranks own these folders and may put anything there.

No link is followed, only regular files are read, and every look is bounded. All of it is done on threads.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from muster import files, log_times, trimming

MOST_ENTRIES = 100_000  # of folders, in one look


@dataclass(frozen=True, order=True)
class RoundFolder:
    number: int
    worker: str
    folder: str


@dataclass(frozen=True, order=True)
class RankFile:
    rank: int
    error: bool
    round: RoundFolder
    name: str
    size: int
    changed_ns: int = field(compare=False)  # when it was last written to
    begun_ns: int = field(compare=False)  # when nothing was written yet: a round's files are made when it begins

    @property
    def place(self) -> tuple[str, str, str]:
        return self.round.worker, self.round.folder, self.name


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
    for one in reversed(rounds(root, None)):
        with _if_there(), round_folder(root, one) as opened:
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


def rounds(root: Path, number: int | None) -> list[RoundFolder]:
    found: list[RoundFolder] = []
    left = MOST_ENTRIES
    try:
        with files.folder(root) as top:
            for worker in _names(top, left):
                left -= 1
                for name in _names_in(worker, top, left):
                    left -= 1
                    named = trimming.ROUND_FOLDER.fullmatch(name)
                    if named is not None and number in (None, int(named[1])):
                        found.append(RoundFolder(int(named[1]), worker, name))
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


def of_round(root: Path, folders: list[RoundFolder], rank: int | None) -> list[RankFile]:
    """Those of one round, in order of ranks."""
    found: list[RankFile] = []
    left = MOST_ENTRIES
    for one in folders:
        try:
            with round_folder(root, one) as last:
                for name in _names(last, left):
                    left -= 1
                    found += _file(last, one, name, rank)
        except OSError:
            continue
    return sorted(found)


def _file(opened: int, where: RoundFolder, name: str, rank: int | None) -> Iterator[RankFile]:
    named = trimming.RANK_FILE.fullmatch(name)
    if named is None or rank not in (None, int(named[1])):
        return
    try:
        known = os.stat(name, dir_fd=opened, follow_symlinks=False)
    except OSError:
        return
    if files.is_plain(known):
        times = known.st_mtime_ns, os.fstat(opened).st_mtime_ns
        yield RankFile(int(named[1]), named[2] == "err", where, name, known.st_size, *times)


@contextmanager
def round_folder(root: Path, which: RoundFolder) -> Iterator[int]:
    with files.folder(root) as top, files.folder(which.worker, top) as own, files.folder(which.folder, own) as opened:
        yield opened


@contextmanager
def reading(root: Path, file: RankFile) -> Iterator[int]:
    with round_folder(root, file.round) as folder, files.reading(file.name, folder) as opened:
        yield opened


@contextmanager
def reading_times(root: Path, file: RankFile) -> Iterator[int]:
    """Its marks, which there may not be."""
    with round_folder(root, file.round) as folder, files.reading(log_times.beside(file.name), folder) as opened:
        yield opened

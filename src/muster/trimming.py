"""How does a file that somebody else appends to stay small? Its beginning is given back to the disk.

The blocks of the beginning are taken out of the file and nothing else changes: its length stays, and so does every
place in it. Whoever writes at its end notices nothing, and whoever reads it goes on where he was; only what is gone
reads as zeros, and `begin` tells how far that goes. Not all file systems can do it (NFS before 4.2 cannot). Standard
library only.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import re
from collections.abc import Iterable
from pathlib import Path

from muster import files

LEAST = 1 << 16  # below that a limit makes no sense: last words are looked for in what is left
USUAL = 1 << 30
BLOCK = 4096
MOST_FILES = 100_000  # of a folder, in one look
SLACK = 4  # a file may grow beyond its limit by one part in so many before it is cut back to it
ROUND_FOLDER = re.compile(r"round-([0-9]{1,18})")
RANK_FILE = re.compile(r"rank-([0-9]{1,9})\.(out|err)")
TIMES = ".times"  # behind the name of a file: when its lines were written
TIMES_SHARE, MOST_TIMES = 8, 1 << 20  # they take one part in so many of what their file may, and no more than that
_SECTOR = 512  # what st_blocks counts
_KEEP_SIZE, _PUNCH_HOLE = 0x1, 0x2
UNABLE = (errno.EOPNOTSUPP, errno.ENOSYS)

_libc = ctypes.CDLL(None, use_errno=True)
_units = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_units |= {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def read_limit(text: str) -> int:
    """A number of bytes, like 500M or 1Gi; 0 for none. ValueError says what is wrong."""
    found = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)(Ki|Mi|Gi|Ti|k|M|G|T)?", text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a size like 500M or 1Gi")
    size = int(float(found[1]) * _units[found[2] or ""])
    if 0 < size < LEAST:
        raise ValueError(f"{text!r} is less than 64Ki: is its unit missing?")
    return size


def on_disk(found: os.stat_result) -> int:
    """What a file takes, which is less than its length once its beginning is gone."""
    return found.st_blocks * _SECTOR


def taken(root: Path) -> int:
    """What all below a folder takes on the disk, as far as one look goes."""
    total, left = 0, MOST_FILES
    with contextlib.suppress(OSError):  # there may be nothing, or no more
        for _, folders, names, opened in os.fwalk(root, follow_symlinks=False):
            for name in itertools.islice(names, left):
                with contextlib.suppress(OSError):
                    total += on_disk(os.stat(name, dir_fd=opened, follow_symlinks=False))
            left -= len(names) + len(folders)
            if left <= 0:
                break
    return total


def show(size: int) -> str:
    """A number of bytes as a person would say it."""
    for unit, step in (("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if size >= 1 << step:
            return f"{size / (1 << step):.1f} {unit}"
    return f"{size} bytes"


def begin(opened: int) -> int:
    """Where what is left of a file begins: 0 unless its beginning was given back."""
    try:
        return os.lseek(opened, 0, os.SEEK_DATA)
    except OSError as error:
        return os.fstat(opened).st_size if error.errno == errno.ENXIO else 0


def read(opened: int, most: int, at: int) -> tuple[int, bytes]:
    """What is there from that place on, or from where what is left begins, and that place."""
    while True:
        data = os.pread(opened, most, at)
        left = begin(opened)  # asked after it was read: what is given back meanwhile reads as zeros
        if left <= at:
            return at, data
        at = left


def cut(opened: int, keep: int) -> int:
    """Give back all but the last bytes of a file; returns how many those were. OSError where that cannot be done."""
    found, left = os.fstat(opened), begin(opened)
    block = max(BLOCK, found.st_blksize)  # only whole ones are given back
    end = (found.st_size - keep) // block * block if keep else -(-found.st_size // block) * block
    if end <= left:
        return 0
    offset, length = ctypes.c_int64(0), ctypes.c_int64(end)
    if _libc.fallocate(opened, _PUNCH_HOLE | _KEEP_SIZE, offset, length) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return end - left


def cut_in(folder: int, name: str, keep: int) -> int:
    """The same, if that file has become larger than it may be; returns what it takes after that.

    What is no regular file is left alone.
    """
    try:
        taken = on_disk(os.stat(name, dir_fd=folder, follow_symlinks=False))
        if taken <= keep + keep // SLACK:
            return taken
        with files.changing(name, folder) as opened:
            cut(opened, keep)
            return on_disk(os.fstat(opened))
    except OSError as error:
        if error.errno in UNABLE:
            raise
        return 0


class Budget:
    """What may be kept of each rank's output: the newest of all its rounds together."""

    def __init__(self, keep: int) -> None:
        self._keep = keep
        self._left: dict[str, int] = {}

    def spend(self, folder: int, ranks: Iterable[int] | None = None) -> None:
        """Cut one round's files, or those of some ranks; rounds come newest first. OSError where they cannot be."""
        for name in _all_in(folder) if ranks is None else _files_of(ranks):
            self._cut(folder, name, self._keep)
            self._cut(folder, name + TIMES, min(self._keep // TIMES_SHARE, MOST_TIMES))

    def _cut(self, folder: int, name: str, keep: int) -> None:
        left = self._left.get(name, keep)
        self._left[name] = max(0, left - cut_in(folder, name, left))


def _all_in(folder: int) -> list[str]:
    with os.scandir(folder) as entries:
        return [entry.name for entry in itertools.islice(entries, MOST_FILES) if RANK_FILE.fullmatch(entry.name)]


def _files_of(ranks: Iterable[int]) -> list[str]:
    return [f"rank-{rank}.{kind}" for rank in ranks for kind in ("out", "err")]


def cut_ranks(log_dir: Path, keep: int, number: int, ranks: Iterable[int]) -> None:
    """Cut what these ranks of one round print, whatever else lies there. OSError where that cannot be done."""
    with contextlib.suppress(FileNotFoundError), files.folder(log_dir / f"round-{number}") as opened:
        Budget(keep).spend(opened, ranks)


def cut_rounds(log_dir: Path, keep: int) -> None:
    """Cut what lies in all LOG_DIR/round-N. OSError where that cannot be done."""
    budget = Budget(keep)
    with files.folder(log_dir) as top:
        with os.scandir(top) as entries:
            found = [ROUND_FOLDER.fullmatch(entry.name) for entry in itertools.islice(entries, MOST_FILES)]
        for number in sorted((int(one[1]) for one in found if one is not None), reverse=True):
            try:
                with files.folder(f"round-{number}", top) as opened:
                    budget.spend(opened)
            except OSError as error:
                if error.errno in UNABLE:
                    raise

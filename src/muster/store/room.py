"""Is there room on the disk, and how is some kept for what must be written when there is none?

A full disk must not keep anybody from ending a training, or from being told why one does not go on. So the database
and its WAL own some blocks beyond their ends, which nobody else can take. For the time in which no control plane runs,
and for the small files of its start, there is a file that is given up at the start and made again later.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from dataclasses import dataclass
from pathlib import Path

IN_WAL = 4 << 20  # SQLite begins a WAL anew at that length
IN_DATABASE = 1 << 20
IN_RESERVE = 1 << 20
LOW = 1 << 20  # with less than that a disk counts as full
_LEAST_FILES = 16
_PART, _LOW_PART = 16, 64  # of a small disk, no more than these parts
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Space:
    """What is left of a disk for this user."""

    free: int
    total: int
    files: int | None = None  # that can still be made; None where nobody counts them

    def is_low(self, *, was_low: bool = False) -> bool:
        """Once low, it takes twice as much until it is not."""
        least = min(LOW, self.total // _LOW_PART) * (2 if was_low else 1)
        return self.free < least or (self.files is not None and self.files < _LEAST_FILES)

    def part(self, most: int) -> int:
        return min(most, self.total // _PART)

    def __str__(self) -> str:
        if self.files is not None and self.files < _LEAST_FILES:
            return f"{self.files} more files can be made"
        return f"{self.free // 1024} kB of {self.total // 1024} kB are free"


def space(path: Path) -> Space:
    found = os.statvfs(path)
    total, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    least = min(LOW, total // _LOW_PART)
    if free < least and os.geteuid() == 0 and found.f_bfree > found.f_bavail and _can_have(path, least):
        free = found.f_bfree * found.f_frsize  # what is set aside for root; some of it not even root can have
    return Space(free, total, found.f_ffree if found.f_files else None)


def _can_have(path: Path, size: int) -> bool:
    """Whether a file there can have that size. It has no name, and is gone with its descriptor."""
    try:
        file = os.open(path, os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    except OSError:
        return False
    try:
        os.posix_fallocate(file, 0, size)
    except OSError:
        return False
    finally:
        os.close(file)
    return True


def own(file: int, upto: int, free: int) -> None:
    """Let a file have its blocks up to there, or what there is, without becoming longer; if its disk can do that."""
    have = os.fstat(file).st_blocks * 512
    if upto > have:
        _libc.fallocate(file, _KEEP_SIZE, ctypes.c_int64(0), ctypes.c_int64(min(upto, have + free)))


def give_up(reserve: Path) -> None:
    with contextlib.suppress(OSError):
        reserve.unlink()


def make(reserve: Path) -> None:
    """Unless it is there, or there is no room for it."""
    left = space(reserve.parent)
    size = left.part(IN_RESERVE)
    if reserve.exists() or left.free < 4 * size or left.is_low(was_low=True):
        return
    with contextlib.suppress(OSError):
        file = os.open(reserve, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(file, 0, size)
        except OSError:
            reserve.unlink()
        finally:
            os.close(file)

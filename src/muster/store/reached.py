"""How far had the database got? A count beside it, so that a write that disappears from it is noticed.

SQLite passes over everything behind a damaged place of its WAL without a word, and a file that is gone says nothing
either. So every transaction counts itself in the database, and once it is committed, here: what is here can be older
than the database and never newer, unless the database has lost something. Nothing is forced to the disk for it. A
transaction that was not forced there either may be lost with the machine; therefore two counts, and the boot.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

from muster.files import read_text

_LENGTH = 80


@dataclass(frozen=True)
class Count:
    written: int = 0  # outlives the process
    forced: int = 0  # outlives the machine
    boot: str = ""

    def certain(self, boot: str) -> int:
        """The transactions that must be in the database."""
        return self.written if boot and boot == self.boot else self.forced


class Reached:
    """The file, open for whoever writes the database."""

    def __init__(self, path: Path, boot: str) -> None:
        self._boot = boot
        self._forced = read(path).forced
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def begin(self, commits: int) -> None:
        """So many are there now: whoever opened the database has accepted it as it is."""
        self._forced = min(self._forced, commits)
        self.note(commits, forced=False)

    def note(self, commits: int, *, forced: bool) -> None:
        self._forced = commits if forced else self._forced
        line = f"{commits:020d} {self._forced:020d} {self._boot:36}"
        with contextlib.suppress(OSError):  # a count that lags behind is no harm
            os.pwrite(self._file, f"{line:<{_LENGTH - 1}}\n".encode(), 0)

    def close(self) -> None:
        os.close(self._file)


def read(path: Path) -> Count:
    """What a control plane before this one has counted; nothing if there is no such file, or it cannot be read."""
    try:
        written, forced, *boot = read_text(path).split()
        return Count(int(written), int(forced), boot[0] if boot else "")
    except (OSError, ValueError):
        return Count()

"""A program that dies at each SQL statement in turn: one child per statement, each with a file of its own.

The n-th child kills itself as its n-th statement begins. It opens `DIRECTORY/n.db`, makes the writes that a
`writer` makes, and says each acknowledged count as a line `n count`. The first child that lives through all of it
is the last.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import sqlite3
import sys
from pathlib import Path

from muster.store.sqlite import SqliteStore
from tests.store.writer import KEEP_CHANGES, a_write

MOST_STATEMENTS = 500


class Doomed:
    """Counts statements of every connection, and ends the process at one of them."""

    def __init__(self, left: int) -> None:
        self.left = left

    def hear(self, statement: str) -> None:
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1

    def connect(self, path: Path, *, isolation_level: None, check_same_thread: bool, timeout: float) -> object:
        made = _connect(path, isolation_level=isolation_level, check_same_thread=check_same_thread, timeout=timeout)
        made.set_trace_callback(self.hear)
        return made


_connect = functools.partial(sqlite3.connect)


async def write_all(path: Path, step: int) -> None:
    store = SqliteStore.open(path, keep_changes=KEEP_CHANGES)
    for n in range(1, 6):  # the fourth deletes
        await store.write(a_write("w0", n))
        os.write(1, f"{step} {n}\n".encode())
    await store.close()


def main(directory: Path) -> None:
    for step in range(MOST_STATEMENTS):
        child = os.fork()
        if child == 0:
            sqlite3.connect = Doomed(step).connect  # type: ignore[assignment]
            asyncio.run(write_all(directory / f"{step}.db", step))
            os._exit(0)
        if os.waitpid(child, 0)[1] == 0:
            return
    sys.exit("there was no end of statements")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Is anything of a worker left? The kernel tells.

A worker holds one end of a pipe that has a name. Its agent, guard, warm parent and ranks inherit that end, and whatever
they fork; none of ours closes it. When the last of them is gone, however it ended, the other end says so. A control
plane that comes after us finds the pipe by its name.

Where it stops: a program that a rank starts with its descriptors closed, and a rank that closes all of its own, do not
hold it. Such a rank still dies with its parent. A pipe that cannot be made or found proves nothing.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from muster.types.training import Uid

log = logging.getLogger("muster.local")


class Presence:
    """The pipes of all workers; `nobody_left(uid, name)` is called once for each of which nothing is left."""

    def __init__(self, folder: Path, nobody_left: Callable[[Uid, str], None]) -> None:
        self._folder = folder
        self._nobody_left = nobody_left
        self._ends: dict[tuple[Uid, str], int] = {}

    def begin(self, uid: Uid, name: str) -> int | None:
        """The end for a worker that is about to start; None if there can be none, and only its lease will tell."""
        path = self._folder / uid / name
        ends = []
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.unlink(missing_ok=True)
            os.mkfifo(path, 0o600)
            ends.append(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
            self._watch(uid, name)
        except OSError as error:
            log.warning("%s: that nothing of it is left will be known by its lease only: %s", name, error)
            for end in ends:
                os.close(end)
            return None
        return ends[0]

    def find(self, uid: Uid, name: str) -> bool:
        """True if nothing is left of a worker that a control plane before us started; else it is watched."""
        try:
            self._watch(uid, name)
        except OSError as error:
            return error.errno == errno.ENXIO  # it is there, and nobody holds it
        return False

    def _watch(self, uid: Uid, name: str) -> None:
        # The end that is written to: nothing that a worker does with its own can reach us through it.
        end = os.open(self._folder / uid / name, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        self._ends[(uid, name)] = end
        asyncio.get_running_loop().add_reader(end, self._ended, uid, name)

    def _ended(self, uid: Uid, name: str) -> None:
        self._let_go(uid, name)
        self._nobody_left(uid, name)

    def _let_go(self, uid: Uid, name: str) -> None:
        end = self._ends.pop((uid, name))
        asyncio.get_running_loop().remove_reader(end)
        os.close(end)

    def forget(self, uid: Uid) -> None:
        for of, name in [key for key in self._ends if key[0] == uid]:
            self._let_go(of, name)
        shutil.rmtree(self._folder / uid, ignore_errors=True)

    def close(self) -> None:
        for uid, name in list(self._ends):
            self._let_go(uid, name)

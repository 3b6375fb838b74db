"""Which modules did a rank import by itself? It notes their names as it looks for them, and its agent reads them.

The first entry of a rank's `sys.meta_path` finds nothing and writes down what was asked for: into mapped memory, so
that a rank that is killed leaves its notes, too. What is read was written by a user's process: it is bounded, and
whatever is no name is dropped.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from muster import files
from muster.node import system
from muster.types.modules import MAX_BYTES, is_ours, joined


class Notes:
    """A finder that finds nothing."""

    def __init__(self, path: str) -> None:
        self._room = system.map_shared(path, MAX_BYTES)
        self._at = 0
        self._noted: set[str] = set()
        self._pid = os.getpid()  # what a rank forks has its own imports

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name in self._noted or os.getpid() != self._pid or is_ours(name):
            return
        self._noted.add(name)
        line = name.encode(errors="replace") + b"\n"
        end = self._at + len(line)
        if end <= len(self._room):
            self._room[self._at : end], self._at = line, end


def take_notes(path: str) -> None:
    """In a rank, before its program runs."""
    try:
        sys.meta_path.insert(0, Notes(path))
    except OSError:
        return


def create(path: str) -> None:
    with open(path, "wb") as file:
        file.truncate(MAX_BYTES)


def read(path: str) -> tuple[str, ...]:
    try:
        told = files.read_bytes(path, MAX_BYTES)
    except OSError:
        return ()
    return joined(told.partition(b"\0")[0].decode(errors="replace").split("\n")[:-1])

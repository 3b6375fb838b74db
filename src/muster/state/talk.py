"""What do a rank and its agent agree upon to speak about state? Standard library only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

SOCKET_VARIABLE = "MUSTER_STATE_SOCKET"
MOST_MESSAGE = 1 << 16
MOST_PARTS = 64  # descriptors in one message
_MOST_NAME = 100  # bytes that the name of a socket may have, about


@contextmanager
def short(path: str) -> Iterator[str]:
    """The same file under a name that is short enough for a socket, wherever temporary files are kept."""
    if len(os.fsencode(path)) < _MOST_NAME:
        yield path
        return
    folder, name = os.path.split(path)
    opened = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{opened}/{name}"
    finally:
        os.close(opened)

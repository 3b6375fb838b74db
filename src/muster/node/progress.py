"""`muster.progress(step)`: a rank tells how far it is.

The agent gives each rank a small file; a step is two numbers written into its mapped memory, so a call costs no
system call and cannot block. Without an agent it does nothing.
"""

from __future__ import annotations

import mmap
import os
import struct
import time

from muster import files
from muster.node.fencing import check_lease

FILE_VARIABLE = "MUSTER_PROGRESS_FILE"
_MARK = struct.Struct("<qd")  # step, time.monotonic() of the host
_FIRST, _FIRST_OFFSET = struct.Struct("<qd"), 56  # the first step, and when it was made
_NONE = -(1 << 63)
FILE_SIZE = 72  # `node.word` has what is between

_memory: mmap.mmap | None = None
_memory_of: str | None = None


def progress(step: int) -> None:
    """Report that this rank has reached `step`. Cheap enough for every iteration."""
    global _memory, _memory_of
    check_lease()
    path = os.environ.get(FILE_VARIABLE)
    if not path:
        return
    if path != _memory_of:
        _memory, _memory_of = _map(path), path
        if _memory is not None and len(_memory) == FILE_SIZE and _FIRST.unpack_from(_memory, _FIRST_OFFSET)[0] == _NONE:
            _FIRST.pack_into(_memory, _FIRST_OFFSET, int(step), time.monotonic())
    if _memory is not None:
        _MARK.pack_into(_memory, 0, int(step), time.monotonic())


def last() -> int | None:
    """The step that this rank has reported last."""
    if _memory is None:
        return None
    step, at = _MARK.unpack_from(_memory)
    return step if at else None


def _map(path: str) -> mmap.mmap | None:
    try:
        with open(path, "r+b") as file:
            return mmap.mmap(file.fileno(), 0)  # as long as its agent has made it
    except (OSError, ValueError):
        return None


def create(path: str) -> None:
    with open(path, "wb") as file:
        file.write(_MARK.pack(-1, 0.0).ljust(_FIRST_OFFSET, b"\0") + _FIRST.pack(_NONE, 0.0))


def read(path: str) -> tuple[int, float] | None:
    """The last step and when it was reached, or None if the rank has not reported yet."""
    try:
        step, at = _MARK.unpack_from(content(path))
    except (OSError, struct.error):
        return None
    return (step, at) if at else None


def read_first(path: str) -> tuple[int, float] | None:
    """Return the first step that the rank reported and its time; the rank writes both before its last step."""
    try:
        step, first_at = _FIRST.unpack_from(content(path), _FIRST_OFFSET)
    except (OSError, struct.error):
        return None
    return None if step == _NONE else (step, first_at)


def content(path: str) -> bytes:
    """What is in the file; a rank may have put something else in its place, and its agent never waits for that."""
    return files.read_bytes(path, FILE_SIZE)

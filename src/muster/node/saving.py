"""`with muster.saving():` a rank is not ended in the middle of a save.

The block holds a shared lock on the small file that the agent gives each rank. An agent that wants to end its ranks
takes the lock for itself first: while a rank saves it cannot, and while it has it no save begins. The kernel gives the
lock back when a process dies. A block that is left after `muster.should_save()` was true is left when the rank is asked
to end. Without an agent the block does nothing.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections.abc import Iterator

from muster.node import word
from muster.node.fencing import check_lease
from muster.node.progress import FILE_VARIABLE

_blocks = threading.local()  # those of this thread, one in the other


@contextlib.contextmanager
def saving() -> Iterator[None]:
    """Hold back whatever would end this rank until the block is left, for at most `saving_timeout_s`."""
    path = os.environ.get(FILE_VARIABLE)
    try:
        mark = os.open(path, os.O_RDONLY | os.O_CLOEXEC) if path else -1
    except OSError:
        mark = -1
    if mark < 0:
        check_lease()
        yield
        return
    _blocks.count = getattr(_blocks, "count", 0) + 1
    try:
        fcntl.flock(mark, fcntl.LOCK_SH)
        check_lease()
        yield
    finally:
        _blocks.count -= 1
        fcntl.flock(mark, fcntl.LOCK_UN)  # said, not only closed: a child that was forked meanwhile has it open too
        os.close(mark)
    check_lease()
    if not _blocks.count:
        word.saved()

"""Fencing of ranks: a rank ends itself at its next call of muster when the lease of its worker is over.

The agent and its guard end ranks whose lease is over. They cannot if both are stopped (SIGSTOP, a debugger). So the
agent writes into shared memory from when on the coordinator may give the places of its ranks to other workers. A
stopped agent does not postpone that time, so it passes. Without an agent the check does nothing. Standard library
only.
"""

from __future__ import annotations

import contextlib
import fcntl
import math
import mmap
import os
import stat
import struct
import time
from typing import NoReturn

FILE_VARIABLE = "MUSTER_LEASE_FILE"
EXIT_LEASE_OVER = 75  # an agent that has lost its coordinator exits with the same code
_MAGIC = int.from_bytes(b"muster-1")  # a later process with the agent's pid has no file that begins like this
_FENCE, _FENCE_AWAKE = 1, 2  # cells of 8 bytes behind the magic number
_SIZE = 24
_LOOK_S = 0.002
_SEALS = (0x02 | 0x04, 0x10)  # a fixed length; no other writer, which Linux can ensure since 5.1
_NOT_AGAIN_S = 0.02  # s; a smaller change between the two clocks is no suspension


class LeaseFile:
    """The agent's side: shared memory without a name, which only this process writes."""

    def __init__(self) -> None:
        self._fd = os.memfd_create("muster-lease", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._fd, _SIZE)
        self._cells = memoryview(mmap.mmap(self._fd, _SIZE)).cast("B").cast("d")
        self._slept = [(-math.inf, _slept_s())]  # (time, s): from that time on, the total suspension
        struct.pack_into("Q", self._cells.cast("B"), 0, _MAGIC)
        self.publish(math.inf, math.inf)
        for seals in _SEALS:
            with contextlib.suppress(OSError):
                fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, seals)

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self._fd}"

    def publish(self, fence: float, renewed_at: float) -> None:
        """Publish the time at which ranks must be gone. Both arguments are times of `time.monotonic()`.

        That clock stands still while the machine is suspended; the coordinator's clock does not. So the same time is
        also published on CLOCK_BOOTTIME, which counts suspensions. The conversion uses the total suspension at
        `renewed_at`, when the lease was requested.
        """
        slept = _slept_s()
        if abs(slept - self._slept[-1][1]) > _NOT_AGAIN_S:
            self._slept = [*self._slept[-8:], (time.monotonic(), slept)]
        suspensions = [for_s for since, for_s in self._slept if since <= renewed_at]
        self._cells[_FENCE_AWAKE] = fence + (suspensions or [self._slept[0][1]])[-1]
        self._cells[_FENCE] = fence

    def close(self) -> None:
        os.close(self._fd)


# The rank's side ----------------------------------------------------------------------------------

_cells: memoryview[float] | None = None
_cells_of: str | None = None


def check_lease() -> None:
    """End this process at once if the lease of its worker is over. It makes no system call."""
    global _cells, _cells_of
    path = os.environ.get(FILE_VARIABLE)
    if not path:
        return
    if path != _cells_of:
        _cells, _cells_of = _map(path), path
    if _cells is not None and not _is_valid(_cells):
        _end_unless_renewed(_cells)


def _is_valid(cells: memoryview[float]) -> bool:
    return bool(time.monotonic() < cells[_FENCE] and time.clock_gettime(time.CLOCK_BOOTTIME) < cells[_FENCE_AWAKE])


def _end_unless_renewed(cells: memoryview[float]) -> None:
    """After a suspension the lease is in doubt: wait until the agent has renewed it, or until it is over."""
    while not _is_valid(cells):
        fences = cells[_FENCE], cells[_FENCE_AWAKE]
        now = time.monotonic()
        time.sleep(_LOOK_S)
        if now >= fences[0] and fences == (cells[_FENCE], cells[_FENCE_AWAKE]):  # not read in the middle of a write
            _end(now - fences[0])


def _end(over_s: float) -> NoReturn:
    from muster.node import system  # imported only here: other calls need not pay for it

    env = os.environ
    text = (
        f"muster: rank {env.get('RANK', '?')} of round {env.get('MUSTER_ROUND', '?')} ends: the lease of its worker "
        f"{env.get('MUSTER_WORKER', '')} ended {over_s:.1f} s ago, and its agent, which renews the lease and ends "
        "ranks, is stopped. Another worker may have its place.\n"
    )
    with contextlib.suppress(OSError):
        os.write(2, text.encode(errors="replace"))
    with contextlib.suppress(OSError):
        system.kill_children()  # a child may write on behalf of this rank
    os._exit(EXIT_LEASE_OVER)


def _map(path: str) -> memoryview[float] | None:
    """Map the agent's memory. Return None if there is no agent, or if the path is not its file."""
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except OSError:
        return None
    try:
        status = os.fstat(opened)
        if not stat.S_ISREG(status.st_mode) or status.st_size != _SIZE:
            return None
        cells = memoryview(mmap.mmap(opened, _SIZE, prot=mmap.PROT_READ)).cast("B")
    except (OSError, ValueError):
        return None
    finally:
        os.close(opened)
    return cells.cast("d") if struct.unpack_from("Q", cells)[0] == _MAGIC else None


def _slept_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()

"""Memory that outlives ranks: pieces that the agent holds, and how much of it there may be. Standard library only.

A segment is memory without a name; whoever is given its descriptor can map it. It ends with the last process that has
it, so nothing is left of an agent that was killed. `/dev/shm` may be small in a container: it does not count here.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import itertools
import mmap
import os
from collections.abc import Callable
from pathlib import Path

SHARE = 0.5  # of the memory that is free, unless a limit is set
_LARGER = 1.25  # so much larger than wanted a free segment may be
_SMALLEST = 64 << 10
_IDLE_TAKES = 16  # after so many others a segment that nobody uses is given back
_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")


class NoRoom(Exception):
    pass


class Segment:
    """`lent`: another worker's memory, by its descriptor."""

    def __init__(self, number: int, size: int, lent: int | None = None) -> None:
        self.number = number
        self.size = size
        self.lent = lent is not None
        self.fd = lent if lent is not None else os.memfd_create(f"muster-state-{number}", os.MFD_CLOEXEC)
        self.users = 0
        self.used_at = 0
        self._map: mmap.mmap | None = None
        if self.lent:
            return
        try:
            os.posix_fallocate(self.fd, 0, size)  # all of it now: to find out later that there is none would be death
        except OSError:
            os.close(self.fd)
            raise

    @property
    def memory(self) -> mmap.mmap:
        if self._map is None:
            self._map = mmap.mmap(self.fd, self.size)
        return self._map

    def close(self) -> None:
        if self._map is not None:
            with contextlib.suppress(BufferError):
                self._map.close()
        os.close(self.fd)


class Memory:
    """`limit` tells how many bytes there may be in all."""

    def __init__(self, limit: Callable[[], int]) -> None:
        self._limit = limit
        self._made = itertools.count(1)
        self._all: dict[int, Segment] = {}
        self._coming = 0  # bytes that are being touched
        self._lent: dict[int, tuple[Segment, Callable[[], None]]] = {}  # by others, to us
        self._takes = 0

    @property
    def taken(self) -> int:
        return sum(segment.size for segment in self._all.values()) + self._coming

    @property
    def limit(self) -> int:
        return self._limit()

    def __getitem__(self, number: int) -> Segment:
        return self._all[number]

    def numbers(self) -> list[int]:
        return sorted(self._all)

    async def take(self, size: int, make_room: Callable[[], bool] = lambda: False) -> Segment:
        """A segment that nobody else uses; NoRoom says why there is none.

        What is new is all touched, which takes time. `make_room` lets go of something, or says that there is nothing.
        """
        size = _rounded(size)
        self._takes += 1
        self._forget_unused(lambda segment: self._takes - segment.used_at > _IDLE_TAKES)
        for segment in self._all.values():
            if not segment.users and size <= segment.size <= size * _LARGER:
                return self._use(segment)
        while self.taken + size > self._limit():
            self._forget_unused(lambda _: True)
            if self.taken + size > self._limit() and not make_room():
                have = f"{self.taken >> 20} of {self._limit() >> 20} MiB are taken"
                raise NoRoom(f"{size >> 20} MiB of state do not fit: {have}")
        self._coming += size
        try:
            made = await asyncio.to_thread(Segment, next(self._made), size)
        except OSError as error:
            why = "the machine has no more memory" if error.errno in (errno.ENOMEM, errno.ENOSPC) else str(error)
            raise NoRoom(f"{size >> 20} MiB of state do not fit: {why}") from None
        finally:
            self._coming -= size
        self._all[made.number] = made
        return self._use(made)

    def adopt(self, fd: int, size: int, on_end: Callable[[], None]) -> Segment:
        """Memory of another worker, which is not ours to write to; `on_end` when nobody here uses it any more."""
        made = Segment(next(self._made), size, fd)
        self._lent[made.number] = made, on_end
        return made

    def _use(self, segment: Segment) -> Segment:
        segment.users += 1
        segment.used_at = self._takes
        return segment

    def let_go(self, segment: Segment) -> None:
        segment.users -= 1
        if segment.lent and not segment.users:
            _, on_end = self._lent.pop(segment.number)
            segment.close()
            on_end()

    def _forget_unused(self, which: Callable[[Segment], bool]) -> None:
        for segment in [one for one in self._all.values() if not one.users and which(one)]:
            del self._all[segment.number]
            segment.close()


def _rounded(size: int) -> int:
    """Sizes that come again, so that memory can be used again: an eighth of the next power of two, or more."""
    step = max(_SMALLEST, 1 << max(0, size.bit_length() - 4))
    return -(-max(1, size) // step) * step


def room(taken: int, limit: int | None = None, share: float = SHARE) -> int:
    """How much state may be kept in all, while so much is taken: what was set, or a share of what is free."""
    free = [value for value in (_available(), *_groups()) if value is not None]
    usual = int((min(free) + taken) * share) if free else 1 << 62
    return usual if limit is None else min(limit, (min(free) + taken) if free else limit)


def _available() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")), None)


def _groups() -> list[int]:
    """What the memory groups of this process leave it, from its own to the machine's."""
    found = []
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        _, kinds, path = line.split(":", 2)
        if kinds and "memory" not in kinds.split(","):
            continue
        top, most, used = (
            (_V1, "memory.limit_in_bytes", "memory.usage_in_bytes") if kinds else (_V2, "memory.max", "memory.current")
        )
        here = top / path.lstrip("/")
        for folder in (here, *here.parents):
            with contextlib.suppress(OSError, ValueError):
                found.append(int((folder / most).read_text()) - int((folder / used).read_text()) + _cache(folder))
            if folder == top:
                break
    return [value for value in found if value < 1 << 60]


def _cache(folder: Path) -> int:
    """Of what a group uses, what the kernel gives back when it is wanted."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in (folder / "memory.stat").read_text().splitlines():
            if line.startswith(("total_inactive_file ", "inactive_file ")):
                return int(line.split()[1])
    return 0

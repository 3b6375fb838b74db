"""When does this worker write the state of its ranks to disk, and what is whole there?

The worker with rank 0 says from which step on it is time; the coordinator tells everybody, and each writes the first
step from there on. So all write the same one, although nobody waits for it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from pathlib import Path

from muster.background import Tasks
from muster.node.shelf import Copy
from muster.state import disk

AHEAD_S = 1.0  # everybody has heard of it by then
AHEAD_STEPS = 1000


class Durable:
    def __init__(self, tasks: Tasks, changed: Callable[[], None]) -> None:
        self._tasks = tasks
        self._changed = changed
        self._folder: Path | None = None
        self._every_s = math.inf
        self._due_at = math.inf
        self._written: dict[int, int] = {}  # of each rank the last step that was begun with
        self._turn = asyncio.Lock()
        self._reading = asyncio.Lock()  # so that a disk that hangs blocks only one thread
        self.newest: int | None = None  # that is whole
        self.wish: int | None = None  # from this step on it is time
        self.write_at: int | None = None  # as everybody was told
        self._failures: dict[int | None, str] = {}  # writes by rank; None: the folder itself

    @property
    def failed(self) -> str:
        """Return why the folder cannot be read or written now; empty if it can."""
        return next(iter(self._failures.values()), "")

    def use(self, folder: str | None, every_s: float) -> None:
        path = Path(folder) if folder is not None else None
        if path is None:
            return
        if path != self._folder:
            self._folder, self._every_s = path, every_s
            self._due_at = asyncio.get_running_loop().time() + every_s
        self._tasks.start(self.look())

    async def look(self) -> None:
        """Look for the newest whole step. While the folder cannot be read, the result of the last look stays."""
        if self._folder is None:
            return
        newest, failure = self.newest, ""
        try:
            async with self._reading:
                newest = next(iter(await asyncio.to_thread(disk.steps, self._folder)), None)
        except OSError as error:
            failure = f"the steps in {self._folder} cannot be read: {error.strerror or error}"
        if self._note(None, failure) or newest != self.newest:
            self.newest = newest
            self._changed()

    def _note(self, rank: int | None, failure: str) -> bool:
        """Record a failure, or its end if `failure` is empty. Return True if that is a change."""
        before = self._failures.pop(rank, "")
        if failure:
            self._failures[rank] = failure
        return failure != before

    def sealed(self, copy: Copy, step_s: float) -> None:
        """A rank of ours has sealed a step."""
        if self._folder is None:
            return
        rank, step = copy.manifest.rank, copy.manifest.step
        now = asyncio.get_running_loop().time()
        if rank == 0 and now >= self._due_at and step_s > 0 and (self.wish is None or step >= self.wish):
            self._due_at = now + self._every_s
            self.wish = step + min(AHEAD_STEPS, math.ceil(AHEAD_S / step_s))
        if self.write_at is not None and step >= self.write_at > self._written.get(rank, -1):
            self._written[rank] = step
            self._tasks.start(self._write(copy))

    async def _write(self, copy: Copy) -> None:
        assert self._folder is not None
        (segment,) = copy.segments  # what our own rank has sealed lies in one
        segment.users += 1
        try:
            async with self._turn:
                failure = await asyncio.to_thread(_write_now, self._folder, copy, memoryview(segment.memory))
        finally:
            segment.users -= 1
        self._note(copy.manifest.rank, failure)
        await self.look()
        self._changed()


def _write_now(folder: Path, copy: Copy, memory: memoryview) -> str:
    """Write the step of a rank, then remove older steps. Return the failure, or an empty text."""
    manifest, failure = copy.manifest, ""
    try:
        disk.write(folder, manifest, memory)
    except OSError as error:
        failure = f"step {manifest.step} cannot be written to {folder}: {error.strerror or error}"
    if manifest.rank == 0:
        try:
            disk.drop_old(folder, disk.attempt_of(manifest))
        except OSError as error:
            failure = failure or f"old steps in {folder} cannot be removed: {error.strerror or error}"
    return failure

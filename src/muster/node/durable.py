"""When does this worker write the state of its ranks to disk, and what is whole there?

The worker with rank 0 says from which step on it is time; the coordinator tells everybody, and each writes the first
step from there on. So all write the same one, although nobody waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
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
        self.newest: int | None = None  # that is whole
        self.wish: int | None = None  # from this step on it is time
        self.write_at: int | None = None  # as everybody was told
        self.failed = ""

    def use(self, folder: str | None, every_s: float) -> None:
        path = Path(folder) if folder is not None else None
        if path is None or path == self._folder:
            return
        self._folder, self._every_s = path, every_s
        self._due_at = asyncio.get_running_loop().time() + every_s
        self._tasks.start(self._look())

    async def _look(self) -> None:
        assert self._folder is not None
        found = await asyncio.to_thread(disk.steps, self._folder)
        newest = next(iter(found), None)
        if newest != self.newest:
            self.newest = newest
            self._changed()

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

    def _write_now(self, folder: Path, copy: Copy, memory: memoryview) -> None:
        manifest = copy.manifest
        disk.write(folder, manifest, memory)
        if manifest.rank == 0:
            with contextlib.suppress(OSError):
                disk.drop_old(folder, disk.attempt_of(manifest))

    async def _write(self, copy: Copy) -> None:
        assert self._folder is not None
        (segment,) = copy.segments  # what our own rank has sealed lies in one
        segment.users += 1
        try:
            async with self._turn:
                await asyncio.to_thread(self._write_now, self._folder, copy, memoryview(segment.memory))
            self.failed = ""
        except OSError as error:
            self.failed = f"step {copy.manifest.step} cannot be written to {self._folder}: {error.strerror or error}"
        finally:
            segment.users -= 1
        await self._look()
        self._changed()

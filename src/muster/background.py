"""What goes on beside: tasks that somebody has to hold. Standard library only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class Tasks:
    """Held until they end: the event loop itself forgets a task that nobody holds. `failed` hears how one failed."""

    def __init__(self, failed: Callable[[BaseException], object] | None = None) -> None:
        self._held: set[asyncio.Task[Any]] = set()
        self._failed = failed

    def __len__(self) -> int:
        return len(self._held)

    def start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        return self.hold(asyncio.get_running_loop().create_task(work))

    def hold(self, task: asyncio.Task[T]) -> asyncio.Task[T]:
        self._held.add(task)
        task.add_done_callback(self._over)
        return task

    def cancel(self) -> None:
        for task in self._held:
            task.cancel()

    async def finish(self) -> None:
        """Until each has ended, however it ends."""
        await asyncio.gather(*self._held, return_exceptions=True)

    def _over(self, task: asyncio.Task[Any]) -> None:
        self._held.discard(task)
        if self._failed is not None and not task.cancelled() and (error := task.exception()) is not None:
            self._failed(error)

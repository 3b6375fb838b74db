"""What goes on beside: tasks that somebody has to hold, and questions that are asked until there is an answer.

Standard library only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from muster.errors import MusterError

log = logging.getLogger("muster")
T = TypeVar("T")

AGAIN_S = 1.0


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


async def until_answered(
    what: str, ask: Callable[[], Awaitable[T]], passes: Callable[[MusterError], bool] = lambda error: error.retryable
) -> T:
    """Ask for what nobody would ask for again, however long it takes. What does not pass is raised."""
    while True:
        try:
            return await ask()
        except MusterError as error:
            if not passes(error):
                raise
            log.warning("%s: trying again: %s", what, error)
        await asyncio.sleep(AGAIN_S)

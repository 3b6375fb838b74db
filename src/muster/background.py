"""What goes on beside: tasks that somebody has to hold, and a loop on a thread of its own. Standard library only."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

PREFERRED_NICE = -5


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


class LoopThread:
    """An event loop on a thread of its own, for what has to go on whatever the others are doing."""

    def __init__(self, name: str, *, preferred: bool = False) -> None:
        """`preferred`: ahead of other threads and processes, where the system allows that."""
        self._preferred = preferred
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def _run(self) -> None:
        if self._preferred:
            _prefer_this_thread()
        asyncio.set_event_loop(self.loop)
        try:
            self.loop.run_forever()
        finally:
            self.loop.close()

    def do(self, work: Callable[[], T]) -> T:
        """Have it done there, and wait for that. It must not wait for whoever calls this."""

        async def done() -> T:
            return work()

        return asyncio.run_coroutine_threadsafe(done(), self.loop).result()

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self.loop))

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()


def _prefer_this_thread() -> bool:
    """Raise the priority of this thread; return whether the system allows it."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), PREFERRED_NICE)
        return True
    return False


@functools.cache
def may_prefer_threads() -> bool:
    """Return whether threads of this process may have a raised priority, tried out in one that ends right after."""
    allowed: list[bool] = []
    thread = threading.Thread(target=lambda: allowed.append(_prefer_this_thread()))
    thread.start()
    thread.join()
    return allowed == [True]

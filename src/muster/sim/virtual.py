"""How does asyncio code run without waiting? On an event loop whose clock jumps to the next timer.

Everything that is ready runs first, in the order in which it became ready; only then does time pass. The same
coroutines therefore give the same history every time, and an hour of theirs takes as long as their own work.
Threads are not waited for: code that hands work to an executor does not belong on this loop.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class Deadlock(RuntimeError):
    """Nothing is ready and no timer is set: on this loop nothing will ever happen again."""


class _Leap(selectors.SelectSelector):
    """Where a real loop would sleep until the next timer, this one moves the clock."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is None:
            raise Deadlock("nothing is ready and no timer is set")
        self.now += max(0.0, timeout)
        return []


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop that begins at 0 and never waits."""

    def __init__(self) -> None:
        self._leap = _Leap()
        self.broken: BaseException | None = None  # what a callback raised: a real loop would only log it
        super().__init__(self._leap)
        self.set_exception_handler(lambda _, context: self._note(context))

    def time(self) -> float:
        return self._leap.now

    def _note(self, context: dict[str, Any]) -> None:
        if "handle" in context and self.broken is None:
            self.broken = context.get("exception")
            self.stop()
        elif "handle" not in context:
            self.default_exception_handler(context)


def run(main: Coroutine[Any, Any, Result]) -> Result:
    """As `asyncio.run`, on virtual time. Raises `Deadlock` with the names of the tasks that would wait for ever.

    What a callback raises is raised here: a history that went on after it would be worth nothing.
    """
    loop = VirtualLoop()
    try:
        return loop.run_until_complete(main)
    except RuntimeError as error:
        if loop.broken is not None:
            raise loop.broken from error
        if not isinstance(error, Deadlock):
            raise
        waiting = sorted(task.get_name() for task in asyncio.all_tasks(loop))
        raise Deadlock(f"at {loop.time():g} s {error}; waiting: {', '.join(waiting)}") from None
    finally:
        _finish(loop)


def _finish(loop: VirtualLoop) -> None:
    """What is left is cancelled, so that no coroutine is abandoned half-way."""
    left = asyncio.all_tasks(loop)
    for task in left:
        task.cancel()
    try:
        if left:
            loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()

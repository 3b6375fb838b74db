"""How does something that takes long outlive the HTTP request that asked for it? It is pending under the caller's key.

A request that comes again with the key goes on with the same call, or hears again how it ended. Errors are told once:
nothing was changed, so asking again may try again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from muster.errors import Conflict, TooManyRequests

T = TypeVar("T")

MOST_REMEMBERED = 256  # calls of one pipeline that have ended
MOST_WAITING = 32  # calls of one caller that have not ended


@dataclass(eq=False)
class PendingCall(Generic[T]):
    key: str
    asked: object  # what the caller wants; the same key with another wish is a mistake
    task: asyncio.Task[T]
    had: bool = False  # its caller had what it asks for before
    caller: str = ""
    withdrawn: bool = False


class PendingCalls(Generic[T]):
    """Those of one pipeline."""

    def __init__(self) -> None:
        self._by_key: dict[str, PendingCall[T]] = {}
        self._gone: dict[str, None] = {}  # withdrawn before they came: calls may overtake one another

    def begin(
        self,
        key: str,
        asked: object,
        start: Callable[[], Coroutine[Any, Any, T]],
        *,
        had: bool = False,
        replay: bool = True,
        caller: str = "",
    ) -> PendingCall[T]:
        """Return the call of that key, or start one. Without `replay` a call that has ended is started again.

        Raise TooManyRequests when too many calls of that caller have not ended.
        """
        if key in self._gone:
            raise _is_withdrawn(key)
        there = self._by_key.get(key)
        if there is not None and (replay or not there.task.done()):
            if there.asked != asked:
                raise Conflict(
                    f"the key {key!r} belongs to another request", retryable=False, hint="use a new key for a new one"
                )
            if there.withdrawn:
                raise _is_withdrawn(key)
            return there
        self._make_room(caller)
        task = asyncio.create_task(start(), name=f"call {key}")
        task.add_done_callback(_read)
        self._by_key[key] = call = PendingCall(key, asked, task, had, caller)
        return call

    async def outcome(self, call: PendingCall[T], wait_s: float) -> T | None:
        """How it ended, or None if it has not."""
        await asyncio.wait({call.task}, timeout=wait_s)
        if not call.task.done():
            return None
        if call.task.cancelled():
            raise _is_withdrawn(call.key)
        if call.task.exception() is not None and self._by_key.get(call.key) is call:
            del self._by_key[call.key]
        return call.task.result()

    async def withdraw(self, key: str) -> PendingCall[T] | None:
        """End it; whoever asks with that key from now on is told. None: it never began, or was withdrawn before."""
        call = self._by_key.get(key)
        if call is None:
            self._gone[key] = None
            while len(self._gone) > MOST_REMEMBERED:
                del self._gone[next(iter(self._gone))]
            return None
        if call.withdrawn:
            return None
        call.withdrawn = True
        call.task.cancel()
        await asyncio.wait({call.task})
        return call

    def cancel_all(self) -> None:
        for call in self._by_key.values():
            call.task.cancel()

    def _make_room(self, caller: str) -> None:
        waiting = sum(1 for one in self._by_key.values() if one.caller == caller and not one.task.done())
        if waiting >= MOST_WAITING:
            raise TooManyRequests(
                f"{waiting} calls under other keys have not ended", hint="ask again with the key of an earlier call"
            )
        ended = [key for key, one in self._by_key.items() if one.task.done()]
        for key in ended[: max(0, len(ended) - MOST_REMEMBERED + 1)]:
            del self._by_key[key]


def _is_withdrawn(key: str) -> Conflict:
    return Conflict(f"the request {key!r} was withdrawn", retryable=False, hint="use a new key for a new one")


def _read(task: asyncio.Task[Any]) -> None:
    """Look at how it ended, so that the loop does not report an error that nobody came to hear."""
    if not task.cancelled():
        task.exception()

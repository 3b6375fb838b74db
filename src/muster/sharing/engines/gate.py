"""Who may generate now? Nobody without a lease, and nobody with weights that are not the newest.

A turn is entered only while the gate is open. Closing it tells the turns inside to stop; what waits for them waits
until the last has left. Threads and event loops may both have turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from types import TracebackType

from muster.sharing.engines.faults import Asleep, EngineFault, TurnInterrupted

LOOK_S = 0.05  # how soon a drain that was given up is noticed


class Gate:
    def __init__(self, why: str) -> None:
        self._changed = threading.Condition()
        self._why = why  # it is closed; "" if it is open
        self._version: str | None = None
        self._turns: set[Turn] = set()
        self._waiters: set[Callable[[], None]] = set()

    @property
    def open(self) -> bool:
        return not self._why

    def close(self, why: str) -> None:
        with self._changed:
            self._why = why
            for turn in self._turns:
                turn.interrupted = True

    def admit(self, version: str | None, given_up: threading.Event) -> bool:
        """Open it, unless who wanted that has been told to give up."""
        with self._changed:
            if given_up.is_set():
                return False
            self._why, self._version = "", version
            self._changed.notify_all()
            for wake in self._waiters:
                wake()
            return True

    def renew(self, version: str) -> None:
        """The same module has other weights now: a turn that began before has to be made again."""
        with self._changed:
            self._version = version
            for turn in self._turns:
                turn.interrupted = True

    def drain(self, within_s: float, given_up: threading.Event) -> None:
        """Wait until no turn is inside."""
        until = time.monotonic() + within_s
        with self._changed:
            while self._turns and not given_up.is_set():
                if time.monotonic() >= until:
                    raise EngineFault(
                        f"{len(self._turns)} turn(s) did not end within {within_s:g} s of being told to",
                        hint="look at engine.interrupted while generating",
                    )
                self._changed.wait(LOOK_S)

    @property
    def interrupted(self) -> bool:
        return bool(self._why)

    # Turns

    def enter(self, turn: Turn) -> bool:
        with self._changed:
            if self._why:
                return False
            self._turns.add(turn)
            turn.version, turn.interrupted = self._version, False
            return True

    def enter_within(self, turn: Turn, wait_s: float | None) -> None:
        until = None if wait_s is None else time.monotonic() + wait_s
        with self._changed:
            while not self.enter(turn):
                left = None if until is None else until - time.monotonic()
                if left is not None and left <= 0:
                    raise Asleep(self._why)
                self._changed.wait(left)

    async def enter_soon(self, turn: Turn, wait_s: float | None) -> None:
        loop, opened = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # its loop is over, and so is who waited
                loop.call_soon_threadsafe(opened.set)

        with self._changed:
            self._waiters.add(wake)
        try:
            async with asyncio.timeout(wait_s):
                while not self.enter(turn):
                    if wait_s is not None and wait_s <= 0:
                        raise Asleep(self._why)
                    await opened.wait()
                    opened.clear()
        except TimeoutError:
            raise Asleep(self._why or "it fell asleep again") from None
        finally:
            with self._changed:
                self._waiters.discard(wake)

    def leave(self, turn: Turn) -> None:
        with self._changed:
            self._turns.discard(turn)
            self._changed.notify_all()


class Turn:
    """One turn of generation: `with` or `async with`. It may be entered again once it was left."""

    def __init__(self, gate: Gate, wait_s: float | None) -> None:
        self._gate, self._wait_s = gate, wait_s
        self.version: str | None = None  # of the weights it generates with
        self.interrupted = False

    def __enter__(self) -> Turn:
        self._gate.enter_within(self, self._wait_s)
        return self

    async def __aenter__(self) -> Turn:
        await self._gate.enter_soon(self, self._wait_s)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._gate.leave(self)
        if self.interrupted and (error is None or not isinstance(error, TurnInterrupted)):
            if error is not None and not isinstance(error, Exception):
                return  # a cancellation or an exit says more
            raise TurnInterrupted("the lease ended during this turn: queue it again") from error

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.__exit__(kind, error, trace)

"""What happens next? Virtual time: a queue of calls, each due at its moment.

Calls that are due at the same moment run in the order in which they were asked for, so a history repeats exactly.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any

Call = Callable[..., None]


class VirtualClock:
    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self.after_each: Callable[[], None] | None = None
        self._queue: list[tuple[float, int, Call, tuple[Any, ...]]] = []
        self._asked = 0

    def at(self, when: float, call: Call, *args: Any) -> None:
        """A moment that has passed means now."""
        self._asked += 1
        heapq.heappush(self._queue, (when if when > self.now else self.now, self._asked, call, args))

    def after(self, delay_s: float, call: Call, *args: Any) -> None:
        self._asked += 1
        heapq.heappush(self._queue, (self.now + delay_s if delay_s > 0 else self.now, self._asked, call, args))

    def run(self, until: float, stop: Callable[[], bool] | None = None) -> bool:
        """Let things happen up to a moment, or until `stop` is true; says whether it became true."""
        if stop is not None and stop():
            return True
        queue = self._queue
        while queue and queue[0][0] <= until:
            self.now, _, call, args = heapq.heappop(queue)
            call(*args)
            self.events += 1
            if self.after_each is not None:
                self.after_each()
            if stop is not None and stop():
                return True
        if until < math.inf:
            self.now = max(self.now, until)
        return False


class Process:
    """Something that runs on a machine. It can be stopped (SIGSTOP), go on, and end."""

    def __init__(self, clock: VirtualClock) -> None:
        self.clock = clock
        self.alive = True
        self.stopped = False
        self.was_stopped = False
        self._unread: list[tuple[Call, tuple[Any, ...]]] = []
        self._overdue: list[tuple[Call, tuple[Any, ...]]] = []

    def after(self, delay_s: float, call: Call, *args: Any) -> None:
        """A timer of this process: late if it is stopped, never if it has ended."""
        self.clock.after(delay_s, self._due, call, args)

    def _due(self, call: Call, args: tuple[Any, ...]) -> None:
        if self.stopped:
            self._overdue.append((call, args))
        elif self.alive:
            call(*args)

    def read(self, call: Call, *args: Any) -> None:
        """Something arrives for it: the kernel keeps it while the process is stopped."""
        if self.stopped:
            self._unread.append((call, args))
        elif self.alive:
            call(*args)

    def stop(self) -> None:
        self.stopped = self.was_stopped = self.alive

    def go_on(self) -> None:
        """As an event loop does it: first everything that can be read and what follows from it, then the timers."""
        if not self.stopped:
            return
        self.stopped = False
        unread, overdue = self._unread, self._overdue
        self._unread, self._overdue = [], []
        for call, args in unread:
            self.read(call, *args)
        for call, args in overdue:
            self.after(0.0, call, *args)

    def end(self) -> None:
        self.alive = self.stopped = False
        self._unread, self._overdue = [], []

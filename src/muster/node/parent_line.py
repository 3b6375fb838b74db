"""The agent's line to one warm parent: orders go out, news come in, and the end of either side is seen."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections import deque
from collections.abc import Callable
from typing import Any

from muster.node import system
from muster.node.warm import MAX_MESSAGE

SPARE_NICE = 10


class ParentLine:
    """`on_news(news)` for each message, `on_end(why)` at most once. Nothing comes after `close`."""

    def __init__(self, on_news: Callable[[dict[str, Any]], None], on_end: Callable[[str], None]) -> None:
        self.on_news = on_news
        self.on_end = on_end
        self._ours, self.theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours.setblocking(False)
        self._unsent: deque[tuple[bytes, socket.socket | None]] = deque()
        self._blocked = False
        self._process: int | None = None  # a descriptor: its number alone might be another's by now
        self._pid = 0
        self._base_nice = os.getpriority(os.PRIO_PROCESS, 0)
        self._hurried = True
        asyncio.get_running_loop().add_reader(self._ours, self._hear)

    def handed_over(self) -> None:
        """The other end is the parent's now."""
        self.theirs.close()

    @property
    def closed(self) -> bool:
        return self._ours.fileno() < 0

    def order(self, listener: socket.socket | None = None, **order: Any) -> None:
        """In the order in which they are given; a listener that comes with one is closed here."""
        self._unsent.append((json.dumps(order).encode(), listener))
        self._send()

    def hurry(self, now: bool) -> None:
        """One that has time gets on behind everyone else, if its priority can be raised again."""
        if self._pid and now != self._hurried and system.may_raise_priority():
            self._hurried = now
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, self._pid, self._base_nice if now else SPARE_NICE)

    def close(self, *, kill: bool = False) -> None:
        """A parent that waits for orders ends when it sees that; one that is busy has to be killed."""
        if self.closed:
            return
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._ours)
        loop.remove_writer(self._ours)
        self._ours.close()
        self.theirs.close()
        for _, listener in self._unsent:
            if listener is not None:
                listener.close()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                if kill:
                    signal.pidfd_send_signal(self._process, signal.SIGKILL)
            os.close(self._process)

    def _send(self) -> None:
        """As many as the socket takes; a parent that is busy importing reads the rest later."""
        loop = asyncio.get_running_loop()
        while self._unsent and not self.closed:
            message, listener = self._unsent[0]
            try:
                socket.send_fds(self._ours, [message], [] if listener is None else [listener.fileno()])
            except BlockingIOError:
                self._blocked = True
                loop.add_writer(self._ours, self._send)
                return
            except OSError as error:
                self._end(f"the warm parent is gone: {error.strerror}")
                return
            self._unsent.popleft()
            if listener is not None:
                listener.close()
        if self._blocked and not self.closed:
            self._blocked = False
            loop.remove_writer(self._ours)

    def _hear(self) -> None:
        while not self.closed:
            try:
                data = self._ours.recv(MAX_MESSAGE)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._end("its warm parent died")
                return
            news = json.loads(data)
            if "warming" in news:
                self._know(news["warming"])
            self.on_news(news)

    def _know(self, pid: int) -> None:
        self._pid = pid
        if self._process is None:
            with contextlib.suppress(OSError):
                self._process = os.pidfd_open(pid)

    def _end(self, why: str) -> None:
        self.close()
        self.on_end(why)

"""What does a server say to one GET? Asked over a socket that never blocks, whatever comes back. Standard library only.

Of a body no more is read than came with the head, or the first bytes that wake a long poll: the status alone counts.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import selectors
import socket
import threading
from typing import Any

from muster.mesh.settings import Target

MOST_HEAD = 64 * 1024
_CHUNK = 16 * 1024
_END = re.compile(rb"\r?\n\r?\n")
_STATUS = re.compile(rb"HTTP/1\.[01] (\d{3})(?:[ \r\n]|$)")
_INDEX = re.compile(rb"(?im)^X-Etcd-Index:[ \t]*(\d{1,18})[ \t]*\r?$")
_UNDER_WAY = (errno.EINPROGRESS, errno.EWOULDBLOCK, errno.EINTR, 0)

Address = tuple[Any, ...]  # as getaddrinfo gives it


class Exchange:
    """One GET on a connection of its own. `step` whenever its socket is ready."""

    def __init__(self, target: Target, path: str, address: Address, began: float, *, poll: bool = False) -> None:
        self.began = began
        self._poll = poll
        self.status = 0  # none yet
        self.index: int | None = None
        self.failure = ""  # why there will be no status
        self.body = 0  # bytes of it that came
        self.ended = False  # by the other side
        self._head = bytearray()
        lines = (f"GET {path} HTTP/1.1", f"Host: {target.endpoint}", "Accept: */*", "Connection: close", "", "")
        self._unsent = "\r\n".join(lines).encode()
        family, kind, proto, _, where = address
        self.sock: socket.socket | None = None
        try:
            self.sock = socket.socket(family, kind, proto)
            self.sock.setblocking(False)
            code = self.sock.connect_ex(where)
        except OSError as why:
            self._fail(why)
            return
        if code not in _UNDER_WAY:
            self._fail(OSError(code, os.strerror(code)))

    @property
    def interest(self) -> int:
        return selectors.EVENT_WRITE if self._unsent else selectors.EVENT_READ

    @property
    def over(self) -> bool:
        """Answered; a long poll, when anything follows a 200 or nothing will."""
        if self._poll and self.status == 200:
            return bool(self.ended or self.body or self.failure)
        return bool(self.status or self.failure)

    def step(self) -> None:
        assert self.sock is not None
        try:
            if self._unsent:
                code = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code:
                    raise OSError(code, os.strerror(code))
                self._unsent = self._unsent[self.sock.send(self._unsent) :]
            else:
                self._take(self.sock.recv(_CHUNK))
        except (BlockingIOError, InterruptedError):
            return
        except OSError as why:
            self._fail(why)

    def _take(self, data: bytes) -> None:
        if not data:
            self.ended = True
            if not self.status:
                self._fail("the connection ended before an answer")
        elif self.status:
            self.body += len(data)
        else:
            self._head += data
            self._read_head(max(0, len(self._head) - len(data) - 3))

    def _read_head(self, seen: int) -> None:
        """An answer counts when its head is whole; those before the last one (1xx) do not."""
        while not self.status:
            end = _END.search(self._head, seen)
            if end is None:
                if len(self._head) > MOST_HEAD:
                    self._fail("the head of the answer does not end")
                return
            match = _STATUS.match(self._head)
            if match is None:
                self._fail("the answer is not HTTP")
                return
            code = int(match[1])
            if 100 <= code < 200 and code != 101:
                del self._head[: end.end()]
                seen = 0
                continue
            found = _INDEX.search(self._head[: end.end()])
            self.index = int(found[1]) if found else None
            self.status, self.body = code, len(self._head) - end.end()
            self._head.clear()

    def _fail(self, why: object) -> None:
        self.failure = str(getattr(why, "strerror", None) or why)

    def close(self) -> None:
        if self.sock is not None:
            self.sock.close()
            self.sock = None


class Addresses:
    """Where the host is. A name is looked up in a thread, which may hang for as long as it likes.

    `bell` becomes readable when the thread is done.
    """

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._known: list[Address] = []
        self._next = 0
        self._looking_up = False
        self.failure = ""
        self.bell, self._ring = socket.socketpair()
        self.bell.setblocking(False)
        try:
            self._known = self._ask(socket.AI_NUMERICHOST)
            self._literal = True
        except (OSError, UnicodeError):
            self._literal = False

    def current(self) -> Address | None:
        return self._known[self._next % len(self._known)] if self._known else None

    def look_up(self) -> None:
        """Begin to, unless it is under way."""
        if self._literal or self._looking_up:
            return
        self._looking_up = True
        try:
            threading.Thread(target=self._look_up, args=(self._ring.dup(),), daemon=True).start()
        except (OSError, RuntimeError) as why:  # too many files or threads
            self.failure, self._looking_up = str(why), False

    def failed(self) -> None:
        """The current one did not answer: the next one may, or the name has moved."""
        self._next += 1
        if self._known and self._next % len(self._known) == 0:
            self.look_up()

    def heard(self) -> None:
        """The bell rang."""
        with contextlib.suppress(OSError):
            self.bell.recv(64)

    def close(self) -> None:
        self.bell.close()
        self._ring.close()

    def _look_up(self, ring: socket.socket) -> None:
        try:
            self._known, self.failure = self._ask(0), ""
        except (OSError, UnicodeError, ValueError) as why:
            self.failure = f"{self._host}: {getattr(why, 'strerror', None) or why}"
        self._looking_up = False
        with ring, contextlib.suppress(OSError):  # nobody may wait any more
            ring.send(b".")

    def _ask(self, flags: int) -> list[Address]:
        return list(socket.getaddrinfo(self._host, self._port, type=socket.SOCK_STREAM, flags=flags))

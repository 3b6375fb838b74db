"""How does one probe go, for the one who asks and the one who answers? One connection, one line each way.

Callbacks on bare sockets instead of coroutines and streams: thousands are made at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hmac
import os
import socket
from collections.abc import Callable
from typing import Any

ATTEMPT_S = 1.0  # after which a path counts as not answering
VISIT_S = 5.0
MOST_LINE = 1024
_PROOF = 64  # characters


def proof(secret: bytes, asker: str, asked: str, nonce: str) -> bytes:
    text = "\0".join(("muster-probe", asker, asked, nonce)).encode()
    return hmac.digest(secret, text, "sha256").hex().encode()


class Attempt:
    """One connection to one path of a peer."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        hello: bytes,
        want: bytes,
        under_way: set[Attempt],
        done: Callable[[float | None, str], None],
    ) -> None:
        self._loop = loop
        self._hello = hello
        self._want = want
        self._under_way = under_way
        self._done = done
        self._got = b""
        self._sent_at = 0.0
        self._socket: socket.socket | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._unwatch: Callable[[int], bool] | None = None

    def begin(self, family: int, target: Any) -> None:
        self._under_way.add(self)
        try:
            self._socket = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            code = self._socket.connect_ex(target)
        except OSError as error:
            self._loop.call_soon(self._end, None, error.strerror or str(error))
            return
        if code not in (0, errno.EINPROGRESS):
            self._loop.call_soon(self._end, None, os.strerror(code).lower())
            return
        self._timer = self._loop.call_later(ATTEMPT_S, self._end, None, f"no answer in {ATTEMPT_S:g} s")
        self._say()

    def end(self) -> None:
        """Close, and say nothing."""
        self._under_way.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        if self._socket is not None:
            if self._unwatch is not None:
                self._unwatch(self._socket.fileno())
            self._socket.close()
            self._socket = None

    def _end(self, rtt: float | None, why: str) -> None:
        self.end()
        self._done(rtt, why)

    def _say(self) -> None:
        """At once where the connection stands already, as it does on loopback; else when it does."""
        assert self._socket is not None
        number = self._socket.fileno()
        if self._unwatch is not None:
            self._unwatch(number)
        self._sent_at = self._loop.time()
        try:
            self._socket.send(self._hello)  # a fresh connection takes one line
        except BlockingIOError:
            self._loop.add_writer(number, self._say)
            self._unwatch = self._loop.remove_writer
        except OSError as error:
            self._loop.call_soon(self._end, None, (error.strerror or str(error)).lower())
        else:
            self._loop.add_reader(number, self._answered)
            self._unwatch = self._loop.remove_reader

    def _answered(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(_PROOF + 1 - len(self._got))
        except BlockingIOError:
            return
        except OSError as error:
            self._end(None, (error.strerror or str(error)).lower())
            return
        self._got += data
        if data and len(self._got) <= _PROOF:
            return
        if hmac.compare_digest(self._got, self._want + b"\n"):
            self._end(self._loop.time() - self._sent_at, "")
        else:
            self._end(None, "somebody else answers there" if self._got else "nobody of this run answers there")


class Visit:
    """Somebody who asks us."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        visitor: socket.socket,
        answer: Callable[[bytes], bytes | None],
        visits: dict[int, Visit],
    ) -> None:
        self._loop = loop
        self._socket = visitor
        self._answer = answer
        self._visits = visits
        self._line = b""
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        self._visits[id(self)] = self
        if self._read():
            return
        self._timer = self._loop.call_later(VISIT_S, self.end)
        self._loop.add_reader(self._socket.fileno(), self._read)

    def end(self) -> None:
        if self._visits.pop(id(self), None) is None:
            return
        if self._timer is not None:
            self._timer.cancel()
            self._loop.remove_reader(self._socket.fileno())
        self._socket.close()

    def _read(self) -> bool:
        """Whether it is over: most lines are there already when they are accepted."""
        try:
            data = self._socket.recv(MOST_LINE)
        except BlockingIOError:
            return False
        except OSError:
            data = b""
        self._line += data
        if data and b"\n" not in self._line and len(self._line) < MOST_LINE:
            return False
        answer = self._answer(self._line) if b"\n" in self._line else None
        if answer is not None:
            with contextlib.suppress(OSError):  # it has left
                self._socket.send(answer)
        self.end()
        return True

"""How do two agents hand each other state? Small messages, each perhaps with very many bytes behind it.

The bytes go from memory to the socket and from the socket to memory, through nobody's hands: a sender gives a place in
a file, a receiver a place in memory.
"""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import Callable
from typing import Any, BinaryIO

MOST_MESSAGE = 256 << 20  # a manifest of very many pieces
PART = 8 << 20  # after so many bytes it is looked whether there were too many for now
_LENGTH = struct.Struct(">I")


class Bulk(asyncio.BufferedProtocol):
    """One connection that has been opened, and was proved to be a member's."""

    def __init__(self, transport: asyncio.Transport, early: bytes = b"") -> None:
        self._transport = transport
        self._loop = asyncio.get_running_loop()
        self._buffer = bytearray(1 << 16)
        self._head = bytearray(early)
        self._messages: asyncio.Queue[dict[str, Any] | None] = asyncio.Queue()
        self._sink: memoryview | None = None
        self._filled: asyncio.Future[None] | None = None
        self._writable = asyncio.Event()
        self._writable.set()
        self._lost = False
        transport.set_protocol(self)
        self._read_head()

    # What comes

    def get_buffer(self, sizehint: int) -> memoryview | bytearray:
        return self._sink if self._sink is not None and len(self._sink) else self._buffer

    def buffer_updated(self, count: int) -> None:
        if self._sink is not None and len(self._sink):
            self._took(count)
        else:
            self._head += self._buffer[:count]
            self._read_head()

    def _took(self, count: int) -> None:
        assert self._sink is not None
        self._sink = self._sink[count:]
        if not len(self._sink) and self._filled is not None and not self._filled.done():
            self._filled.set_result(None)
            self._sink = None
            self._transport.pause_reading()  # what follows is for whoever asks next

    def _read_head(self) -> None:
        """One message: what is behind it is perhaps no message."""
        if len(self._head) < _LENGTH.size:
            return
        (length,) = _LENGTH.unpack_from(self._head)
        if length > MOST_MESSAGE:
            self.abort()
            return
        end = _LENGTH.size + length
        if len(self._head) < end:
            return
        try:
            told = json.loads(self._head[_LENGTH.size : end])
        except ValueError:
            self.abort()
            return
        del self._head[:end]
        self._transport.pause_reading()
        self._messages.put_nowait(told if isinstance(told, dict) else None)

    async def hear(self) -> dict[str, Any]:
        """The next message; ConnectionError if there is none any more."""
        if self._messages.empty() and not self._lost:
            self._read_head()
            if self._messages.empty():
                self._resume()
        told = None if self._lost and self._messages.empty() else await self._messages.get()
        if told is None:
            raise ConnectionResetError("the other agent has gone")
        return told

    async def take(self, into: memoryview) -> None:
        """The bytes that follow a message."""
        early = min(len(into), len(self._head))
        into[:early] = self._head[:early]
        del self._head[:early]
        if early == len(into):
            return
        if self._lost:
            raise ConnectionResetError("the other agent has gone")
        self._filled = self._loop.create_future()
        self._sink = into[early:]
        self._resume()
        await self._filled

    def _resume(self) -> None:
        if not self._transport.is_closing():
            self._transport.resume_reading()

    # What goes

    def say(self, **message: Any) -> None:
        data = json.dumps(message, separators=(",", ":")).encode()
        self._transport.write(_LENGTH.pack(len(data)) + data)

    def write(self, data: bytes) -> None:
        """The bytes that follow a message, if they are few."""
        self._transport.write(data)

    async def give(self, file: BinaryIO, offset: int, count: int, spend: Callable[[int], Any]) -> None:
        """Bytes of a file. `spend` is awaited before each part of them."""
        while count:
            part = min(PART, count)
            await spend(part)
            if self._lost:
                raise ConnectionResetError("the other agent has gone")
            await self._loop.sendfile(self._transport, file, offset, part)
            offset, count = offset + part, count - part

    # Ends

    def eof_received(self) -> None:
        pass

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost = True
        self._messages.put_nowait(None)
        if self._filled is not None and not self._filled.done():
            self._filled.set_exception(ConnectionResetError("the other agent has gone"))

    def abort(self) -> None:
        self._transport.abort()

    def close(self) -> None:
        self._transport.close()

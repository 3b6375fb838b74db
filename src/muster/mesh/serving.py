"""How are keys served where there is no etcd? Over its v2 API, from memory, by the control plane itself.

The control plane writes in its own process, through `KeyServer.keys`; workers read over HTTP. As with etcd, whoever
reaches the port may also write; with a token, PUT and DELETE need it. Nothing outlives the process: the gate writes
its keys again, and those who wait connect again.

A connection is a state machine without a task: thousands of waiters cost a socket and a kilobyte each. The oldest
connection gives way when there are too many; to whoever waits on it that is a reason to look again.
"""

from __future__ import annotations

import asyncio
import hmac
import json
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, cast

from muster import descriptors, listening
from muster.background import Tasks
from muster.listening import Door
from muster.mesh.keys import KeyChange, KeySpace, Refused, as_errors, normal
from muster.mesh.requests import MOST_BODY, MOST_HEAD, KeyRequest, take

LINGER_S = 1.0  # for a client to close first
MOST_STORED = 16 * 1024 * 1024  # bytes that keys may take before nothing more is written over HTTP
MOST_UNREAD = 64 * 1024 * 1024  # bytes of answers that slow readers may leave here, all together


@dataclass(frozen=True)
class KeyServerLimits:
    connections: int = 20_000  # and no more than a quarter of the files that the process may open
    request_s: float = 30.0  # for a whole request, counted from the answer before it
    read_s: float = 30.0  # for a client to take its answer
    wait_s: float = 300.0  # a wait that saw nothing ends, as etcd's does


class MemoryKeys:
    """`ports.Keys`, in this process. Whoever waits for a key hears of it before `put` returns."""

    def __init__(self) -> None:
        self.space = KeySpace()
        self._waiting: dict[str, set[KeyClient]] = {}

    async def put(self, path: str, value: str) -> None:
        with as_errors():
            self.set(normal(path), value)

    async def delete(self, path: str) -> None:
        with as_errors():
            self.remove(normal(path), recursive=True)

    async def list(self, prefix: str) -> Mapping[str, str]:
        with as_errors():
            return {path.lstrip("/"): value for path, value in self.space.files(normal(prefix)).items()}

    def set(self, path: str, value: str) -> KeyChange:
        return self._tell(self.space.set(path, value))

    def remove(self, path: str, *, recursive: bool = False, directory: bool = False) -> KeyChange:
        return self._tell(self.space.delete(path, recursive=recursive, directory=directory))

    def wait(self, path: str, who: KeyClient) -> None:
        self._waiting.setdefault(path, set()).add(who)

    def leave(self, path: str, who: KeyClient) -> None:
        if path in self._waiting:
            self._waiting[path].discard(who)
            if not self._waiting[path]:
                del self._waiting[path]

    def _tell(self, event: KeyChange) -> KeyChange:
        names = event.path.split("/")
        paths = {"/".join(names[:count]) or "/" for count in range(1, len(names) + 1)}
        if event.whole:
            paths.update(self._waiting)
        told = [who for path in paths for who in self._waiting.get(path, ()) if event.concerns(path, who.recursive)]
        if told:
            body = _json(event.body)
            for who in told:
                who.happened(body)
        return event


class KeyServer:
    """`start` gives HOST:PORT, where it serves until `stop`."""

    def __init__(
        self, host: str = "127.0.0.1", port: int = 0, *, token: str = "", limits: KeyServerLimits | None = None
    ) -> None:
        self._host, self._port = host, port
        self._token = token
        self.limits = limits or KeyServerLimits()
        self._most = descriptors.share(4, self.limits.connections)
        self._connections: dict[KeyClient, None] = {}  # oldest first
        self._doors: list[Door] = []
        self._arriving = Tasks()
        self.unread = 0
        self.address = ""
        self.keys = MemoryKeys()

    async def start(self) -> str:
        sockets = await listening.bound(self._host, self._port)
        self._doors = [Door(one, self._admit, name="the key server") for one in sockets]
        host, port = sockets[0].getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return self.address

    async def stop(self) -> None:
        for door in self._doors:
            door.close()
        for connection in list(self._connections):
            connection.transport.abort()

    def _admit(self, taken: socket.socket, _: str) -> None:
        self._arriving.hold(listening.arrive(taken, lambda: KeyClient(self)))

    def came(self, connection: KeyClient) -> None:
        while len(self._connections) >= self._most:
            oldest = next(iter(self._connections))
            del self._connections[oldest]
            oldest.transport.abort()
        self._connections[connection] = None

    def went(self, connection: KeyClient) -> None:
        self._connections.pop(connection, None)

    def answer(self, request: KeyRequest) -> tuple[int, dict[str, Any]]:
        """Everything but waiting. Raises `Refused`."""
        space = self.keys.space
        if request.method in ("GET", "HEAD"):
            return 200, space.get(request.path, recursive=request.flag("recursive"))
        if self._token and not hmac.compare_digest(request.token.encode(), self._token.encode()):
            raise Refused(401, 110, "The request requires user authentication", "Insufficient credentials")
        if request.method == "DELETE":
            event = self.keys.remove(request.path, recursive=request.flag("recursive"), directory=request.flag("dir"))
            return 200, event.body
        value = request.fields.get("value", "")
        if space.size + len(value) > MOST_STORED:
            raise Refused(507, 209, "Invalid field", f"all keys together may take {MOST_STORED} bytes")
        event = self.keys.set(request.path, value)
        return 201 if event.created else 200, event.body


class KeyClient(asyncio.Protocol):
    """One client: its requests in turn, one answer or one wait at a time."""

    def __init__(self, server: KeyServer) -> None:
        self._server = server
        self._buffer = bytearray()
        self._timer: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None  # runs while the client does not take its answer
        self._unread = 0
        self._wait: KeyRequest | None = None
        self._over = False
        self.recursive = False
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._server.came(self)
        self._within(self._server.limits.request_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.went(self)
        self._end_wait()
        self.resume_writing()
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        if self._over:
            return
        self._buffer += data
        if len(self._buffer) > MOST_HEAD + MOST_BODY + 4 and self._busy:
            self.transport.abort()  # it talks while it should listen
        self._go_on()

    @property
    def _busy(self) -> bool:
        return self._over or self._wait is not None or self._reading is not None or self.transport.is_closing()

    def _go_on(self) -> None:
        while not self._busy:
            try:
                request = take(self._buffer)
            except Refused as why:
                self._buffer.clear()
                self._refuse(why, keep=False)
                return
            if request is None:
                return
            self._within(self._server.limits.request_s)
            self._handle(request)

    def _handle(self, request: KeyRequest) -> None:
        try:
            if request.method == "GET" and request.flag("wait"):
                self._begin_wait(request)
                return
            status, body = self._server.answer(request)
        except Refused as why:
            self._refuse(why, keep=request.keep, bare=request.method == "HEAD")
            return
        self._send(status, _json(body), keep=request.keep, bare=request.method == "HEAD")

    # Waiting

    def _begin_wait(self, request: KeyRequest) -> None:
        space = self._server.keys.space
        recursive = request.flag("recursive")
        if index := request.wait_index:
            event = space.since(index, request.path, recursive)
            if event is not None:
                self._send(200, _json(event.body), keep=request.keep)
                return
        self._wait, self.recursive = request, recursive
        self._server.keys.wait(request.path, self)
        # The head goes out before anything has happened, as etcd's does: whoever waits knows that it is heard.
        self.transport.write(_head(200, space.index, None, request.keep and request.chunks, request.chunks))
        self._within(self._server.limits.wait_s, self.happened)

    def happened(self, body: bytes = b"") -> None:
        """The end of a wait, with the change or without one."""
        request = self._wait
        if request is None:
            return
        self._end_wait()
        chunk = b"%x\r\n%b\r\n" % (len(body), body) if body else b""
        self.transport.write(chunk + b"0\r\n\r\n" if request.chunks else body)
        self._within(self._server.limits.request_s)
        if not (request.keep and request.chunks):
            self._close()
        elif self._buffer:
            # Not from in here: its next request could change the keys while others are being told of this change.
            asyncio.get_running_loop().call_soon(self._go_on)

    def _end_wait(self) -> None:
        if self._wait is not None:
            self._server.keys.leave(self._wait.path, self)
            self._wait = None

    # Answering

    def _refuse(self, why: Refused, *, keep: bool, bare: bool = False) -> None:
        self._send(why.status, _json(why.body(self._server.keys.space.index)), keep=keep, bare=bare)

    def _send(self, status: int, body: bytes, *, keep: bool, bare: bool = False) -> None:
        head = _head(status, self._server.keys.space.index, len(body), keep)
        self.transport.write(head if bare else head + body)
        if not keep:
            self._close()

    def _close(self) -> None:
        """After the answer. A client that still sends would lose it to a reset: what it sends is read and dropped."""
        self._over = True
        self.transport.write_eof()
        self._within(LINGER_S, self.transport.close)

    def pause_writing(self) -> None:
        self._unread = self.transport.get_write_buffer_size()
        self._server.unread += self._unread
        if self._server.unread > MOST_UNREAD:
            self.transport.abort()
            return
        self._reading = asyncio.get_running_loop().call_later(self._server.limits.read_s, self.transport.abort)

    def resume_writing(self) -> None:
        self._server.unread -= self._unread
        self._unread = 0
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
            if not self.transport.is_closing():
                asyncio.get_running_loop().call_soon(self._go_on)

    def _within(self, seconds: float, otherwise: Any = None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(seconds, otherwise or self.transport.abort)


def _head(status: int, index: int, size: int | None, keep: bool, chunks: bool = True) -> bytes:
    lines = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        "Content-Type: application/json",
        f"X-Etcd-Index: {index}",
    ]
    if size is not None:
        lines.append(f"Content-Length: {size}")
    elif chunks:
        lines.append("Transfer-Encoding: chunked")
    if not keep:
        lines.append("Connection: close")
    return "\r\n".join([*lines, "", ""]).encode()


def _json(body: dict[str, Any]) -> bytes:
    return json.dumps(body, separators=(",", ":")).encode() + b"\n"

"""HTTP over raw sockets, as fast as one process can: what is measured is the server, not a client library.

python -m bench.load PORT PATH COUNT    holds COUNT long polls on an object (token on standard input) until killed
"""

from __future__ import annotations

import re
import selectors
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class _Caller:
    """One connection with one request under way."""

    sock: socket.socket
    sent_at: float = 0.0
    buffer: bytearray = field(default_factory=bytearray)


@dataclass
class Tally:
    answers: int = 0
    errors: int = 0
    took_s: float = 0.0
    latencies_s: list[float] = field(default_factory=list)

    @property
    def per_s(self) -> float:
        return self.answers / self.took_s if self.took_s else 0.0


def request(method: str, path: str, token: str, body: bytes = b"", content_type: str = "application/json") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: bench\r\nAuthorization: Bearer {token}\r\n"
    if body:
        head += f"Content-Type: {content_type}\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"\r\n" + body


def drive(port: int, make: Callable[[int], bytes], *, connections: int, seconds: float) -> Tally:
    """Keep that many requests under way for that long."""
    tally, select = Tally(), selectors.DefaultSelector()
    count = 0
    for _ in range(connections):
        sock = socket.create_connection(("127.0.0.1", port))
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        caller = _Caller(sock)
        select.register(sock, selectors.EVENT_READ, caller)
        _send(caller, make(count))
        count += 1
    begun = time.perf_counter()
    until = begun + seconds
    while time.perf_counter() < until or not tally.answers:  # a busy machine may give no answer in a short time
        for key, _ in select.select(timeout=1.0):
            caller = key.data
            data = caller.sock.recv(1 << 20)
            if not data:
                raise ConnectionError("the server closed a connection")
            caller.buffer += data
            status = _complete(caller.buffer)
            if status is None:
                continue
            tally.answers += 1
            tally.errors += status >= 400
            tally.latencies_s.append(time.perf_counter() - caller.sent_at)
            _send(caller, make(count))
            count += 1
    tally.took_s = time.perf_counter() - begun
    for key in list(select.get_map().values()):
        key.data.sock.close()
    return tally


def _send(caller: _Caller, data: bytes) -> None:
    caller.sent_at = time.perf_counter()
    caller.sock.sendall(data)


def _complete(buffer: bytearray) -> int | None:
    """The status of an answer that is there in full; it is taken out of the buffer."""
    end = buffer.find(b"\r\n\r\n")
    if end < 0:
        return None
    head = bytes(buffer[:end]).lower()
    at = head.find(b"content-length:")
    length = int(head[at + 15 : head.find(b"\r\n", at) if head.find(b"\r\n", at) > 0 else None]) if at >= 0 else 0
    if len(buffer) < end + 4 + length:
        return None
    del buffer[: end + 4 + length]
    return int(head[9:12])


def hold(port: int, path: str, token: str, count: int) -> None:
    """Long polls that are asked again as soon as they are answered, each for what is newer than it has seen."""
    select = selectors.DefaultSelector()
    for _ in range(count):
        sock = socket.create_connection(("127.0.0.1", port))
        caller = _Caller(sock)
        select.register(sock, selectors.EVENT_READ, caller)
        _send(caller, request("GET", f"{path}?resourceVersion=0&timeoutSeconds=60", token))
    print("holding", flush=True)
    while True:
        for key, _ in select.select():
            caller = key.data
            data = caller.sock.recv(1 << 16)
            if not data:
                return
            caller.buffer += data
            seen = re.search(rb'"resourceVersion": ?"(\d+)"', bytes(caller.buffer))
            if _complete(caller.buffer) is not None and seen is not None:
                _send(caller, request("GET", f"{path}?resourceVersion={int(seen[1])}&timeoutSeconds=60", token))


if __name__ == "__main__":
    hold(int(sys.argv[1]), sys.argv[2], sys.stdin.readline().strip(), int(sys.argv[3]))

"""Servers that do what a server should not. Each is a function of one connection; none of them ever says ready."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator

STOP = threading.Event  # set when the test is over
Behaviour = Callable[[socket.socket, STOP], None]
STEP_S = 0.05


def hangs(client: socket.socket, over: STOP) -> None:
    over.wait()


def closes_at_once(client: socket.socket, over: STOP) -> None:
    pass


def resets(client: socket.socket, over: STOP) -> None:
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def speaks_garbage(client: socket.socket, over: STOP) -> None:
    client.recv(4096)
    client.sendall(bytes(range(256)) * 16 + b"\r\n\r\n")


def speaks_garbage_without_end(client: socket.socket, over: STOP) -> None:
    while not over.is_set():
        client.sendall(b"\0" * 65536)


def speaks_tls(client: socket.socket, over: STOP) -> None:
    client.recv(4096)
    client.sendall(b"\x15\x03\x01\x00\x02\x02\x46")


def drips_a_head(client: socket.socket, over: STOP) -> None:
    client.recv(4096)
    for byte in b"HTTP/1.1 200 OK\r\n" + b"X-Slow: yes\r\n" * 1000:
        client.sendall(bytes([byte]))
        if over.wait(STEP_S / 10):
            return


def drips_headers(client: socket.socket, over: STOP) -> None:
    client.recv(4096)
    client.sendall(b"HTTP/1.1 200 OK\r\n")
    while not over.wait(STEP_S):
        client.sendall(b"X-Slow: yes\r\n")


def sends_headers_without_end(client: socket.socket, over: STOP) -> None:
    client.recv(4096)
    client.sendall(b"HTTP/1.1 200 OK\r\n")
    while not over.is_set():
        client.sendall(b"X-Long: " + b"x" * 4096 + b"\r\n")


def goes_on_with_100(client: socket.socket, over: STOP) -> None:
    client.recv(4096)
    while not over.wait(STEP_S):
        client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")


def redirects_to_itself(client: socket.socket, over: STOP) -> None:
    asked = client.recv(4096).split(b" ")[1]
    client.sendall(b"HTTP/1.1 302 Found\r\nLocation: " + asked + b"\r\nContent-Length: 0\r\n\r\n")


def sends_a_body_without_end(client: socket.socket, over: STOP) -> None:
    client.recv(4096)
    client.sendall(b"HTTP/1.1 404 Not Found\r\nX-Etcd-Index: 1\r\n\r\n")
    while not over.is_set():
        client.sendall(b"x" * 65536)


def drips_a_body(client: socket.socket, over: STOP) -> None:
    client.recv(4096)
    client.sendall(b"HTTP/1.1 500 Oh\r\nTransfer-Encoding: chunked\r\n\r\n")
    while not over.wait(STEP_S):
        client.sendall(b"1\r\nx\r\n")


def lies_about_its_length(client: socket.socket, over: STOP) -> None:
    client.recv(4096)
    client.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 99999\r\nX-Etcd-Index: -7\r\n\r\nshort")


def has_a_huge_index(client: socket.socket, over: STOP) -> None:
    client.recv(4096)
    client.sendall(b"HTTP/1.1 404 Not Found\r\nX-Etcd-Index: " + b"9" * 5000 + b"\r\nContent-Length: 0\r\n\r\n")


def fails(client: socket.socket, over: STOP) -> None:
    client.recv(4096)
    client.sendall(b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n")


def speaks_http_9(client: socket.socket, over: STOP) -> None:
    client.recv(4096)
    client.sendall(b"HTTP/9.9 200 OK\r\n\r\n")


def has_no_status(client: socket.socket, over: STOP) -> None:
    client.recv(4096)
    client.sendall(b"HTTP/1.1 \r\n\r\nHTTP/1.1 200 OK\r\n\r\n")


def wakes_without_end(client: socket.socket, over: STOP) -> None:
    """Long polls end at once, as with a server that knows no waiting but says 200."""
    asked = client.recv(4096).split(b" ")[1]
    found = b"200 OK" if b"wait=true" in asked else b"404 Not Found"
    client.sendall(b"HTTP/1.1 " + found + b"\r\nContent-Length: 2\r\n\r\n{}")


BEHAVIOURS: list[Behaviour] = [
    hangs,
    closes_at_once,
    resets,
    speaks_garbage,
    speaks_garbage_without_end,
    speaks_tls,
    drips_a_head,
    drips_headers,
    sends_headers_without_end,
    goes_on_with_100,
    redirects_to_itself,
    sends_a_body_without_end,
    drips_a_body,
    lies_about_its_length,
    has_a_huge_index,
    fails,
    speaks_http_9,
    has_no_status,
    wakes_without_end,
]


class Hostile:
    """A behaviour on a port."""

    def __init__(self, behaviour: Behaviour) -> None:
        self._behaviour = behaviour
        self._over = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._listener.settimeout(0.1)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.asked = 0
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while not self._over.is_set():
            with contextlib.suppress(TimeoutError):
                client, _ = self._listener.accept()
                self.asked += 1
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        client.settimeout(5)
        with client, contextlib.suppress(OSError, IndexError):
            self._behaviour(client, self._over)

    def close(self) -> None:
        self._over.set()
        self._thread.join(5)
        self._listener.close()


@contextlib.contextmanager
def hostile(behaviour: Behaviour) -> Iterator[Hostile]:
    server = Hostile(behaviour)
    try:
        yield server
    finally:
        server.close()

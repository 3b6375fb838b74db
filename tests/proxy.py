"""A TCP relay that can stop relaying without closing anything: a partition for one process."""

from __future__ import annotations

import contextlib
import socket
import threading


class Proxy:
    """Relays 127.0.0.1:port to a target until `cut()`; then bytes are swallowed and new connections get no answer."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._open = threading.Event()
        self._open.set()
        self._sockets: list[socket.socket] = []
        self.seen = bytearray()  # all that passed
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> None:
        self._open.clear()

    def heal(self) -> None:
        self._open.set()

    def close(self) -> None:
        self._server.close()
        for one in self._sockets:
            one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                self._sockets.append(near)
                threading.Thread(target=self._serve, args=(near,), daemon=True).start()

    def _serve(self, near: socket.socket) -> None:
        self._open.wait()
        try:
            far = socket.create_connection(self._target)
        except OSError:
            near.close()
            return
        self._sockets.append(far)
        for source, sink in ((near, far), (far, near)):
            threading.Thread(target=self._pump, args=(source, sink), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if self._open.is_set():
                    self.seen += data
                    sink.sendall(data)
            if self._open.is_set():
                sink.shutdown(socket.SHUT_WR)

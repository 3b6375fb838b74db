"""Real servers of the v2 key API: Debian's etcd as a process, our own on a thread. One face for both."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote, urlencode

from muster.mesh.serving import KeyServer

ETCD = shutil.which("etcd")
NO_ETCD = "etcd is not installed (Debian: etcd-server)"
START_S = 20.0


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: Any

    @property
    def index(self) -> int:
        return int(self.headers["x-etcd-index"])


def ask(
    address: str,
    method: str,
    path: str,
    query: str = "",
    *,
    token: str = "",
    **form: str,
) -> Answer:
    """One request for a key, as any client of etcd sends it."""
    connection = http.client.HTTPConnection(address, timeout=10)
    body = urlencode(form) if form else None
    headers = {"Content-Type": "application/x-www-form-urlencoded"} if form else {}
    if token:
        headers["Authorization"] = f"Bearer {token}"
    with contextlib.closing(connection):
        target = f"/v2/keys/{quote(path)}" + (f"?{query}" if query else "")
        connection.request(method, target, body, headers)
        answer = connection.getresponse()
        text = answer.read()
        kept = {name.lower(): value for name, value in answer.getheaders()}
        return Answer(answer.status, kept, json.loads(text) if text else None)


class Server(Protocol):
    address: str

    def start(self) -> None: ...

    def stop(self) -> None: ...


class Etcd:
    """Keeps its keys and its port over `stop` and `start`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.address = f"127.0.0.1:{free_port()}"

    def start(self) -> None:
        assert ETCD is not None
        mine, peers = f"http://{self.address}", f"http://127.0.0.1:{free_port()}"
        words = ["--enable-v2=true", "--data-dir", str(self._folder / "etcd"), "--log-outputs", "stderr"]
        words += ["--listen-client-urls", mine, "--advertise-client-urls", mine, "--listen-peer-urls", peers]
        words += ["--initial-advertise-peer-urls", peers, "--initial-cluster", f"default={peers}"]
        with (self._folder / "etcd.log").open("ab") as log:
            self._process = subprocess.Popen([ETCD, "--logger", "zap", *words], stdout=log, stderr=log)
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if ask(self.address, "GET", "").status == 200:
                    return
            assert time.monotonic() < deadline and self._process.poll() is None, "etcd does not start"
            time.sleep(0.02)

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """It accepts connections, and answers none."""
        assert self._process is not None
        self._process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGCONT)


class Embedded:
    """Keeps its port, and nothing else, over `stop` and `start`."""

    def __init__(self, port: int = 0, **options: Any) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._options = options
        self.server = KeyServer(port=port, **options)
        self.address = ""

    def start(self) -> None:
        if self.address:
            self.server = KeyServer(port=int(self.address.rpartition(":")[2]), **self._options)
        self.address = self.run(self.server.start())

    def stop(self) -> None:
        self.run(self.server.stop())

    def close(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)
        self._loop.close()

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)


@contextlib.contextmanager
def etcd(folder: Path) -> Iterator[Etcd]:
    server = Etcd(folder)
    server.start()
    try:
        yield server
    finally:
        server.stop()


@contextlib.contextmanager
def embedded(**options: Any) -> Iterator[Embedded]:
    server = Embedded(**options)
    server.start()
    try:
        yield server
    finally:
        server.close()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])

"""An overlay that a test holds in its hand: one address for all workers, which lets probes through or does not.

It reads whom a probe wants and passes it on to that worker's own port. With `mesh.probeAddress` set to its address,
workers cannot bind it, and reach each other only through it.
"""

from __future__ import annotations

import asyncio
import json
import socketserver
import threading
from collections.abc import Callable
from pathlib import Path
from socket import create_connection
from typing import Any

from muster.types.frames import AskFrame
from muster.types.world import RunId
from muster.world.connection import CoordinatorRefused, ask
from muster.world.wire import parse_address
from tests.plane import Plane


class Switchboard:
    def __init__(self, plane: Plane) -> None:
        self._plane = plane
        self._members: dict[str, dict[str, Any]] = {}
        self.passes: Callable[[str, str], bool] = lambda source, target: True
        board = self

        class Handler(socketserver.StreamRequestHandler):
            def handle(self) -> None:
                hello = self.rfile.readline(1024)
                if answer := board._connect(hello):
                    self.wfile.write(answer)

        self._server = socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()
        self.address = f"127.0.0.1:{self._server.server_address[1]}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)

    def cut(self, *targets: str) -> None:
        """Nobody reaches these."""
        self.passes = lambda source, target: target not in targets

    def _connect(self, hello: bytes) -> bytes:
        wanted = json.loads(hello)
        if wanted["to"] not in self._members or wanted["from"] not in self._members:
            self._look()
        source, target = self._members.get(wanted["from"]), self._members.get(wanted["to"])
        if source is None or target is None or not self.passes(source["name"], target["name"]):
            return b""
        _, plain = target["paths"]
        with create_connection(tuple(plain), 1.0) as line:
            line.sendall(hello)
            return line.makefile("rb").readline(1024)

    def _look(self) -> None:
        """Who is a member of any training, as its coordinator shows it."""
        address = parse_address((self._plane.home / "coordinator.addr").read_text().strip())
        runs = {run for pid in self._plane.worker_pids().values() if (run := _run_of(pid)) is not None}
        for run_id, token in runs:
            try:
                view = asyncio.run(ask([address], RunId(run_id), AskFrame(ask="show"), token=token, timeout_s=2.0))
            except (CoordinatorRefused, TimeoutError):
                continue
            self._members |= {one["member_id"]: one for one in view["members"] if one["paths"]}


def _run_of(pid: int) -> tuple[str, str] | None:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
        env = dict(line.partition("=")[::2] for line in Path(f"/proc/{pid}/environ").read_text().split("\0"))
    except OSError:
        return None
    return words[words.index("--run-id") + 1], env["MUSTER_RUN_TOKEN"]

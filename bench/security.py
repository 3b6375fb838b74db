"""What does it cost when somebody tries to stop it? A reader of a huge log, a silent crowd, a storm of kills.

python -m bench.security [--json] [--only PART]
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

from bench import report
from bench.report import Figure, p50, p99
from muster.server.auth import Tokens
from tests.control.storm import storm
from tests.fleet import eventually
from tests.plane import Plane, reasons

DESCRIPTORS, CLIENTS = 1_024, 8


@contextlib.contextmanager
def a_plane(files: str = "") -> Iterator[Plane]:
    folder = Path(tempfile.mkdtemp(prefix="muster-bench-"))
    plane = Plane(folder)
    plane.serve(files=files)
    try:
        yield plane
    finally:
        plane.close()
        shutil.rmtree(folder, ignore_errors=True)


def place(plane: Plane) -> tuple[str, int]:
    split = urlsplit(plane.url)
    return str(split.hostname), int(split.port or 0)


# A reader ----------------------------------------------------------------------------------------


def reader(given: argparse.Namespace) -> Iterator[Figure]:
    """Let a viewer read a huge log as fast as the server sends it, while trainings of one worker each run."""
    huge = int(given.gb * (1 << 30))
    with a_plane() as plane:
        viewer = Tokens(plane.home).create("viewer", "viewer")
        command = [sys.executable, "-c", f"import os; os.write(1, b'first'); os.ftruncate(1, {huge})"]
        plane.train("huge", world=(1, 1, 1), command=command, log_bytes=0).result(timeout=60)
        trainings = [plane.train(f"t{index}", world=(1, 1, 1)) for index in range(given.trainings)]
        for training in trainings:
            training.wait_until_target_world(timeout=120)
        plane.started(0, given.trainings)
        over = threading.Event()
        delays: list[float] = []
        asking = threading.Thread(target=_ask, args=(plane, over, delays))
        asking.start()
        began = time.monotonic()
        taken = _take(plane, viewer)
        took = time.monotonic() - began
        over.set()
        asking.join()
        plane.go()
        for training in trainings:
            training.result(timeout=120)
        told = [reason for training in trainings for reason in reasons(training)]
        silent = told.count("WorkerLost") + told.count("RoundReleased") - given.trainings
    note = f"{taken / 1e9:.1f} GB in {took:.0f} s"
    beside: dict[str, Any] = {"samples": len(delays), "worst": round(max(delays) * 1e3, 1)}
    name = f"/healthz while a viewer reads {given.gb:g} GB and {given.trainings} trainings run"
    yield Figure(f"{name}, p50", p50(delays) * 1e3, "ms", "-", taken >= huge, note=note, **beside)
    value = p99(delays) * 1e3
    yield Figure(f"{name}, p99", value, "ms", "≤ 50 ms", value <= 50 and taken >= huge, note=note, **beside)
    yield Figure("workers silent, and rounds beyond the first, meanwhile", silent, "", "0", silent == 0)


def _take(plane: Plane, token: str) -> int:
    with socket.create_connection(place(plane), timeout=60) as opened:
        path = "/v1/namespaces/default/trainings/huge/logs"
        opened.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\r\n".encode())
        taken, buffer, tail = 0, bytearray(1 << 20), b""
        while not tail.endswith(b"0\r\n\r\n") and (count := opened.recv_into(buffer)):
            taken += count
            tail = (tail + bytes(buffer[max(0, count - 8) : count]))[-8:]
        return taken


def _ask(plane: Plane, over: threading.Event, delays: list[float]) -> None:
    """Every 20 ms, each time over a connection of its own."""
    while not over.wait(0.02):
        began = time.monotonic()
        connection = http.client.HTTPConnection(*place(plane), timeout=60)
        with contextlib.closing(connection):
            connection.request("GET", "/healthz")
            assert connection.getresponse().status == 200
        delays.append(time.monotonic() - began)


# A crowd -----------------------------------------------------------------------------------------


def crowd(given: argparse.Namespace) -> Iterator[Figure]:
    """Open connections without a token at 1,024 descriptors: half send nothing, half send a byte now and then."""
    count = given.connections
    with a_plane(files=f"-n {DESCRIPTORS}") as plane, contextlib.ExitStack() as stack:
        training = plane.train(world=(2, 2, 2), spares=1)
        training.wait_until_target_world(timeout=60)
        plane.started(0, 2)
        assert plane.daemon is not None
        said = len(plane.daemon.text)
        slow = [stack.enter_context(_came(plane, b"GET /v1/trainings HTTP/1.1\r\nX-Slow: ")) for _ in range(count // 2)]
        idle = [stack.enter_context(_came(plane, b"")) for _ in range(count - len(slow))]
        assert len(idle) + len(slow) == count
        delays, failed, until = [], 0, time.monotonic() + given.seconds
        while time.monotonic() < until:
            for one in slow[:: max(1, len(slow) // 50)]:
                with contextlib.suppress(OSError):
                    one.send(b"x")
            began = time.monotonic()
            asked = plane.muster("ps")
            failed += asked.wait(60) != 0
            delays.append(time.monotonic() - began)
        plane.kill_worker("demo-0")
        plane.started(1, 2)
        eventually(lambda: len(plane.worker_pids()) == 3, "another worker is started", 60)
        grown = len(plane.daemon.text) - said
        rounds = reasons(training).count("RoundReleased")
        plane.go()
        training.result(timeout=60)
    beside: dict[str, Any] = {"samples": len(delays), "worst": round(max(delays) * 1e3)}
    name = f"`muster ps` beside {count} idle and slow connections at {DESCRIPTORS} descriptors"
    yield Figure(f"{name}, p50", p50(delays) * 1e3, "ms", "it works", failed == 0, note=f"{failed} failed", **beside)
    yield Figure("its log grew by", grown / 1e3, "kB", "< 100 kB", grown < 100_000)
    yield Figure("rounds, with one worker killed meanwhile", rounds, "", "2", rounds == 2)


def _came(plane: Plane, words: bytes) -> socket.socket:
    made = socket.create_connection(place(plane), timeout=10)
    with contextlib.suppress(ConnectionError):
        made.sendall(words)
    return made


# A storm -----------------------------------------------------------------------------------------


def deaths(given: argparse.Namespace) -> Iterator[Figure]:
    """kill -9 of the control plane at random moments while clients submit, scale, cancel, delete and wait."""
    with a_plane() as plane:
        tally = storm(plane, Random(1), given.kills, CLIENTS)
    note = f"{tally.kills} × kill -9, {CLIENTS} clients, {tally.writes} accepted writes"
    for what in ("lost", "duplicates", "orphans", "unknown"):
        count = len(getattr(tally, what))
        yield Figure(f"kill -9 of the control plane in a storm: {what}", count, "", "0", count == 0, note=note)


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--gb", type=float, default=15.0, help="size of the log of the part `reader`, in GiB (15)")
    parser.add_argument("--trainings", type=int, default=20, help="trainings that run during that part (20)")
    parser.add_argument("--connections", type=int, default=1000, help="connections of the part `crowd` (1000)")
    parser.add_argument("--seconds", type=float, default=20.0, help="length of that part (20)")
    parser.add_argument("--kills", type=int, default=200, help="kills of the part `storm` (200)")


if __name__ == "__main__":
    sys.exit(report.run(__doc__ or "", {"reader": reader, "crowd": crowd, "storm": deaths}, _options))

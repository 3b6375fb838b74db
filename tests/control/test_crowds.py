"""A real control plane among strangers: idle connections, slow ones, and readers of huge logs."""

from __future__ import annotations

import contextlib
import http.client
import re
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from muster import DistributedTraining
from muster.server.auth import Tokens
from muster.world import wire
from tests.control.test_found import high_water_kib
from tests.fleet import eventually
from tests.plane import Plane, reasons

HUGE = 15 << 30
A_MOMENT_S = 2.0  # on a machine with both cores busy


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Plane]:
    """A control plane that may not open more than 256 files."""
    made = Plane(tmp_path)
    made.serve(files="-n 256")
    yield made
    made.close()


def api(plane: Plane) -> tuple[str, int]:
    split = urlsplit(plane.url)
    return str(split.hostname), int(split.port or 0)


def coordinator(plane: Plane) -> tuple[str, int]:
    return wire.parse_address((plane.home / "coordinator.addr").read_text().split()[0])


def mesh(plane: Plane) -> tuple[str, int]:
    return wire.parse_address((plane.home / "mesh.addr").read_text().split()[0])


@contextlib.contextmanager
def strangers(place: tuple[str, int], count: int, words: bytes = b"") -> Iterator[list[socket.socket]]:
    with contextlib.ExitStack() as stack:
        came = [stack.enter_context(socket.create_connection(place, timeout=10)) for _ in range(count)]
        for one in came:
            with contextlib.suppress(ConnectionError):
                one.sendall(words)
        yield came


@pytest.mark.usefixtures("processes")
def test_a_crowd_that_says_nothing_keeps_nobody_from_working(small: Plane) -> None:
    training = small.train(world=(2, 2, 2))
    training.wait_until_target_world(timeout=60)
    small.started(0, 2)
    before = small.worker_pids()
    assert small.daemon is not None
    said = len(small.daemon.text)
    with (
        strangers(api(small), 300),
        strangers(api(small), 60, b"GET /v1/trainings HTTP/1.1\r\nX-Slow: "),
        strangers(coordinator(small), 150),
        strangers(mesh(small), 150),
    ):
        for _ in range(3):
            asked = small.muster("ps")
            assert asked.wait(30) == 0, asked.text
            assert "demo" in asked.text
        assert small.worker_pids() == before
        small.kill_worker("demo-0")
        eventually(lambda: len(small.worker_pids()) == 2 and small.worker_pids() != before, "another one is started")
        training.wait_until_target_world(timeout=60)
        small.started(1, 2)
        added = small.daemon.text[said:]
        assert len(added) < 100_000 and "Traceback" not in added
        assert len(re.findall("no connection can be taken", added)) <= 3
    assert reasons(training).count("RoundReleased") == 2
    small.go()
    training.result(timeout=60)


@pytest.mark.usefixtures("processes")
def test_connections_that_never_finish_a_handshake_count_too(tmp_path: Path) -> None:
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    order = f"openssl req -x509 -newkey rsa:2048 -nodes -keyout {key} -out {certificate} -subj /CN=here -days 2"
    subprocess.run([*order.split(), "-addext", "subjectAltName=IP:127.0.0.1"], check=True, capture_output=True)
    plane = Plane(tmp_path)
    try:
        daemon = plane.serve("--tls-key", key, "--tls-cert", certificate, files="-n 256")
        said = len(daemon.text)
        with strangers(api(plane), 300), strangers(api(plane), 60, b"\x16\x03\x01"):
            asked = plane.muster("ps")
            assert asked.wait(30) == 0, asked.text
        assert len(daemon.text) - said < 10_000
    finally:
        plane.close()


@pytest.mark.usefixtures("processes")
def test_workers_have_the_limit_that_the_control_plane_was_given(tmp_path: Path) -> None:
    plane = Plane(tmp_path)
    try:
        daemon = plane.serve(files="-Sn 300")
        daemon.expect("instead of 300; its workers may open 300")
        training = plane.train(world=(1, 1, 1))
        training.wait_until_target_world(timeout=60)
        [pid] = plane.worker_pids().values()
        limits = Path(f"/proc/{pid}/limits").read_text()
        assert re.search(r"Max open files +300 ", limits)
        plane.go()
        training.result(timeout=60)
    finally:
        plane.close()


# A thousand ---------------------------------------------------------------------------------------


class Crowd:
    """Connections that come again whenever they are cut off, and say their words a byte at a time."""

    def __init__(self, places: list[tuple[tuple[str, int], bytes, int]]) -> None:
        self._kinds = [(place, words) for place, words, count in places for _ in range(count)]
        self._here: dict[int, socket.socket] = {}
        self._said = [0] * len(self._kinds)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self.came = 0

    def __enter__(self) -> Crowd:
        self._round()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        for one in self._here.values():
            one.close()

    def _run(self) -> None:
        while not self._over.wait(0.5):
            self._round()

    def _round(self) -> None:
        for number in range(len(self._kinds)):
            try:
                self._say_more(number)
            except OSError:
                if (gone := self._here.pop(number, None)) is not None:
                    gone.close()

    def _say_more(self, number: int) -> None:
        place, words = self._kinds[number]
        if number not in self._here:
            self._here[number], self._said[number] = socket.create_connection(place, timeout=10), 0
            self._here[number].setblocking(False)
            self.came += 1
        line, at = self._here[number], self._said[number]
        head, _, slow = words.partition(b"|")
        if at == 0 and head:
            line.send(head)
        elif slow:
            line.send(slow[at % len(slow) : at % len(slow) + 1])
        elif not line.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT):
            raise ConnectionResetError
        self._said[number] += 1


def all_go_on(plane: Plane, training: DistributedTraining, crowd: Crowd) -> None:
    """The local user's commands work, workers stay, one that is killed is replaced, and the log stays short."""
    assert plane.daemon is not None
    said, before = len(plane.daemon.text), plane.worker_pids()
    slowest = 0.0
    for _ in range(12):
        began = time.monotonic()
        asked = plane.muster("ps")
        assert asked.wait(30) == 0 and "demo" in asked.text, asked.text
        slowest = max(slowest, time.monotonic() - began)
        assert plane.worker_pids() == before
    plane.kill_worker("demo-0")
    eventually(lambda: len(plane.worker_pids()) == 2 and plane.worker_pids() != before, "another one is started")
    training.wait_until_target_world(timeout=60)
    plane.started(1, 2)
    added = plane.daemon.text[said:]
    audit = sum(one.stat().st_size for one in plane.home.glob("audit.log*"))
    print(f"{crowd.came} came; slowest command {slowest:.2f} s; log {len(added)} B, audit {audit} B")
    assert len(added) < 100_000 and "Traceback" not in added
    assert audit < 100_000


@pytest.fixture
def thousand(tmp_path: Path) -> Iterator[tuple[Plane, DistributedTraining]]:
    """A control plane that may open 1,024 files, with a training of two workers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard if hard == resource.RLIM_INFINITY else max(soft, hard), hard))
    made = Plane(tmp_path)
    made.serve(files="-n 1024")
    training = made.train(world=(2, 2, 2))
    training.wait_until_target_world(timeout=60)
    made.started(0, 2)
    yield made, training
    made.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


HEAD = b"GET /v1/trainings HTTP/1.1\r\nHost: x\r\n"
BODY = b"POST /v1/namespaces/default/trainings HTTP/1.1\r\nHost: x\r\nContent-Length: 100000\r\n"


@pytest.mark.soak
@pytest.mark.parametrize("where", ["api", "everywhere"])
def test_a_thousand_strangers_keep_nobody_from_working(thousand: tuple[Plane, DistributedTraining], where: str) -> None:
    plane, training = thousand
    idle, slow, body = (
        (api(plane), b"", 500),
        (api(plane), HEAD + b"|X-Slow: ", 300),
        (api(plane), BODY + b"\r\n| ", 200),
    )
    if where == "everywhere":
        idle, slow = (api(plane), b"", 300), (api(plane), HEAD + b"|X-Slow: ", 100)
        others = [(coordinator(plane), b"", 250), (mesh(plane), b"", 150)]
    with Crowd([idle, slow, body, *(others if where == "everywhere" else [])]) as crowd:
        all_go_on(plane, training, crowd)
    assert reasons(training).count("RoundReleased") == 2
    plane.go()
    training.result(timeout=60)


@pytest.mark.soak
def test_a_thousand_slow_readers_and_writers_with_tokens_keep_nobody_from_working(
    thousand: tuple[Plane, DistributedTraining],
) -> None:
    plane, training = thousand
    tokens = Tokens(plane.home)
    viewer, editor = (
        f"Authorization: Bearer {tokens.create(role, role)}\r\n".encode() for role in ("viewer", "editor")
    )
    logs = b"GET /v1/namespaces/default/trainings/demo/logs?follow=true HTTP/1.1\r\nHost: x\r\n"
    crowd = Crowd(
        [
            (api(plane), logs + viewer + b"\r\n", 500),
            (api(plane), HEAD + viewer + b"\r\n", 300),
            (api(plane), BODY + editor + b"\r\n| ", 200),
        ]
    )
    with crowd:
        all_go_on(plane, training, crowd)
    plane.go()
    training.result(timeout=60)


# Readers of logs ----------------------------------------------------------------------------------


class Reader:
    """Somebody with a viewer's token who reads a log over a connection of their own."""

    def __init__(self, plane: Plane, token: str, query: str = "") -> None:
        self.socket = socket.create_connection(api(plane), timeout=10)
        path = f"/v1/namespaces/default/trainings/huge/logs{query}"
        self.socket.sendall(f"GET {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\n\r\n".encode())
        self.taken = 0

    def take(self, until: Callable[[], bool]) -> None:
        while not until():
            data = self.socket.recv(1 << 20)
            if not data:
                return
            self.taken += len(data)


def slowest_answer(plane: Plane, seconds: float) -> float:
    """The longest that anyone has to wait for word that the server is there, asked for all of that time."""
    slowest, until = 0.0, time.monotonic() + seconds
    while time.monotonic() < until:
        began = time.monotonic()
        connection = http.client.HTTPConnection(*api(plane), timeout=60)
        connection.request("GET", "/healthz")
        assert connection.getresponse().status == 200
        connection.close()
        slowest = max(slowest, time.monotonic() - began)
        time.sleep(0.02)
    return slowest


def cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / 100


def test_readers_of_a_huge_log_hold_up_nobody_and_cost_nothing_when_they_leave(plane: Plane) -> None:
    viewer = Tokens(plane.home).create("viewer", "viewer")
    other = plane.train(world=(2, 2, 2))
    other.wait_until_target_world(timeout=60)
    plane.started(0, 2)
    script = f"import os; os.write(1, b'first'); os.ftruncate(1, {HUGE})"  # nothing of it was dropped
    plane.train("huge", world=(1, 1, 1), command=[sys.executable, "-c", script]).result(timeout=60)
    assert plane.daemon is not None
    before = high_water_kib(plane.daemon.pid)
    over = threading.Event()
    readers = [Reader(plane, viewer) for _ in range(3)]
    stalled = [Reader(plane, viewer, query) for query in ("", "?follow=true", "?tail=9", "?rank=0") for _ in range(5)]
    threads = [threading.Thread(target=one.take, args=(over.is_set,)) for one in readers]
    for thread in threads:
        thread.start()
    try:
        assert slowest_answer(plane, 3.0) < A_MOMENT_S
    finally:
        over.set()
        for thread in threads:
            thread.join()
    assert all(one.taken for one in readers)
    assert high_water_kib(plane.daemon.pid) - before < 200 * 1024
    for one in (*readers, *stalled[:10]):
        one.socket.close()

    def is_quiet() -> bool:
        began = cpu_s(plane.daemon.pid) if plane.daemon else 0.0
        time.sleep(1.0)
        return plane.daemon is not None and cpu_s(plane.daemon.pid) - began < 0.3

    eventually(is_quiet, "nothing is read for those who left", 15)
    plane.go()
    other.result(timeout=60)
    assert "WorkerLost" not in reasons(other) and other.training.status.round == 0

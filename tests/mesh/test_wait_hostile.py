"""`mesh_wait` against servers and networks that do not: it never raises, and is back when the time is up."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

import pytest

import muster
from muster.mesh import asking
from tests.mesh.hostile import BEHAVIOURS, Behaviour, hostile, wakes_without_end

TIMEOUT_S = 0.7
MARGIN_S = 3.0  # both cores may be busy with other tests


@pytest.fixture
def waits_in_vain(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[str], None]:
    def check(endpoint: str) -> None:
        monkeypatch.setenv("NODE_NAME", "node-1")
        monkeypatch.setenv("MUSTER_MESH_ENDPOINT", endpoint)
        monkeypatch.setenv("MUSTER_MESH_POLL_S", "0.2")
        begun = time.monotonic()
        muster.mesh_wait(TIMEOUT_S)
        took_s = time.monotonic() - begun
        assert TIMEOUT_S <= took_s < TIMEOUT_S + MARGIN_S
        assert muster.mesh_status() == "timeout"
        assert "TIMEOUT" in capsys.readouterr().err.splitlines()[-1]

    return check


@pytest.mark.parametrize("behaviour", BEHAVIOURS, ids=lambda behaviour: behaviour.__name__)
def test_a_hostile_server_costs_the_timeout_and_no_more(
    behaviour: Behaviour, waits_in_vain: Callable[[str], None]
) -> None:
    with hostile(behaviour) as server:
        waits_in_vain(server.address)
        assert 2 <= server.asked < 60  # it tried, and did not storm


def test_a_200_with_a_body_without_end_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    def ready(client: socket.socket, over: threading.Event) -> None:
        asked = client.recv(4096)
        client.sendall(b"HTTP/1.1 %b\r\n\r\n" % (b"200 OK" if b"mesh-ready" in asked else b"404 Not Found"))
        while not over.is_set():
            client.sendall(b"x" * 65536)

    with hostile(ready) as server:
        monkeypatch.setenv("NODE_NAME", "node-1")
        monkeypatch.setenv("MUSTER_MESH_ENDPOINT", server.address)
        muster.mesh_wait(5)
    assert muster.mesh_status() == "ready"


def test_degraded_counts_at_the_end_when_ready_is_never_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    def half(client: socket.socket, over: threading.Event) -> None:
        if b"mesh-ready" in client.recv(4096):
            over.wait()
        client.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")

    with hostile(half) as server:
        monkeypatch.setenv("NODE_NAME", "node-1")
        monkeypatch.setenv("MUSTER_MESH_ENDPOINT", server.address)
        begun = time.monotonic()
        muster.mesh_wait(TIMEOUT_S)
    assert muster.mesh_status() == "degraded"
    assert TIMEOUT_S <= time.monotonic() - begun < TIMEOUT_S + MARGIN_S


def test_a_server_that_cannot_wait_is_asked_less_and_less(waits_in_vain: Callable[[str], None]) -> None:
    with hostile(wakes_without_end) as server:
        waits_in_vain(server.address)
        # Looks after 10, 20, 40, 80 ms, then every 0.2 s; two keys, and their long polls.
        assert server.asked < 50


@pytest.mark.parametrize("host", ["192.0.2.1", "[100::1]", "nowhere.invalid", "a..b", "x" * 70 + ".example", "0.0.0.0"])
def test_an_address_where_nobody_is_costs_the_timeout(host: str, waits_in_vain: Callable[[str], None]) -> None:
    waits_in_vain(f"{host}:9")


def test_a_full_backlog_costs_the_timeout(waits_in_vain: Callable[[str], None]) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        address = listener.getsockname()
        taken = [socket.socket() for _ in range(4)]
        for sock in taken:
            sock.setblocking(False)
            sock.connect_ex(address)
        waits_in_vain(f"127.0.0.1:{address[1]}")
        for sock in taken:
            sock.close()


@pytest.mark.parametrize("why", [OSError("no"), UnicodeError("odd"), ValueError("worse"), None])
def test_a_resolver_that_hangs_or_fails_costs_the_timeout(
    why: Exception | None, waits_in_vain: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()

    def getaddrinfo(*_: object, flags: int = 0, **__: object) -> list[asking.Address]:
        if flags:
            raise socket.gaierror("not a number")
        if why is not None:
            raise why
        over.wait(10)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    waits_in_vain("etcd.example:2379")
    over.set()


def test_a_fault_of_its_own_is_logged_and_not_raised(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("NODE_NAME", "node-1")
    monkeypatch.setenv("MUSTER_MESH_ENDPOINT", "127.0.0.1:9")
    monkeypatch.setattr(asking, "Exchange", None)
    monkeypatch.setattr("muster.mesh.wait.Exchange", None)
    muster.mesh_wait(5)
    assert muster.mesh_status() == "timeout"
    assert "mesh-wait: GAVE UP" in capsys.readouterr().err

"""The API stands still, or has more to do than it can: workers keep their leases, and their world still heals."""

from __future__ import annotations

import contextlib
import http.client
import signal
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from muster.server.auth import Tokens
from tests.fleet import eventually
from tests.plane import Plane, reasons

CROWD = 60


def no_answer(plane: Plane) -> bool:
    split = urlsplit(plane.url)
    connection = http.client.HTTPConnection(str(split.hostname), split.port, timeout=0.5)
    try:
        connection.request("GET", "/healthz")
        return connection.getresponse().status != 200
    except TimeoutError:
        return True
    finally:
        connection.close()


@pytest.mark.times(STALL_S="9")
def test_a_control_plane_that_stands_still_costs_no_lease_and_its_worlds_heal_meanwhile(plane: Plane) -> None:
    training = plane.train(world=(2, 2, 2), spares=1)
    training.wait_until_target_world(timeout=60)
    plane.started(0, 2)
    [silent] = set(plane.worker_pids()) - {f"demo-{rank}" for rank in range(2)}
    assert plane.daemon is not None
    plane.daemon.proc.send_signal(signal.SIGUSR1)
    assert no_answer(plane)
    plane.kill_worker("demo-0")
    plane.started(1, 2)
    assert no_answer(plane), "the spare had the rank before the control plane went on"
    eventually(lambda: reasons(training).count("RoundReleased") == 2, "the control plane tells of it", 30)
    training.wait_until_target_world(timeout=60)
    assert reasons(training).count("RoundReleased") == 2, f"{silent} and demo-1 kept their leases for all that time"
    plane.go()
    training.result(timeout=60)


@contextlib.contextmanager
def crowd(plane: Plane, token: str) -> Iterator[None]:
    """Readers with a good token who ask for everything again and again, as fast as they get it."""
    split, over = urlsplit(plane.url), threading.Event()

    def read() -> None:
        connection = http.client.HTTPConnection(str(split.hostname), split.port, timeout=60)
        with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
            while not over.is_set():
                connection.request("GET", "/v1/trainings", headers={"Authorization": f"Bearer {token}"})
                connection.getresponse().read()

    readers = [threading.Thread(target=read) for _ in range(CROWD)]
    for reader in readers:
        reader.start()
    try:
        yield
    finally:
        over.set()
        for reader in readers:
            reader.join()


def test_an_api_with_more_to_do_than_it_can_costs_no_worker_its_lease(plane: Plane) -> None:
    viewer = Tokens(plane.home).create("viewer", "viewer")
    training = plane.train(world=(2, 2, 2))
    training.wait_until_target_world(timeout=60)
    plane.started(0, 2)
    for index in range(20):  # whose descriptions are large
        plane.train(f"short-{index}", world=(1, 1, 1), command=["/bin/true"], env={"PADDING": "x" * 100_000})
    with crowd(plane, viewer):
        threading.Event().wait(6.0)  # six leases
    plane.go()
    training.result(timeout=120)
    assert training.training.status.round == 0 and "WorkerLost" not in reasons(training)

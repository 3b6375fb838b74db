"""Losing the control plane loses nothing."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from random import Random

import pytest

from tests.control.lives import live
from tests.control.storm import storm
from tests.fleet import eventually, gone
from tests.plane import Plane, fresh, reasons


def lives(folder: Path, seed: int, kills: int) -> None:
    plane = Plane(folder)
    try:
        live(plane, Random(seed), kills)
    except BaseException:
        print(f"seed {seed}")
        raise
    finally:
        plane.close()


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.usefixtures("processes")
def test_a_control_plane_that_dies_at_random_moments_loses_nothing(tmp_path: Path, seed: int) -> None:
    lives(tmp_path, seed, kills=4)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(10, 20))
def test_fifty_deaths_of_the_control_plane_lose_nothing(tmp_path: Path, seed: int) -> None:
    lives(tmp_path, seed, kills=5)


@pytest.mark.scenario
def test_ranks_train_on_and_are_adopted(plane: Plane) -> None:
    training = plane.train(world=(2, 2, 2), spares=1)
    training.wait_until_target_world(timeout=30)
    before, ranks = plane.worker_pids(), plane.started(0, 2)
    plane.crash()
    assert not any(gone(note["pid"]) for note in ranks), "ranks do not notice"
    plane.serve()
    assert "3 workers adopted" in (plane.daemon.text if plane.daemon else "")
    eventually(lambda: "RoundRecovered" in reasons(training), "the round goes on")
    assert fresh(training).training.status.round == 0
    assert plane.worker_pids() == before
    plane.go()
    training.result(timeout=30)
    assert len(plane.told("start")) == 2, "nothing ran twice"
    plane.no_worker_left()


def test_workers_that_die_while_nobody_looks_are_replaced_and_their_time_is_closed(plane: Plane) -> None:
    training = plane.train(world=(2, 2, 2))
    training.wait_until_target_world(timeout=30)
    plane.crash()
    for pid in plane.worker_pids().values():
        os.kill(pid, signal.SIGKILL)
    eventually(lambda: not plane.worker_pids(), "they are gone")
    plane.serve()
    eventually(lambda: len(plane.worker_pids()) == 2, "two others run")
    assert set(plane.worker_pids()) == {"demo-2", "demo-3"}, "a replacement has a new name"
    training.wait_until_target_world(timeout=30)
    plane.go()
    training.result(timeout=30)
    used = training.usage()
    assert used.workers == 4 and used.running == 0


@pytest.mark.scenario
def test_exits_are_collected_from_workers_that_outlived_the_control_plane(plane: Plane) -> None:
    """All ranks end while it is away: their workers hold on to how."""
    training = plane.train(world=(2, 2, 2))
    training.wait_until_target_world(timeout=30)
    ranks = plane.started(0, 2)
    plane.crash()
    plane.go()
    eventually(lambda: all(gone(note["pid"]) for note in ranks), "the ranks are done")
    plane.serve()
    training.result(timeout=30)
    assert [one.exit_code for one in training.rank_exits] == [0, 0]
    assert fresh(training).training.status.round == 0


@pytest.mark.usefixtures("processes")
def test_a_control_plane_whose_ports_are_taken_moves_and_is_found(tmp_path: Path) -> None:
    import socket
    from urllib.parse import urlsplit

    plane = Plane(tmp_path)
    taken = []
    try:
        plane.serve()
        training = plane.train(world=(1, 1, 1))
        training.wait_until_target_world(timeout=30)
        api = urlsplit(plane.url).port
        desk = int((plane.home / "coordinator.addr").read_text().rpartition(":")[2])
        plane.crash()
        for port in (api, desk):
            assert port is not None
            holder = socket.socket()
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            holder.bind(("127.0.0.1", port))
            holder.listen()
            taken.append(holder)
        plane.serve()
        assert urlsplit(plane.url).port != api
        plane._client = None
        again = plane.client.get("demo")
        eventually(lambda: "RoundRecovered" in reasons(again), "its worker has found the coordinator again")
        plane.go()
        again.result(timeout=30)
    finally:
        for holder in taken:
            holder.close()
        plane.close()


@pytest.mark.scenario
def test_a_second_control_plane_for_the_same_home_is_refused(plane: Plane) -> None:
    import sys

    second = plane.start(sys.executable, "-m", "muster.daemon", "--home", str(plane.home))
    assert second.wait() == 1
    assert "another control plane" in second.text and "muster server status" in second.text


def test_a_worker_that_stands_still_is_replaced(plane: Plane) -> None:
    training = plane.train(world=(2, 2, 2))
    training.wait_until_target_world(timeout=30)
    stopped = plane.worker_pids()["demo-0"]
    os.kill(stopped, signal.SIGSTOP)
    eventually(lambda: "demo-2" in plane.worker_pids(), "another one is started", 40)
    eventually(lambda: gone(stopped), "and it is ended")
    training.wait_until_target_world(timeout=30)
    plane.go()
    training.result(timeout=30)


@pytest.mark.soak
@pytest.mark.parametrize("seed", [1])
def test_a_storm_of_eight_clients_loses_nothing_through_two_hundred_deaths(tmp_path: Path, seed: int) -> None:
    plane = Plane(tmp_path)
    try:
        plane.serve()
        tally = storm(plane, Random(seed), kills=200, clients=8)
        assert not tally.wrong, tally
        print(f"{tally.kills} kills, {tally.writes} writes accepted, {tally.unanswered} not answered, nothing lost")
    finally:
        plane.close()

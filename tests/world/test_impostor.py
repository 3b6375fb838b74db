"""Somebody else takes the place of a coordinator that was killed: what members believe, and that ranks go on."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from muster.types.frames import Frame, HelloFrame, WelcomeFrame
from muster.types.world import RunId, Settings
from muster.world import wire
from muster.world.connection import Address, Connection, CoordinatorRefused
from muster.world.service import Coordinator
from tests.fleet import Fleet, eventually, gone
from tests.plane import Plane
from tests.world.impostors import GUISES, Impostor

TOKEN = "right"


def test_workers_train_on_whatever_an_impostor_says_and_find_their_coordinator_again(fleet: Fleet) -> None:
    """0.1.0 had both workers leave at the first `dismiss`. One worker alone has nobody who could go on instead."""
    fleet.env["MUSTER_RUN_TOKEN"] = TOKEN
    coordinator = fleet.coordinator()
    nodes = [fleet.node("a", "--nnodes", "1", "--nproc", "2", "--max-restarts", "0", "--lease-s", "2")]
    ranks = [int(note["pid"]) for note in fleet.started(0, 2)]
    coordinator.kill()
    coordinator.wait()
    impostor = Impostor((fleet.host, fleet.port), *GUISES)
    begun = time.monotonic()
    eventually(lambda: impostor.visits.keys() == GUISES.keys(), f"every guise was seen; {impostor.visits}")
    eventually(lambda: time.monotonic() - begun > 5, "more than two leases have passed")
    assert not [pid for pid in ranks if gone(pid)]
    assert [node.proc.poll() for node in nodes] == [None], [node.text for node in nodes]
    impostor.close()
    fleet.coordinator()
    fleet.training(0, 1)
    assert not [pid for pid in ranks if gone(pid)]
    fleet.go()
    assert [node.wait() for node in nodes] == [0], [node.text for node in nodes]
    assert len(fleet.told("start")) == 2, "the first round was the only one"


class Member:
    """A connection, and what it hands on."""

    def __init__(self, address: tuple[str, int], *, token: str | None = TOKEN, kind: str = "control") -> None:
        self.heard: list[Frame] = []
        self.dead = Counter[str]()
        self.welcomed = asyncio.Event()
        self.connection = Connection(
            lambda: [address],
            RunId("run"),
            kind,
            token=token,
            hello=lambda local: HelloFrame(),
            on_frame=self._hear,
            on_dead=lambda: self.dead.update(["dead"]),
        )
        self.task = asyncio.create_task(self.connection.run())

    def _hear(self, frame: Frame) -> None:
        self.heard.append(frame)
        if isinstance(frame, WelcomeFrame):
            self.welcomed.set()

    async def leave(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


async def a_coordinator(at: Address = ("127.0.0.1", 0), token: str | None = TOKEN) -> tuple[Coordinator, Address]:
    coordinator = Coordinator(token=token)
    coordinator.open_run(RunId("run"), Settings())
    return coordinator, await coordinator.start(*at)


async def until(look: Callable[[], bool], what: str) -> None:
    async with asyncio.timeout(20):
        while not look():
            await asyncio.sleep(0.005)
    assert look(), what


MAY_BE_OURS = {"speaks another version", "has no room"}


@pytest.mark.parametrize("guise", GUISES)
def test_a_member_that_was_welcomed_once_is_moved_by_no_guise(guise: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.world.connection.LOOK_S", 0.05)

    async def scenario() -> None:
        coordinator, address = await a_coordinator()
        member = Member(address)
        await asyncio.wait_for(member.welcomed.wait(), 10)
        await coordinator.stop()
        impostor = Impostor(address, guise)
        await until(lambda: impostor.visits[guise] >= 2 or guise == "says nothing", "it came twice")
        await until(lambda: impostor.visits[guise] >= 1, "it came")
        member.dead.clear()
        if guise in MAY_BE_OURS:
            visits = impostor.visits[guise]
            await until(lambda: impostor.visits[guise] >= visits + 3, "it comes again")
            assert not member.dead
        else:
            await until(lambda: member.dead["dead"] >= 2, "ranks may go on")
        assert not member.task.done() and not member.connection.up
        assert [frame.type for frame in member.heard] == ["welcome"]
        impostor.close()
        member.welcomed.clear()
        again, _ = await a_coordinator(address)
        await asyncio.wait_for(member.welcomed.wait(), 10)
        await member.leave()
        await again.stop()

    asyncio.run(scenario())


def test_a_coordinator_that_stands_still_is_not_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("muster.world.connection.LOOK_S", 0.02)
    monkeypatch.setattr("muster.world.connection.WELCOME_TIMEOUT_S", 0.1)

    async def scenario() -> None:
        coordinator, address = await a_coordinator()
        member = Member(address)
        await asyncio.wait_for(member.welcomed.wait(), 10)
        came = []
        monkeypatch.setattr(coordinator._strangers, "arrive", lambda taken, *_: came.append(taken))
        for channel in list(coordinator._protocol_of):
            channel.close()
        await until(lambda: bool(came), "it comes back")
        member.dead.clear()
        await until(lambda: len(came) > 3, "it gives up and comes again")
        assert not member.dead
        await member.leave()
        for taken in came:
            taken.close()
        await coordinator.stop()

    asyncio.run(scenario())


def test_a_name_with_an_address_of_somebody_else_leads_to_the_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    """`localhost` is ::1 and 127.0.0.1: where the coordinator listens on one, anybody can have the other."""
    monkeypatch.setattr("muster.world.connection.ELSEWHERE_S", 0.2)

    async def scenario() -> None:
        coordinator, address = await a_coordinator()
        port = address[1]
        impostor = Impostor(("127.0.0.2", port), "welcomes and dismisses")
        there = [(0, 0, 0, "", (host, port)) for host in ("127.0.0.2", "127.0.0.1")]

        async def lookup(*_: object, **__: object) -> object:
            return there

        monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", lookup)
        member = Member(("both", port))
        await asyncio.wait_for(member.welcomed.wait(), 10)
        assert impostor.visits.total() == 1
        await coordinator.stop()
        await until(lambda: impostor.visits.total() > 4, "it looks everywhere")
        assert member.dead, "where it last was, nobody listens"
        again, _ = await a_coordinator(address)
        member.welcomed.clear()
        await asyncio.wait_for(member.welcomed.wait(), 10)
        await member.leave()
        await again.stop()
        lost = Member(("both", port))
        with pytest.raises(CoordinatorRefused, match="has not proved to know the run token"):
            await asyncio.wait_for(lost.task, 10)
        impostor.close()

    asyncio.run(scenario())


IN_ANOTHER_NAME = """
import os, sys
from tests.world.impostors import Impostor
os.setuid(65534)
impostor = Impostor(("127.0.0.1", int(sys.argv[1])), *sys.argv[2:])
print("listens", flush=True)
sys.stdin.read()
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs to be root to be somebody else")
def test_another_user_cannot_pass_for_a_coordinator_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the coordinator itself may say is believed of nobody whom the kernel knows to be another."""
    monkeypatch.setattr("muster.world.connection.LOOK_S", 0.05)
    root = Path(__file__).parents[2]

    async def scenario() -> None:
        coordinator, address = await a_coordinator()
        member = Member(address)
        await asyncio.wait_for(member.welcomed.wait(), 10)
        await coordinator.stop()
        guises = ("has no room", "speaks another version", "says nothing", "closes")
        command = [sys.executable, "-c", IN_ANOTHER_NAME, str(address[1]), *guises]
        env = {**os.environ, "PYTHONPATH": f"{root}:{root / 'src'}", "PYTHONDONTWRITEBYTECODE": "1"}
        other = await asyncio.create_subprocess_exec(
            *command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, cwd="/"
        )
        assert other.stdout is not None
        assert await asyncio.wait_for(other.stdout.readline(), 20) == b"listens\n"
        member.dead.clear()
        await until(lambda: member.dead["dead"] >= 8, "ranks may go on")
        assert not member.task.done() and [frame.type for frame in member.heard] == ["welcome"]
        await member.leave()
        other.kill()
        await other.wait()

    asyncio.run(scenario())


def test_a_coordinator_that_is_stopped_has_not_died(fleet: Fleet) -> None:
    """It may have given ranks away when it wakes, so they end with their lease, proof or no proof."""
    fleet.env["MUSTER_RUN_TOKEN"] = TOKEN
    coordinator = fleet.coordinator()
    node = fleet.node("a", "--nnodes", "1", "--lease-s", "1")
    (rank,) = [int(note["pid"]) for note in fleet.started(0, 1)]
    coordinator.kill(signal.SIGSTOP)
    node.expect("the coordinator is silent: ending ranks")
    eventually(lambda: gone(rank), "its lease is over")
    coordinator.kill(signal.SIGCONT)
    fleet.started(1, 1)
    fleet.go()
    assert node.wait() == 0, node.text


def test_workers_of_a_control_plane_wait_for_it_beside_an_impostor(plane: Plane) -> None:
    """He keeps the port, so the control plane comes back on another one; its workers read that from its file."""
    training = plane.train(world=(2, 2, 2))
    training.wait_until_target_world(timeout=60)
    workers = plane.worker_pids()
    host, port = wire.parse_address((plane.home / "coordinator.addr").read_text())
    plane.crash()
    impostor = Impostor((host, port), "welcomes and dismisses", "does not know the token", "tells an outcome", "closes")
    eventually(lambda: min(impostor.visits[guise] for guise in impostor.guises) >= 2, "each has met it")
    plane.serve()
    assert wire.parse_address((plane.home / "coordinator.addr").read_text())[1] != port
    eventually(lambda: plane.client.get("demo").world.ready == 2, "its workers are back")
    assert plane.worker_pids() == workers
    plane.go()
    training.result(timeout=60)
    assert len(plane.told("start")) == 2, "the first round was the only one"
    impostor.close()

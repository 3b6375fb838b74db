"""A lifeline ends cleanly when nothing of its worker is left, and only then does its end prove anything."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from muster.types.frames import HelloFrame, Introduction
from muster.types.world import Elector, Electorate, MemberId, RunId, Settings
from muster.world import lifeline, opening
from muster.world.connection import Address
from muster.world.lifeline import Lifelines
from muster.world.protocol import RunProtocol
from muster.world.service import Coordinator
from tests.fleet import kill_all
from tests.proxy import Proxy
from tests.world.test_impostor import TOKEN, until

RUN, WORKER = RunId("run"), MemberId("m")

# An agent with one process below it, which was there before the lifeline.
PROGRAM = """
import asyncio, subprocess, sys
from muster.world import lifeline, opening
from muster.world.lifeline import Lifelines

class Opening(opening.Opening):
    def takes(self, channel, frame):
        if not super().takes(channel, frame):
            print(frame.type, flush=True)

async def main(port, wire, token):
    lifeline.Opening = Opening
    if wire == "tls":
        opening._is_direct = lambda *_: False
    lines = Lifelines("run", "m", "a", token)
    below = subprocess.Popen(["sleep", "1000"], pass_fds=[lines.descriptor])
    lines.lead_to(("127.0.0.1", int(port)))
    print(below.pid, flush=True)
    await asyncio.Event().wait()

asyncio.run(main(*sys.argv[1:]))
"""


class Agent:
    """What the coordinator has of an agent, of which nothing is asked here."""

    peer = "192.0.2.1:1"

    def send_raw(self, data: bytes) -> None: ...
    def refuse(self, code: str, message: str) -> None: ...


@asynccontextmanager
async def a_run(*, joined: bool = True) -> AsyncIterator[tuple[RunProtocol, Address]]:
    coordinator = Coordinator(token=TOKEN)
    protocol = coordinator.open_run(RUN, Settings(min=1, max=1, lease_s=600))
    address = await coordinator.start("127.0.0.1", 0)
    if joined:
        join(protocol)
    yield protocol, address
    await coordinator.stop()


def join(protocol: RunProtocol) -> None:
    hello = HelloFrame(kind="agent", member=Introduction(WORKER, "a", store_port=1))
    protocol.greet(Agent(), hello, asyncio.get_running_loop().time())


@asynccontextmanager
async def a_worker(port: int, wire: str = "plain") -> AsyncIterator[tuple[subprocess.Popen[str], int]]:
    """An agent, and the process below it. It has read its welcome: what is unread at its end makes that a reset."""
    command = [sys.executable, "-c", PROGRAM, str(port), wire, TOKEN]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        below = int(await asyncio.to_thread(agent.stdout.readline))
        try:
            assert await asyncio.wait_for(asyncio.to_thread(agent.stdout.readline), 20) == "welcome\n"
            yield agent, below
        finally:
            kill_all([agent.pid, below])


def lines_of(protocol: RunProtocol) -> list[MemberId | None]:
    """Whose lifelines are connected; None where its end would prove nothing."""
    return [visitor.member_id for visitor in protocol.at.visitors.values() if visitor.kind == "lifeline"]


def is_member(protocol: RunProtocol) -> bool:
    return protocol.run is not None and WORKER in protocol.run.members


@pytest.mark.parametrize("wire", ["plain", "tls"])
def test_it_ends_with_the_last_process_and_not_before(wire: str) -> None:
    async def scenario() -> None:
        async with a_run() as (protocol, address), a_worker(address[1], wire) as (agent, below):
            assert lines_of(protocol) == [WORKER]
            agent.kill()
            agent.wait()
            await asyncio.sleep(0.05)  # an end would have been seen by now
            assert lines_of(protocol) == [WORKER] and is_member(protocol)
            kill_all([below])
            await until(lambda: not is_member(protocol), "nothing is left of it")
            assert "a: all its processes ended" in [event.text for event in protocol.at.story]

    asyncio.run(scenario())


def test_through_a_relay_it_proves_nothing() -> None:
    """A relay that dies, or gives up on a connection, closes it as cleanly as the kernel of a dead worker."""

    async def scenario() -> None:
        async with a_run() as (protocol, address):
            relay = Proxy(address)
            async with a_worker(relay.port):
                assert lines_of(protocol) == [None]
            await until(lambda: lines_of(protocol) == [], "its end was seen")
            assert is_member(protocol)
            relay.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("wire", ["plain", "tls"])
def test_one_that_is_let_go_by_the_living_proves_nothing(wire: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if wire == "tls":
        monkeypatch.setattr(opening, "is_near", lambda *_: False)

    async def scenario() -> None:
        async with a_run() as (protocol, address):
            lines = Lifelines(RUN, WORKER, "a", TOKEN)
            lines.lead_to(address)
            await until(lambda: lines_of(protocol) == [WORKER], "it is connected")
            first = list(protocol.at.visitors)
            lines.lead_to(address)
            await until(lambda: bool(lines_of(protocol)) and list(protocol.at.visitors) != first, "there is another")
            lines.let_go(address)
            await until(lambda: lines_of(protocol) == [], "its end was seen")
            assert is_member(protocol)

    asyncio.run(scenario())


def test_an_elector_that_leads_now_keeps_its_lifeline() -> None:
    """It was let go with those of the other electors, so that a killed worker cost its lease."""

    async def scenario() -> None:
        async with a_run() as (protocol, address):
            there = Elector(MemberId("b"), "b", address)
            mine = Elector(WORKER, "a", ("127.0.0.1", 1))
            lines = Lifelines(RUN, WORKER, "a", TOKEN)
            lines.follow(Electorate(1, mine, ((mine, there),)), [], None)
            await until(lambda: lines_of(protocol) == [WORKER], "it has one to an elector")
            lines.follow(Electorate(2, there, ((mine, there),)), [], address)
            assert list(lines._tasks) == [address]
            await until(lambda: lines_of(protocol) == [WORKER], "it has one to the leader")
            lines.let_go(address)

    asyncio.run(scenario())


def test_a_coordinator_takes_it_from_members_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lifeline, "AGAIN_S", 0.01)
    refused = asyncio.Event()

    async def scenario() -> None:
        async with a_run(joined=False) as (protocol, address):
            lines = Lifelines(RUN, WORKER, "a", TOKEN)
            monkeypatch.setattr(asyncio, "sleep", _noting(refused, asyncio.sleep))
            lines.lead_to(address)
            await asyncio.wait_for(refused.wait(), 10)
            assert lines_of(protocol) == []
            join(protocol)
            await until(lambda: lines_of(protocol) == [WORKER], "it tried again")
            lines.let_go(address)

    asyncio.run(scenario())


def _noting(event: asyncio.Event, sleep: Callable[[float], object]) -> Callable[[float], object]:
    def noted(delay: float) -> object:
        event.set()
        return sleep(delay)

    return noted


def test_one_is_taken_out_and_the_others_stay() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        held = lifeline._Held()
        near = [socket.create_connection(server.getsockname()) for _ in range(3)]
        far = [server.accept()[0] for _ in near]
        for one in near:
            held.put(one)
        held.take_out(near[1])
        holder = subprocess.Popen(["sleep", "1000"], pass_fds=[held.descriptor])
        for one in near:
            one.close()
        assert far[1].recv(1) == b""
        for one in (far[0], far[2]):
            one.setblocking(False)
            with pytest.raises(BlockingIOError):
                one.recv(1)
            one.setblocking(True)
        held.close()
        holder.kill()
        holder.wait()
        assert [far[0].recv(1), far[2].recv(1)] == [b"", b""]
        for one in far:
            one.close()

"""Can a rank find what was said of the mesh of the round before? Not while that can be helped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from muster.types.frames import HelloFrame, Introduction
from muster.types.world import MemberId, RunId, Settings
from muster.world import outgoing
from muster.world.protocol import RunProtocol
from muster.world.service import Coordinator

RUN = RunId("run")


class Line:
    """A connection whose other end is the test."""

    peer = "192.0.2.1:1"

    def __init__(self) -> None:
        self.said = b""

    def send_raw(self, data: bytes) -> None:
        self.said += data

    def refuse(self, code: str, message: str) -> None:
        raise AssertionError(f"{code}: {message}")


class Director:
    """Somebody who has to clean up first."""

    def __init__(self, work: Callable[[], Coroutine[Any, Any, None]] | None) -> None:
        self._work = work
        self.asked = 0

    def token_of(self, run_id: RunId) -> str | None:
        return None

    def settled(self, run_id: RunId) -> None:
        pass

    def before_release(self, run_id: RunId) -> asyncio.Task[None] | None:
        self.asked += 1
        return asyncio.get_running_loop().create_task(self._work()) if self._work is not None else None


def opened(director: Director, **settings: Any) -> tuple[Coordinator, RunProtocol, Line]:
    """A run of one, which has just joined: its round is about to be released."""
    coordinator, line = Coordinator(director=director), Line()
    protocol = coordinator.open_run(RUN, Settings(min=1, max=1, **settings))
    hello = HelloFrame(kind="agent", member=Introduction(MemberId("a"), "a", store_port=1))
    protocol.greet(line, hello, asyncio.get_running_loop().time())
    return coordinator, protocol, line


async def until(there: Callable[[], bool]) -> float:
    begun = time.monotonic()
    async with asyncio.timeout(5):
        while not there():
            await asyncio.sleep(0.005)
    return time.monotonic() - begun


def test_ranks_start_when_the_old_keys_are_gone() -> None:
    async def play() -> None:
        gone = asyncio.Event()

        async def clean() -> None:
            await gone.wait()

        _, protocol, line = opened(Director(clean), gate_timeout_s=60.0)
        await until(lambda: protocol.run is not None and protocol.run.running is not None)
        await asyncio.sleep(0)
        assert b'"release"' not in line.said
        gone.set()
        assert await until(lambda: b'"release"' in line.said) < outgoing.HELD_S / 2
        assert line.said.index(b'"welcome"') < line.said.index(b'"release"'), "in the order in which it was said"

    asyncio.run(play())


def test_keys_that_cannot_be_removed_hold_ranks_for_a_moment_only() -> None:
    async def play() -> None:
        _, protocol, line = opened(Director(asyncio.Event().wait), gate_timeout_s=60.0)  # type: ignore[arg-type]
        await until(lambda: protocol.run is not None and protocol.run.running is not None)
        assert await until(lambda: b'"release"' in line.said) == pytest.approx(outgoing.HELD_S, abs=0.3)

    asyncio.run(play())


@pytest.mark.parametrize(("settings", "asked"), [({}, 0), ({"gate_timeout_s": 60.0}, 1)])
def test_nobody_waits_where_there_is_nothing_to_remove(settings: dict[str, float], asked: int) -> None:
    async def play() -> None:
        director = Director(None)
        _, protocol, line = opened(director, **settings)
        await until(lambda: protocol.run is not None and protocol.run.running is not None)
        assert b'"release"' in line.said and director.asked == asked

    asyncio.run(play())

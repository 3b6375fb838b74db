"""Does a probe find who is meant, nobody else, and say why not?"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.mesh import calls, probe
from muster.mesh.probe import Path, Prober, Row, own_path
from muster.types import address

PATIENCE_S = 10.0


def a_listener() -> tuple[socket.socket, Path]:
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    return listener, listener.getsockname()


class Member:
    """A prober, and what it has told so far."""

    def __init__(self, name: str, secret: str = "run") -> None:
        self.name = name
        self.found: dict[str, tuple[float | None, str]] = {}
        self._news = asyncio.Event()
        self.prober = Prober(secret, name, self._hear)
        listener, self.path = a_listener()
        self.prober.serve(listener)

    def _hear(self, rows: list[Row]) -> None:
        self.found |= {name: (rtt, why) for name, rtt, why in rows}
        self._news.set()

    async def until(self, peer: str, right: Callable[[float | None, str], bool]) -> tuple[float | None, str]:
        async with asyncio.timeout(PATIENCE_S):
            while peer not in self.found or not right(*self.found[peer]):
                self._news.clear()
                await self._news.wait()
        return self.found[peer]

    async def reaches(self, peer: str) -> float:
        rtt, _ = await self.until(peer, lambda rtt, why: rtt is not None)
        assert rtt is not None
        return rtt

    async def misses(self, peer: str) -> str:
        return (await self.until(peer, lambda rtt, why: rtt is None))[1]


@asynccontextmanager
async def members(*names: str, **more: str) -> AsyncIterator[list[Member]]:
    made = [Member(name, **more) for name in names]
    try:
        yield made
    finally:
        for one in made:
            one.prober.close()


def test_members_reach_each_other_and_say_how_long_it_takes() -> None:
    async def play() -> None:
        async with members(*(f"m{i}" for i in range(12))) as everyone:
            paths = {one.name: [one.path] for one in everyone}
            for one in everyone:
                one.prober.follow(paths)
            for one in everyone:
                assert all([await one.reaches(other.name) > 0 for other in everyone if other is not one])
                assert one.name not in one.found, "nobody has to reach itself"

    asyncio.run(play())


@pytest.mark.parametrize("answer", [b"", b"hello\n", b"HTTP/1.1 200 OK\r\n\r\n" + b"x" * 100, b"0" * 64 + b"\n"])
def test_a_foreign_server_on_the_port_is_not_taken_for_a_member(answer: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(answer)
        writer.close()

    async def play() -> None:
        async with members("a") as (a,), await asyncio.start_server(serve, "127.0.0.1", 0) as foreign:
            a.prober.follow({"b": [foreign.sockets[0].getsockname()]})
            assert await a.misses("b") in ("somebody else answers there", "nobody of this run answers there")

    asyncio.run(play())


def test_another_member_or_a_member_of_another_run_is_not_taken_for_the_one_meant() -> None:
    async def play() -> None:
        async with members("a", "b") as (a, b), members("b", secret="another run") as (stranger,):
            a.prober.follow({"c": [b.path]})
            assert await a.misses("c") == "nobody of this run answers there"
            a.prober.follow({"b": [stranger.path]})
            assert await a.misses("b") == "somebody else answers there"

    asyncio.run(play())


def test_a_closed_port_is_refused_and_a_silent_one_times_out() -> None:
    async def play() -> None:
        listener, silent = a_listener()
        gone, closed = a_listener()
        gone.close()
        async with members("a") as (a,):
            a.prober.follow({"b": [closed], "c": [silent]})
            assert await a.misses("b") == "connection refused"
            assert await a.misses("c") == f"no answer in {calls.ATTEMPT_S:g} s"
        listener.close()

    asyncio.run(play())


def test_a_peer_that_comes_up_late_is_found() -> None:
    async def play() -> None:
        listener, path = a_listener()
        listener.close()
        async with members("a", "b") as (a, b):
            a.prober.follow({"b": [path]})
            await a.misses("b")
            b.prober.serve(socket.create_server(path))
            await a.reaches("b")

    asyncio.run(play())


def test_the_relay_is_named_but_does_not_count() -> None:
    async def play() -> None:
        gone, overlay = a_listener()
        gone.close()
        async with members("a", "b") as (a, b):
            a.prober.follow({"b": [overlay, b.path]})
            assert await a.misses("b") == "only over the relay: connection refused"
            b.prober.serve(socket.create_server(overlay))
            await a.reaches("b")

    asyncio.run(play())


def test_what_is_known_is_told_again_when_the_same_peers_are_named() -> None:
    async def play() -> None:
        async with members("a", "b") as (a, b):
            a.prober.follow({"b": [b.path]})
            first = await a.reaches("b")
            a.found.clear()
            b.prober.close()  # it is not asked anew: what was found a moment ago still counts
            a.prober.follow({"b": [b.path]})
            assert await a.reaches("b") == pytest.approx(first, abs=1e-5)

    asyncio.run(play())


def test_a_member_that_was_reached_has_to_fail_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "AGAIN_S", 0.05)

    async def play() -> None:
        async with members("a", "b") as (a, b):
            a.prober.follow({"b": [b.path]})
            await a.reaches("b")
            b.prober.close()
            assert await a.misses("b") == "connection refused"
            assert a.prober._peers["b"].failures >= 2

    asyncio.run(play())


def test_visitors_that_say_nonsense_or_nothing_do_no_harm() -> None:
    async def play() -> None:
        async with members("a", "b") as (a, b):
            silent = [await asyncio.open_connection(*b.path) for _ in range(20)]
            for words in (b"{}\n", b"[1,2]\n", b"\xff\xfe\n", b'{"muster":"probe"}\n', b"x" * 5000, b"null\n"):
                reader, writer = await asyncio.open_connection(*b.path)
                writer.write(words)
                with suppress(ConnectionResetError):  # it was closed with words of ours unread
                    assert await reader.read() == b"", words
                writer.close()
            a.prober.follow({"b": [b.path]})
            assert await a.reaches("b") < 1
            for _, writer in silent:
                writer.close()

    asyncio.run(play())


# Where a worker is reached


def test_a_probe_address_names_a_host_a_port_the_worker_or_a_network() -> None:
    assert own_path("10.8.0.3", "w") == ("10.8.0.3", 0)
    assert own_path("10.8.0.3:900", "w") == ("10.8.0.3", 900)
    assert own_path("[fd00::1]:900", "w") == ("fd00::1", 900)
    assert own_path("fd00::1", "w") == ("fd00::1", 0)
    assert own_path("{worker}.mesh.example", "demo-1") == ("demo-1.mesh.example", 0)
    assert own_path("127.0.0.0/8", "w") == ("127.0.0.1", 0)
    assert own_path("203.0.113.0/24", "w") == ("203.0.113.0", 0), "no address of ours is in it: nobody answers there"


@pytest.mark.parametrize(
    "told", ["", "a b", "10.8.0.0/33", "host:", "host:0", "host:70000", "host:x", "[::1", "a/b", "[]"]
)
def test_what_is_no_probe_address_is_refused(told: str) -> None:
    with pytest.raises(ValueError, match="is not HOST, HOST:PORT or a network"):
        address.read(told)


@given(st.text(max_size=30))
def test_reading_a_probe_address_ends_in_an_answer_or_a_reason(told: str) -> None:
    try:
        meant = address.read(told)
    except ValueError:
        return
    assert not isinstance(meant, tuple) or (meant[0] and 0 <= meant[1] < 65536)

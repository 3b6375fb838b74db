"""Connections that say nothing, say it slowly, do not listen, or are too many."""

from __future__ import annotations

import asyncio
import errno
import itertools
import logging
import os
import socket
import time
from pathlib import Path
from typing import cast

import httpx2
import pytest

from muster import listening
from muster.server import attempts, guests
from tests.server.house import BOUND_S, TRAININGS, House, in_house

LOGS = f"{TRAININGS}/demo/logs?follow=true"


class Line:
    """One raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def to(cls, house: House, words: bytes = b"") -> Line:
        line = cls(*await asyncio.open_connection("127.0.0.1", house.port))
        line.writer.write(words)
        return line

    async def rest(self) -> bytes:
        """What comes until the server hangs up."""
        try:
            return await asyncio.wait_for(self.reader.read(), BOUND_S)
        except ConnectionResetError:
            return b""

    async def is_cut(self) -> None:
        await self.rest()


def asking(house: House, path: str, token: str | None = None, method: str = "GET", more: str = "") -> bytes:
    bearer = house.client.headers["Authorization"] if token is None else f"Bearer {token}"
    return f"{method} {path} HTTP/1.1\r\nHost: x\r\nAuthorization: {bearer}\r\n{more}\r\n".encode()


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guests, "HEAD_TIMEOUT_S", 0.3)
    monkeypatch.setattr(guests, "TEND_EVERY_S", 0.05)


async def drip(line: Line, data: bytes) -> None:
    """One byte after the other, for as long as somebody takes them."""
    try:
        for byte in data * 1000:
            line.writer.write(bytes([byte]))
            await line.writer.drain()
            await asyncio.sleep(0.02)
    except ConnectionError:
        return


@pytest.mark.parametrize("words", [b"", b"GET /v1/trai", b"GET /healthz HTTP/1.1\r\nHost: x\r\nA: "])
def test_a_head_has_to_come_within_a_time_however_it_trickles(tmp_path: Path, hurried: None, words: bytes) -> None:
    async def test(house: House) -> None:
        line = await Line.to(house, words)
        dripping = asyncio.create_task(drip(line, b"x")) if words else None
        assert await line.rest() == b""
        if dripping is not None:
            dripping.cancel()
        assert not len(house.server.guests)

    in_house(tmp_path, test)


def test_a_body_that_trickles_after_its_answer_does_not_keep_the_connection(tmp_path: Path, hurried: None) -> None:
    async def test(house: House) -> None:
        head = asking(house, TRAININGS, token="wrong", method="POST", more="Content-Length: 100000\r\n")
        line = await Line.to(house, head)
        dripping = asyncio.create_task(drip(line, b" "))
        assert b" 401 " in await line.reader.readuntil(b"\r\n\r\n")
        await line.is_cut()
        dripping.cancel()

    in_house(tmp_path, test)


def test_a_stream_may_last(tmp_path: Path, hurried: None) -> None:
    async def test(house: House) -> None:
        await house.submit()
        line = await Line.to(house, asking(house, LOGS))
        await line.reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(0.6)  # longer than anyone may take for a head
        await house.settle("demo", "succeeded", rank_exits=())
        assert b"0\r\n\r\n" in await asyncio.wait_for(line.reader.readuntil(b"0\r\n\r\n"), BOUND_S)

    in_house(tmp_path, test)


def test_whoever_asks_again_before_the_answer_is_complete_is_cut_off(tmp_path: Path) -> None:
    """Else it could queue any number of requests, and a stream behind them would not notice that its reader left."""

    async def test(house: House) -> None:
        await house.submit()
        line = await Line.to(house, asking(house, LOGS))
        await line.reader.readuntil(b"\r\n\r\n")
        line.writer.write(asking(house, "/healthz") * 1000)
        assert await line.rest() == b""
        together = await Line.to(house, asking(house, "/healthz") * 10_000)
        assert (await together.rest()).count(b"HTTP/1.1 200") <= 1
        assert (await house.client.get("/healthz")).status_code == 200

    in_house(tmp_path, test)


def test_trailers_without_an_end_are_not_kept(tmp_path: Path) -> None:
    """Behind a chunked body come headers again: a stranger could fill the memory with them."""

    async def test(house: House) -> None:
        head = asking(house, TRAININGS, token="wrong", method="POST", more="Transfer-Encoding: chunked\r\n")
        line = await Line.to(house, head + b"0\r\n")
        assert b" 401 " in await line.reader.readuntil(b"\r\n\r\n")
        [connection] = house.connections
        before = len(connection.headers)
        line.writer.write(b"Authorization: Bearer other\r\n" * 2000 + b"X: " + b"x" * 100_000 + b"\r\n")
        await line.writer.drain()
        await asyncio.sleep(0.2)  # it is read
        assert len(connection.headers) == before

    in_house(tmp_path, test)


# Too many -----------------------------------------------------------------------------------------


def test_strangers_who_say_nothing_give_way_to_whoever_comes(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        house.server.guests.most = 8
        await house.submit()
        stream = await Line.to(house, asking(house, LOGS))
        await stream.reader.readuntil(b"\r\n\r\n")
        idle = [await Line.to(house) for _ in range(40)]
        assert (await house.client.get(TRAININGS)).status_code == 200
        assert len(house.server.guests) <= 8
        await asyncio.gather(*(one.is_cut() for one in idle[:30]))
        await house.settle("demo", "succeeded", rank_exits=())
        assert await asyncio.wait_for(stream.reader.readuntil(b"0\r\n\r\n"), BOUND_S)

    in_house(tmp_path, test)


def test_one_who_follows_everything_gives_way_to_others(tmp_path: Path) -> None:
    async def test(house: House) -> None:
        house.server.guests.most = 8
        await house.submit()
        viewer = house.services.tokens.create("viewer", "viewer")
        own = await Line.to(house, asking(house, LOGS))
        await own.reader.readuntil(b"\r\n\r\n")
        followed = [await Line.to(house, asking(house, LOGS, token=viewer)) for _ in range(20)]
        assert (await house.client.get(TRAININGS)).status_code == 200
        cut = [asyncio.create_task(one.is_cut()) for one in followed]
        async with asyncio.timeout(BOUND_S):
            for ended in itertools.islice(asyncio.as_completed(cut), len(followed) - 7):
                await ended
        assert len(house.server.guests) <= 8
        await house.settle("demo", "succeeded", rank_exits=())
        assert await asyncio.wait_for(own.reader.readuntil(b"0\r\n\r\n"), BOUND_S)

    in_house(tmp_path, test)


def test_an_admin_who_is_answered_stays_though_its_requests_are_the_most(tmp_path: Path) -> None:
    async def run() -> list[str]:
        present = guests.Guests(8)
        left: list[str] = []
        for name in ("admin",) * 6 + ("ann", "bob", "cid", "dan"):
            guest = present.come(name)
            guest.token, guest.admin, guest.asking = name, name == "admin", True
            guest.leave = lambda name=name: left.append(name)  # type: ignore[misc]
        return left

    assert asyncio.run(run()) == ["ann", "bob"]


def test_a_crowd_from_one_address_keeps_to_its_half(tmp_path: Path) -> None:
    async def run() -> list[str]:
        present = guests.Guests(8)
        left = []
        for address in ("b", *"aaaaaaaaaa", "b"):
            guest = present.come(address)
            guest.leave = lambda address=address: left.append(address)  # type: ignore[misc]
        assert len(present) == 6
        return left

    assert asyncio.run(run()) == ["a"] * 6


# No more files ------------------------------------------------------------------------------------


class Exhausted:
    """A listening socket that has somebody waiting for whom there is no descriptor."""

    def __init__(self) -> None:
        self.asked = 0
        self._ready, other = socket.socketpair()
        other.close()

    def fileno(self) -> int:
        return self._ready.fileno()

    def setblocking(self, flag: bool) -> None: ...

    def listen(self, backlog: int) -> None: ...

    def close(self) -> None:
        self._ready.close()

    def accept(self) -> tuple[socket.socket, tuple[str, int]]:
        self.asked += 1
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def test_a_shortage_of_files_is_told_once_and_waited_out(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listening, "AGAIN_S", 0.1)
    listener = Exhausted()

    async def run() -> None:
        door = listening.Door(cast(socket.socket, listener), lambda *_: None, name="the API")
        async with asyncio.timeout(BOUND_S):
            while listener.asked < 3:
                await asyncio.sleep(0.01)
        door.close()

    with caplog.at_level(logging.INFO):
        began = time.monotonic()
        asyncio.run(run())
        assert time.monotonic() - began > 0.15, "it waits in between"
    assert [record.message.count("no connection can be taken") for record in caplog.records] == [1]


@pytest.mark.parametrize(
    ("host", "counts_as"),
    [
        ("10.0.0.1", "10.0.0.1"),
        ("::ffff:10.0.0.1", "10.0.0.1"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
    ],
)
def test_a_network_that_is_handed_out_as_one_is_one_client(host: str, counts_as: str) -> None:
    assert listening.whose(host) == counts_as


# Guesses ------------------------------------------------------------------------------------------


def test_whoever_guesses_on_and_on_waits_for_each_answer_and_nobody_else_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attempts, "FREE", 5)
    monkeypatch.setattr(attempts, "PAUSE_S", 1.0)

    async def took(client: httpx2.AsyncClient, status: int) -> float:
        began = time.monotonic()
        assert (await client.get(TRAININGS)).status_code == status
        return time.monotonic() - began

    async def test(house: House) -> None:
        stranger = house.with_token("guess")
        free = [await took(stranger, 401) for _ in range(5)]
        assert min(free) < 1.0 < await took(stranger, 401)
        waiting = asyncio.create_task(took(stranger, 401))
        assert min([await took(house.client, 200) for _ in range(3)]) < 1.0
        await waiting

    in_house(tmp_path, test)


def test_guesses_from_many_addresses_do_not_grow_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "_MOST_ADDRESSES", 10)

    async def run() -> None:
        failed = attempts.FailedAttempts()
        for number in range(100):
            await failed.pause(f"10.0.0.{number}")
        assert len(failed._failed) == 11

    asyncio.run(run())

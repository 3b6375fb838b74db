"""The coordinator on a real socket: versions, tokens, garbage, and connections that misbehave alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import pytest

from muster.types.frames import Frame
from muster.types.world import RunId, Settings
from muster.world import strangers, wire
from muster.world.service import Coordinator
from tests.fleet import Fleet, free_port


class Raw:
    """A client that speaks bytes, so that it can speak them wrongly."""

    def __init__(self, fleet: Fleet) -> None:
        self.socket = socket.create_connection((fleet.host, fleet.port), timeout=10)
        self._token = fleet.token
        self._decoder = wire.Decoder()
        self._frames: list[dict[str, Any]] = []

    def send(self, **frame: Any) -> None:
        self.socket.sendall(wire.pack(frame))

    def read(self) -> dict[str, Any] | None:
        """The next frame, or None when the other side has closed."""
        while not self._frames:
            try:
                data = self.socket.recv(65536)
            except ConnectionResetError:
                return None
            if not data:
                return None
            self._frames += self._decoder.feed(data)
        return self._frames.pop(0)

    def hello(self, **changes: Any) -> dict[str, Any] | None:
        challenge = self.read()
        assert challenge is not None and challenge["type"] == "challenge"
        hello: dict[str, Any] = {
            "v": "1.0",
            "type": "hello",
            "low": "1.0",
            "high": "1.0",
            "kind": "agent",
            "run_id": "run",
            "member": {"member_id": "m1", "name": "raw"},
            "settings": {"min": 1, "max": 2, "spares": 1},
        }
        token = changes.pop("token", self._token)
        if token is not None:
            hello["proof"] = wire.proof(token, challenge["nonce"], "run", "agent")
        self.send(**hello | changes)
        return self.read()


@pytest.mark.parametrize("span", [("1.0", "1.0"), ("1.0", "1.7"), ("1.3", "1.9"), ("0.4", "1.0"), ("1.0", "2.0")])
def test_any_minor_of_the_same_major_joins(fleet: Fleet, span: tuple[str, str]) -> None:
    fleet.coordinator()
    answer = Raw(fleet).hello(low=span[0], high=span[1], unknown_field={"from": "the future"})
    assert answer is not None and answer["type"] == "welcome"


@pytest.mark.parametrize("span", [("2.0", "2.1"), ("0.1", "0.9"), ("one", "two"), (None, 7)])
def test_a_wrong_major_gets_a_named_error_at_once(fleet: Fleet, span: tuple[Any, Any]) -> None:
    fleet.coordinator()
    raw = Raw(fleet)
    answer = raw.hello(low=span[0], high=span[1])
    assert answer is not None and (answer["type"], answer["code"]) == ("error", "version_mismatch")
    assert raw.read() is None


def test_an_agent_meets_a_coordinator_of_another_major(fleet: Fleet) -> None:
    server = socket.create_server(("127.0.0.1", 0))
    fleet.port = server.getsockname()[1]
    node = fleet.node("a")
    challenge = wire.pack({"v": "9.0", "type": "challenge", "nonce": "x", "low": "9.0", "high": "9.2"})
    connections: list[socket.socket] = []  # The agent and its guard each open one.

    def challenge_all() -> None:
        with contextlib.suppress(OSError):  # The end of the test shuts the server down.
            while True:
                connection, _ = server.accept()
                connections.append(connection)
                connection.sendall(challenge)

    threading.Thread(target=challenge_all, daemon=True).start()
    assert node.wait() == 1
    server.shutdown(socket.SHUT_RDWR)
    server.close()
    assert "the peer speaks protocol 9.0 to 9.2, this side speaks 1.0" in node.text


def hostile_bytes() -> dict[str, bytes]:
    nested = b"[" * 100_000
    return {
        "noise": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        "oversized": struct.pack(">I", wire.MAX_FRAME + 1),
        "not json": struct.pack(">I", 5) + b"\xff\xfe\x00\x01\x02",
        "not an object": struct.pack(">I", 2) + b"[]",
        "no type": struct.pack(">I", 2) + b"{}",
        "deeply nested": struct.pack(">I", len(nested)) + nested,
        "not a hello": wire.pack({"type": "renew"}),
        "no run": wire.pack({"type": "hello", "low": "1.0", "high": "1.0", "kind": "agent"}),
        "bad member": wire.pack(
            {"type": "hello", "low": "1.0", "high": "1.0", "kind": "agent", "run_id": "run", "member": 3}
        ),
        "bad settings": wire.pack(
            {
                **{"type": "hello", "low": "1.0", "high": "1.0", "kind": "agent", "run_id": "other"},
                **{"member": {"member_id": "x", "name": "x"}, "settings": {"min": "many"}},
            }
        ),
        "bad record": wire.pack(
            {
                **{"type": "hello", "low": "1.0", "high": "1.0", "kind": "agent", "run_id": "run"},
                **{"member": {"member_id": "x", "name": "x"}, "present": {"record": {"round": 99}}},
            }
        ),
    }


def test_garbage_ends_its_own_connection_and_nothing_else(fleet: Fleet) -> None:
    coordinator = fleet.coordinator()
    node = fleet.node("a")
    fleet.started(0, 1)
    for name, data in hostile_bytes().items():
        raw = Raw(fleet)
        assert raw.read() is not None
        raw.socket.sendall(data)
        answer = raw.read()
        assert answer is None or answer["type"] == "error", name
        assert raw.read() is None, name
    view = fleet.training(0, 1)
    assert [member["name"] for member in view["members"]] == ["a"]
    fleet.go()
    assert node.wait() == 0
    assert coordinator.proc.poll() is None


def test_malformed_frames_of_a_member_cost_only_that_member(fleet: Fleet) -> None:
    fleet.coordinator()
    node = fleet.node("a", "--nnodes", "1:2", "--spares", "1", "--last-call-s", "0")
    fleet.started(0, 1)
    raw = Raw(fleet)
    answer = raw.hello()
    assert answer is not None and answer["type"] == "welcome"
    fleet.until("raw is a spare", lambda v: len(v["members"]) == 2)
    raw.send(v="1.0", type="renew", steps=[["a", "b"]])
    while (frame := raw.read()) is not None:
        last = frame
    assert last["code"] == "garbage"
    fleet.until("raw is out", lambda v: len(v["members"]) == 1)
    fleet.go()
    assert node.wait() == 0


def test_a_slow_writer_is_cut_off(fleet: Fleet) -> None:
    fleet.coordinator()
    raw = Raw(fleet)
    assert raw.read() is not None
    raw.socket.sendall(struct.pack(">I", 1000) + b"{")
    begun = time.monotonic()
    answer = raw.read()
    assert answer is not None and answer["code"] == "timeout"
    assert time.monotonic() - begun < 8


@pytest.mark.parametrize("token", [None, "wrong"])
def test_a_wrong_token_is_refused(fleet: Fleet, token: str | None) -> None:
    fleet.env["MUSTER_RUN_TOKEN"] = "right"
    fleet.coordinator()
    answer = Raw(fleet).hello(token=token)
    assert answer is not None and answer["code"] == "bad_token"
    node = fleet.node("a", MUSTER_RUN_TOKEN=token or "")
    assert node.wait() == 1 and "run token" in node.text
    good = fleet.node("b")
    fleet.started(0, 1)
    fleet.go()
    assert good.wait() == 0


def test_a_message_of_an_old_round_is_answered_with_the_current_one(fleet: Fleet) -> None:
    fleet.coordinator()
    raw = Raw(fleet)
    raw.hello(settings={"min": 1, "max": 1})
    release = raw.read()
    assert release is not None and (release["type"], release["round"]) == ("release", 0)
    raw.send(v="1.0", type="stopped", epoch=1, round=0, store_port=1)
    while (frame := raw.read()) is not None and not (frame["type"] == "release" and frame["round"] == 1):
        pass
    raw.send(v="1.0", type="exits", epoch=1, round=0, seq=1, exits=[{"rank": 0, "exit_code": 3}])
    frame = raw.read()
    assert frame is not None and (frame["type"], frame["round"]) == ("stale", 1)


def test_frames_survive_being_cut_anywhere() -> None:
    frames: list[dict[str, Any]] = [
        {"type": "a", "text": "ä" * 50},
        {"type": "b"},
        {"type": "c", "n": list(range(100))},
    ]
    data = b"".join(wire.pack(frame) for frame in frames)
    for size in (1, 2, 3, 7, 64, len(data)):
        decoder = wire.Decoder()
        out = [frame for start in range(0, len(data), size) for frame in decoder.feed(data[start : start + size])]
        assert json.dumps(out) == json.dumps(frames)


def test_a_huge_name_is_refused(fleet: Fleet) -> None:
    fleet.coordinator()
    answer = Raw(fleet).hello(member={"member_id": "m", "name": "x" * 600_000})
    assert answer is not None and answer["code"] == "invalid"


def _play(fleet: Fleet) -> None:
    """A run from its first hello to its end."""
    node = fleet.node("a", "--nnodes", "1")
    fleet.started(0, 1)
    fleet.go()
    assert node.wait() == 0, node.text


@pytest.mark.parametrize("how", ["closed from the start", "its reader has left", "nobody reads it"])
def test_a_coordinator_serves_whatever_happens_to_its_output(fleet: Fleet, how: str) -> None:
    fleet.port = free_port()
    command = [sys.executable, "-m", "muster.coordinator", "--listen", fleet.address]
    reader, writer = os.pipe()
    if how == "nobody reads it":
        os.set_blocking(writer, False)
        with contextlib.suppress(BlockingIOError):
            while os.write(writer, b"x" * 65536):
                pass
        os.set_blocking(writer, True)
    close = (lambda: os.close(1)) if how == "closed from the start" else None
    stdout = None if close else writer
    coordinator = subprocess.Popen(command, env=fleet.env, cwd=fleet.folder, stdout=stdout, preexec_fn=close)
    os.close(writer)
    try:
        if how == "its reader has left":
            os.read(reader, 1)
            os.close(reader)
        _play(fleet)
        assert coordinator.poll() is None
        coordinator.terminate()
        assert coordinator.wait(10) == 0
    finally:
        coordinator.kill()
        coordinator.wait()


def test_the_eldest_stranger_gives_way_unless_all_just_came(monkeypatch: pytest.MonkeyPatch) -> None:
    async def words(host: str, port: int) -> tuple[bytes, asyncio.StreamReader, asyncio.StreamWriter]:
        """What a stranger hears, if anything."""
        reader, writer = await asyncio.open_connection(host, port)
        return await reader.read(4096), reader, writer

    async def run() -> None:
        coordinator = Coordinator()
        coordinator._strangers.most = 4
        address = await coordinator.start("127.0.0.1", 0)
        async with asyncio.timeout(4):  # before any of them is late with its hello
            monkeypatch.setattr(strangers, "GRACE_S", 60.0)
            silent = [await words(*address) for _ in range(4)]
            assert all(b"challenge" in heard for heard, *_ in silent)
            assert b"too many" in (await words(*address))[0], "all have just come"
            monkeypatch.setattr(strangers, "GRACE_S", 0.0)
            newcomer = await words(*address)
            assert b"challenge" in newcomer[0]
            with contextlib.suppress(ConnectionResetError):
                assert b"too many" in await silent[0][1].read()
            assert len(coordinator._strangers) == 4
        for _, _, writer in [*silent, newcomer]:
            writer.close()
        await coordinator.stop()

    asyncio.run(run())


def test_what_strangers_have_not_finished_saying_takes_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousand connections with a frame of a megabyte each that never ends were a gigabyte."""
    monkeypatch.setattr(strangers, "MOST_UNREAD", 1 << 20)

    async def run() -> None:
        coordinator = Coordinator(token="right")
        address = await coordinator.start("127.0.0.1", 0)
        begun = struct.pack(">I", wire.MAX_FRAME) + b"{" * 300_000
        talkers = [await asyncio.open_connection(*address) for _ in range(8)]
        for _, writer in talkers:
            writer.write(begun)
            await writer.drain()
        async with asyncio.timeout(4):
            while sum(one.unread for one in coordinator._strangers._known) < 600_000 or len(coordinator._strangers) > 4:
                await asyncio.sleep(0.005)
        assert sum(one.unread for one in coordinator._strangers._known) <= 1 << 20
        for _, writer in talkers:
            writer.close()
        await coordinator.stop()

    asyncio.run(run())


@pytest.mark.parametrize("kind", ["hello", "electors"])
def test_of_what_a_stranger_sends_nothing_large_is_looked_into(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To make records of a megabyte took half a second each, of the loop that keeps leases."""
    read: list[str] = []
    understood = wire.understood

    def noted(told: Mapping[str, Any]) -> Frame:
        read.append(str(told["type"]))
        return understood(told)

    monkeypatch.setattr(wire, "understood", noted)
    seats = [{"rank": rank, "member_id": "m", "name": "n", "addr": "a", "procs": 1} for rank in range(5000)]
    large: dict[str, Any] = {"record": {"settings": {}, "target": 1, "restarts_used": 0, "seats": seats}}
    hello = {"type": kind, "low": "1.0", "high": "1.0", "kind": "agent", "run_id": "run", "present": large}
    proved = {"nonce": "n" * 32, "proof": "p" * 64}

    async def run() -> None:
        coordinator = Coordinator(token="right")
        address = await coordinator.start("127.0.0.1", 0)
        reader, writer = await asyncio.open_connection(*address)
        writer.write(wire.pack(hello | proved))
        async with asyncio.timeout(10):
            answered = await reader.read()
        assert (b"bad_token" if kind == "hello" else b"before a proof") in answered
        assert read == []
        writer.close()
        await coordinator.stop()

    asyncio.run(run())


def test_whoever_has_the_token_of_one_run_leaves_room_for_the_others() -> None:
    """Ranks know their run's token: with thousands of connections one could keep out the workers of all."""

    async def visit(address: tuple[str, int], run_id: str) -> tuple[str, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*address)
        writer.write(wire.pack({"type": "hello", "low": "1.0", "high": "1.0", "kind": "control", "run_id": run_id}))
        heard: list[dict[str, Any]] = []
        decoder = wire.Decoder()
        while len(heard) < 2:
            heard += decoder.feed(await reader.read(65536))
        return heard[1]["type"], writer

    async def run() -> None:
        coordinator = Coordinator()
        coordinator._most = 4
        address = await coordinator.start("127.0.0.1", 0)
        for run_id in ("greedy", "modest"):
            coordinator.open_run(RunId(run_id), Settings())
        async with asyncio.timeout(10):
            alone = [await visit(address, "greedy") for _ in range(6)]
            assert {kind for kind, _ in alone} == {"welcome"}, "nobody else wants anything"
            modest = await visit(address, "modest")
            assert modest[0] == "welcome"
            assert (await visit(address, "greedy"))[0] == "error"
            assert (await visit(address, "modest"))[0] == "welcome"
        await coordinator.stop()

    asyncio.run(run())


def test_a_fault_in_one_run_stops_neither_the_others_nor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        coordinator = Coordinator(token="0" * 64)
        await coordinator.start("127.0.0.1", 0)
        broken, sound = (coordinator.open_run(RunId(name), Settings(min=1, max=1)) for name in ("broken", "sound"))
        settled, looked_after = asyncio.Event(), asyncio.Event()

        def fault(*_: object) -> float:
            raise RuntimeError("a fault of ours")

        def settle(_: float) -> float:
            settled.set()
            return float("inf")

        monkeypatch.setattr(broken, "settle", fault)
        monkeypatch.setattr(broken, "probe_lost", fault)
        monkeypatch.setattr(sound, "settle", settle)
        monkeypatch.setattr(sound, "probe_lost", looked_after.set)
        async with asyncio.timeout(30):
            await settled.wait()
            for _ in range(2):
                looked_after.clear()
                await looked_after.wait()
        await coordinator.stop()

    asyncio.run(story())


def test_who_spoke_while_the_coordinator_was_busy_is_not_silent() -> None:
    """One run's decision takes longer than a lease; members of the other renew theirs, and nobody has read it yet."""

    async def story() -> None:
        coordinator = Coordinator()
        address = await coordinator.start("127.0.0.1", 0)
        slow, other = (coordinator.open_run(RunId(name), Settings(lease_s=0.3)) for name in ("slow", "other"))
        reader, writer = await asyncio.open_connection(*address)
        hello = {"type": "hello", "low": "1.0", "high": "1.0", "kind": "agent", "run_id": "other"}
        writer.write(wire.pack(hello | {"member": {"member_id": "m1", "name": "a"}}))
        while other.run is None or not other.run.members:
            await reader.read(65536)
        speaks = writer.get_extra_info("socket")

        def busy(*_: object) -> None:
            slow.on_decision = None
            time.sleep(0.45)  # it is the length of this that is tested: more than a lease
            os.write(speaks.fileno(), wire.pack({"v": "1.0", "type": "renew"}))

        slow.on_decision = busy
        coordinator.touch(slow)
        coordinator.touch(other)
        async with asyncio.timeout(10):
            while slow.on_decision is not None or other.wake_at <= asyncio.get_running_loop().time():
                await asyncio.sleep(0)
        assert [event.kind for event in other.at.story if event.kind == "lost"] == []
        writer.close()
        await coordinator.stop()

    asyncio.run(story())

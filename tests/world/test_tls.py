"""TLS between machines: what somebody on the way can see, and that nobody can put himself between.

A relay on this machine stands for the network: whoever comes through one is not who the coordinator sees, so both go on
in TLS as they would between two machines.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
from collections.abc import Iterator

import pytest

from muster.types.frames import ChallengeFrame, ErrorFrame, Frame, RecordFrame, RunRecord, TlsFrame, WelcomeFrame
from muster.types.world import Settings
from muster.world import certificates, proofs, strangers, wire
from muster.world.connection import CoordinatorRefused
from muster.world.wire import Channel
from tests.fleet import Fleet
from tests.proxy import Proxy
from tests.world.test_impostor import TOKEN, Member, a_coordinator, until


def said_in_clear(seen: bytes) -> Iterator[str]:
    """Types of all frames that can be made out in what passed, wherever they begin."""
    for at in range(len(seen)):
        if seen.startswith(b'{"v"', at):
            with_end = json.JSONDecoder()
            try:
                yield str(with_end.raw_decode(seen[at:].decode(errors="replace"))[0]["type"])
            except ValueError:
                continue


@pytest.mark.scenario
def test_a_fleet_behind_a_relay_trains_and_the_relay_sees_no_word_of_it(fleet: Fleet) -> None:
    """0.1.0 sent everything in clear."""
    fleet.env["MUSTER_RUN_TOKEN"] = TOKEN
    fleet.coordinator()
    relay = Proxy((fleet.host, fleet.port))
    direct, fleet.port = fleet.port, relay.port
    nodes = [fleet.node(name, "--nnodes", "2", "--max-restarts", "0") for name in ("a", "b")]
    fleet.training(0, 2)
    fleet.port = direct
    fleet.training(0, 2)
    fleet.go()
    assert [node.wait() for node in nodes] == [0, 0], [node.text for node in nodes]
    assert set(said_in_clear(bytes(relay.seen))) == {"challenge", "tls"}
    for word in (b"hello", b"welcome", b"release", b"member_id", TOKEN.encode()):
        assert word not in relay.seen
    relay.close()


def test_what_is_said_in_tls_arrives_whole_however_long_it_is() -> None:
    async def scenario() -> None:
        coordinator, address = await a_coordinator()
        relay = Proxy(address)
        member = Member(("127.0.0.1", relay.port))
        await asyncio.wait_for(member.welcomed.wait(), 10)
        (channel,) = coordinator._protocol_of
        assert channel.encrypted
        long = RunRecord(Settings(), 1, 0, why="x" * (wire.MAX_FRAME - 2000))
        channel.send(RecordFrame(record=long))
        await until(lambda: len(member.heard) == 2, "it came")
        told = member.heard[1]
        assert isinstance(told, RecordFrame) and told.record.why == long.why
        await member.leave()
        await until(lambda: not coordinator._protocol_of, "its end was noticed")
        relay.close()
        await coordinator.stop()

    asyncio.run(scenario())


def test_one_that_does_not_read_is_cut_off_in_tls_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_UNSENT", 4 << 20)

    async def scenario() -> None:
        coordinator, address = await a_coordinator()
        relay = Proxy(address)
        member = Member(("127.0.0.1", relay.port))
        await asyncio.wait_for(member.welcomed.wait(), 10)
        (channel,) = coordinator._protocol_of
        assert member.connection._channel is not None and member.connection._channel._transport is not None
        member.connection._channel._transport.pause_reading()
        for _ in range(64):
            channel.send(RecordFrame(record=RunRecord(Settings(), 1, 0, why="x" * (1 << 19))))
        await until(lambda: not coordinator._protocol_of, "it was cut off")
        await member.leave()
        relay.close()
        await coordinator.stop()

    asyncio.run(scenario())


def test_a_connection_in_tls_that_was_closed_can_still_be_aborted() -> None:
    """asyncio forgets all about one that is closed twice: an agent that then gave it up for silent died of that."""

    async def scenario() -> None:
        coordinator, address = await a_coordinator()
        relay = Proxy(address)
        member = Member(("127.0.0.1", relay.port))
        await asyncio.wait_for(member.welcomed.wait(), 10)
        (channel,) = coordinator._protocol_of
        for _ in range(2):
            channel.close()
        assert channel.there is not None and channel.peer != "?"
        channel.abort("it does not say goodbye")
        await until(lambda: not coordinator._protocol_of, "its end was noticed")
        channel.abort("once more")
        await member.leave()
        relay.close()
        await coordinator.stop()

    asyncio.run(scenario())


class Middle:
    """Stands between, speaks both protocols, and has a certificate of his own."""

    def __init__(self, *, token: str) -> None:
        self.heard: list[str] = []
        self._token = token

    async def start(self) -> tuple[str, int]:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Channel(self._came, lambda *_: None, self._greet), "127.0.0.1", 0
        )
        host, port = self._server.sockets[0].getsockname()[:2]
        return str(host), int(port)

    def _greet(self, channel: Channel) -> None:
        channel.send(ChallengeFrame(nonce="n", low="1.0", high="1.0", tls=True, peer="192.0.2.1:9"))

    def _came(self, channel: Channel, frame: Frame) -> None:
        self.heard.append(frame.type)
        if isinstance(frame, TlsFrame):
            channel.send(TlsFrame())
            context = certificates.context(self._token, "run", server=True)
            self._task = asyncio.create_task(self._encrypt(channel, context))

    async def _encrypt(self, channel: Channel, context: ssl.SSLContext) -> None:
        try:
            await channel.encrypt(context, server=True)
        except OSError as error:
            self.heard.append(type(error).__name__)
            return
        channel.send(ChallengeFrame(nonce="n", low="1.0", high="1.0", tls=True))

    def close(self) -> None:
        self._server.close()


def test_somebody_in_the_middle_with_another_certificate_hears_no_hello() -> None:
    async def scenario() -> None:
        middle = Middle(token="another")
        member = Member(await middle.start())
        with pytest.raises(CoordinatorRefused, match="does not have the key of this run"):
            await asyncio.wait_for(member.task, 10)
        assert middle.heard[0] == "tls" and "hello" not in middle.heard
        middle.close()

    asyncio.run(scenario())


def test_a_relay_that_takes_the_offer_of_tls_out_hears_no_hello() -> None:
    """The downgrade: what is left looks like a coordinator of 0.1."""

    async def scenario() -> None:
        heard: list[str] = []
        loop = asyncio.get_running_loop()

        def greet(channel: Channel) -> None:
            channel.send(ChallengeFrame(nonce="n", low="1.0", high="1.0"))

        def came(channel: Channel, frame: Frame) -> None:
            heard.append(frame.type)
            channel.send(WelcomeFrame())

        server = await loop.create_server(lambda: Channel(came, lambda *_: None, greet), "127.0.0.1", 0)
        host, port = server.sockets[0].getsockname()[:2]
        member = Member((str(host), int(port)))
        with pytest.raises(CoordinatorRefused, match=r"it is of muster 0\.1 \(update it before its workers\)"):
            await asyncio.wait_for(member.task, 10)
        assert "hello" not in heard and not member.heard
        server.close()

    asyncio.run(scenario())


def test_a_relay_on_this_machine_that_lies_about_whom_it_sees_gets_no_proof_that_is_good() -> None:
    """Handing both proofs on, he could afterwards say what he likes to both."""

    async def scenario() -> None:
        coordinator, address = await a_coordinator()
        loop = asyncio.get_running_loop()
        passed: list[Frame] = []

        async def connect(near: Channel) -> None:
            def from_coordinator(far: Channel, frame: Frame) -> None:
                if isinstance(frame, ChallengeFrame):
                    frame = ChallengeFrame(**{**vars(frame), "peer": near.peer})
                passed.append(frame)
                near.send(frame)

            _, far = await loop.create_connection(
                lambda: Channel(from_coordinator, lambda *_: near.close()),
                *address,
            )
            ways[near] = far

        ways: dict[Channel, Channel] = {}
        tasks: list[asyncio.Task[None]] = []
        server = await loop.create_server(
            lambda: Channel(
                lambda near, frame: ways[near].send(frame),
                lambda *_: None,
                lambda near: tasks.append(loop.create_task(connect(near))),
            ),
            "127.0.0.1",
            0,
        )
        host, port = server.sockets[0].getsockname()[:2]
        member = Member((str(host), int(port)))
        with pytest.raises(CoordinatorRefused, match="wrong or missing run token"):
            await asyncio.wait_for(member.task, 10)
        assert not member.heard and isinstance(passed[-1], ErrorFrame)
        server.close()
        await coordinator.stop()

    asyncio.run(scenario())


# What strangers can make the coordinator do


class Raw:
    """A stranger who speaks frames on a plain socket."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.socket = socket.create_connection(address, timeout=10)
        self._frames: list[dict[str, object]] = []
        self._decoder = wire.Decoder()
        self.nonce = str(self.read()["nonce"])

    def send(self, **frame: object) -> None:
        self.socket.sendall(wire.pack(frame))

    def read(self) -> dict[str, object]:
        while not self._frames:
            data = self.socket.recv(65536)
            if not data:
                return {}
            self._frames += self._decoder.feed(data)
        return self._frames.pop(0)


HELLO: dict[str, object] = dict(type="hello", v="1.0", low="1.0", high="1.0", kind="control", run_id="run")


def talk_on(raw: Raw) -> proofs.Talk:
    here, there = raw.socket.getsockname(), raw.socket.getpeername()
    return proofs.Talk("run", "control", raw.nonce, "mine", proofs.ends(here, there))


def test_a_wish_for_tls_without_the_token_costs_nothing_and_tells_nothing() -> None:
    async def scenario() -> None:
        coordinator, address = await a_coordinator()
        made = certificates.context.cache_info().misses

        def ask() -> list[dict[str, object]]:
            answers = []
            for run_id in ("run", "nope"):
                raw = Raw(address)
                wish = proofs.prove_wish_for_tls("wrong", raw.nonce, run_id)
                raw.send(type="tls", run_id=run_id, proof=wish)
                answers.append(raw.read())
                assert raw.read() == {}
            return answers

        known, unknown = await asyncio.to_thread(ask)
        assert known == unknown and known["code"] == "bad_token"
        assert certificates.context.cache_info().misses == made
        await coordinator.stop()

    asyncio.run(scenario())


def test_nothing_that_was_said_in_clear_is_taken_for_something_said_in_tls() -> None:
    """The classic of every STARTTLS: a word behind the wish, which was read as if it had come encrypted."""

    async def scenario() -> None:
        coordinator, address = await a_coordinator()

        def ask() -> list[dict[str, object]]:
            raw = Raw(address)
            wish = wire.pack(
                {"type": "tls", "run_id": "run", "proof": proofs.prove_wish_for_tls(TOKEN, raw.nonce, "run")}
            )
            hello = wire.pack({"type": "hello", "low": "1.0", "high": "1.0", "kind": "control", "run_id": "run"})
            raw.socket.sendall(wish + hello)
            heard = [raw.read()]
            try:
                heard.append(raw.read())
            except ConnectionResetError:
                heard.append({})
            return heard

        heard = await asyncio.to_thread(ask)
        assert [one.get("type") for one in heard] == ["tls", None]
        assert not coordinator.connected
        await coordinator.stop()

    asyncio.run(scenario())


def test_one_that_never_finishes_its_handshake_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strangers, "HELLO_TIMEOUT_S", 0.3)

    async def scenario() -> None:
        coordinator, address = await a_coordinator()

        def ask() -> bytes:
            raw = Raw(address)
            raw.send(type="tls", run_id="run", proof=proofs.prove_wish_for_tls(TOKEN, raw.nonce, "run"))
            assert raw.read()["type"] == "tls"
            try:
                return raw.socket.recv(100)
            except ConnectionResetError:
                return b""

        asking = asyncio.create_task(asyncio.to_thread(ask))
        await until(lambda: len(coordinator._strangers) == 1, "it counts among the strangers")
        assert await asking == b""
        await until(lambda: not len(coordinator._strangers), "and is gone")
        await coordinator.stop()

    asyncio.run(scenario())


# Old and new


def test_a_member_of_0_1_is_let_in_and_told_nothing_that_it_does_not_know() -> None:
    async def scenario() -> None:
        coordinator, address = await a_coordinator()

        def ask() -> list[object]:
            raw = Raw(address)
            proof = wire.proof(TOKEN, raw.nonce, "run", "control")
            raw.send(**HELLO, proof=proof)
            first = raw.read()["type"]
            raw.send(type="ask", v="1.0", ask="show", seq=1)
            return [first, raw.read()["type"]]

        assert await asyncio.to_thread(ask) == ["welcome", "answer"]
        await coordinator.stop()

    asyncio.run(scenario())


def test_the_proof_of_a_new_member_is_not_good_as_that_of_an_old_one() -> None:
    """Whoever takes the nonce out of a hello would spare himself the coordinator's proof."""

    async def scenario() -> None:
        coordinator, address = await a_coordinator()

        def ask() -> object:
            raw = Raw(address)
            talk = talk_on(raw)
            proof = proofs.prove(TOKEN, "member", talk)
            raw.send(**HELLO, proof=proof)
            return raw.read()["code"]

        assert await asyncio.to_thread(ask) == "bad_token"
        await coordinator.stop()

    asyncio.run(scenario())


def test_a_recorded_hello_opens_no_other_connection() -> None:
    async def scenario() -> None:
        coordinator, address = await a_coordinator()

        def ask() -> list[object]:
            raw = Raw(address)
            talk = talk_on(raw)
            hello = {**HELLO, "nonce": "mine", "proof": proofs.prove(TOKEN, "member", talk)}
            raw.send(**hello)
            answers = [raw.read(), raw.read()]
            assert proofs.is_proof(str(answers[0]["proof"]), TOKEN, "coordinator", *talk)
            again = Raw(address)
            again.send(**hello)
            return [answers[0]["type"], answers[1]["type"], again.read()["code"]]

        assert await asyncio.to_thread(ask) == ["proof", "welcome", "bad_token"]
        await coordinator.stop()

    asyncio.run(scenario())


def test_a_member_with_a_token_and_a_coordinator_without_one_do_not_meet() -> None:
    async def scenario() -> None:
        coordinator, address = await a_coordinator(token=None)
        member = Member(address)
        with pytest.raises(CoordinatorRefused, match="it has none, or it is of muster"):
            await asyncio.wait_for(member.task, 10)
        await coordinator.stop()

    asyncio.run(scenario())

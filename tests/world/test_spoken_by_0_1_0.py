"""Members and coordinators of 0.1.0 and of today understand each other: what was said then, said again."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest

from muster.core.member.orders import AwaitSaves, Exit, Order, Send, StartRanks, StopRanks
from muster.core.member.state import MemberState
from muster.core.world import records
from muster.types import frames
from muster.types.frames import ExitsFrame, Frame, HelloFrame, RenewFrame, RunRecord
from muster.types.world import MemberId, RunId, Settings
from muster.world.protocol import RunProtocol
from tests.data.old import Line, missing, transcript

RUN = RunId("run")
LINES = transcript()


def received(connection: int) -> list[Line]:
    """What the coordinator of 0.1.0 said on that connection, after its challenge."""
    return [one for one in LINES if one.connection == connection and one.what == "received"][1:]


def kind_of(connection: int) -> str:
    return next(str(one.frame["kind"]) for one in LINES if one.connection == connection and one.type == "hello")


# Every word


def test_every_frame_of_0_1_0_is_understood_and_means_the_same() -> None:
    for line in LINES:
        if line.frame:
            read = frames.read(line.frame)
            assert not isinstance(read, frames.UnknownFrame)
            written = {"v": "1.0", **frames.write(read)}
            derived = ("].reason: ", ": None became")  # of an end from what is known of it; what is left out is null
            assert not [one for one in missing(line.frame, written) if not any(words in one for words in derived)]


def test_the_transcript_has_what_a_loss_a_failure_and_a_restart_bring() -> None:
    said = {line.type for line in LINES if line.what == "sent"}
    heard = {line.type for line in LINES if line.what == "received"}
    assert said >= {"hello", "listens", "reached", "renew", "started", "up", "exits", "stopped", "finished", "ack"}
    assert said >= {"gone", "alive", "ask"}
    assert heard >= {"challenge", "welcome", "reach", "release", "record", "recall", "renewed", "probe", "got"}
    assert heard >= {"outcome", "farewell", "answer"}


# Old members, new coordinator


class Peer:
    peer = "192.0.2.1:1"

    def __init__(self) -> None:
        self.heard: list[dict[str, Any]] = []

    def send_raw(self, data: bytes) -> None:
        self.heard.append(json.loads(data[4:]))

    def refuse(self, code: str, message: str) -> None:
        raise AssertionError(f"refused: {code}: {message}")


class Coordinator:
    """Today's, which is told at the old times what members of 0.1.0 said, and dies when that of 0.1.0 did."""

    def __init__(self) -> None:
        self.protocol = RunProtocol(RUN)
        self.peers: dict[int, Peer] = defaultdict(Peer)
        self._saved: RunRecord | None = None
        self._gone: set[int] = set()

    def replay(self) -> None:
        for line in LINES:
            while self.protocol.wake_at <= line.at:
                self._settle(self.protocol.wake_at)
            match line.what:
                case "sent":
                    self._hear(self.peers[line.connection], frames.read(line.frame), line.at)
                case "closed by member" if line.connection not in self._gone:
                    self._gone.add(line.connection)
                    self.protocol.part(self.peers[line.connection], line.at)
                    self._settle(line.at)
                case "closed by coordinator" if line.connection not in self._gone:
                    self._die(line.at)

    def _hear(self, peer: Peer, frame: frames.Frame, now: float) -> None:
        if isinstance(frame, HelloFrame):
            self.protocol.greet(peer, frame, now)
        else:
            self.protocol.hear(peer, frame, now)
        if isinstance(frame, RenewFrame):
            self._flush()
        else:
            self._settle(now)

    def _settle(self, now: float) -> None:
        self.protocol.settle(now)
        self._flush()

    def _flush(self) -> None:
        at = self.protocol.at
        if at.unsaved:
            at.unsaved, self._saved = False, self.protocol.orders.record(1.7e9)
        outbox, at.outbox = at.outbox, []
        for peer, data in outbox:
            assert isinstance(peer, Peer)
            peer.send_raw(data)

    def _die(self, now: float) -> None:
        self._gone |= set(self.peers)
        assert self._saved is not None
        kept = json.loads(json.dumps(records.write(self._saved)))
        self.protocol = RunProtocol.from_record(RUN, records.read(kept), now)


def test_members_of_0_1_0_are_told_by_todays_coordinator_what_that_of_0_1_0_told_them() -> None:
    coordinator = Coordinator()
    coordinator.replay()
    for connection, peer in coordinator.peers.items():
        then = [line.frame for line in received(connection)]
        if kind_of(connection) == "guard":  # how often it is probed is a matter of time
            then = [one for one in then if one["type"] != "probe"]
            peer.heard = [one for one in peer.heard if one["type"] != "probe"]
        elif kind_of(connection) == "control":
            assert [one["type"] for one in peer.heard] == ["welcome", "answer"]
            assert peer.heard[1]["view"].keys() >= then[1]["view"].keys()
            continue
        assert [one["type"] for one in peer.heard] == [one["type"] for one in then], connection
        differences = [text for text in missing(then, peer.heard) if "].reason: " not in text]  # sentences for people
        assert set(differences) <= {
            # The one default that has changed: they obey what they are told.
            f"[{index}].{where}lease_s: 2.0 became {Settings().lease_s}"
            for index in range(len(then))
            for where in ("settings.", "record.settings.")
        }, connection


# Old coordinator, new members


class Member:
    """Today's, which hears at the old times what the coordinator of 0.1.0 said to that of its name.

    Its ranks end when those did; everything else is done at once.
    """

    def __init__(self, name: str) -> None:
        hellos = [one for one in LINES if one.type == "hello" and one.frame["kind"] == "agent"]
        mine = [one for one in hellos if one.frame["member"]["name"] == name]
        self.connections = [one.connection for one in mine]
        self._id = MemberId(mine[0].frame["member"]["member_id"])
        self.state = MemberState(self._id, RUN, Settings(), 0.0)
        self.presented: list[dict[str, Any]] = []
        self.said: list[Frame] = []
        self.code: int | None = None

    def live(self) -> None:
        for line in (one for one in LINES if one.connection in self.connections):
            while self.state.wake_at <= line.at:
                self._do(self.state.tick(self.state.wake_at), line.at)
            self._happens(line)

    def _happens(self, line: Line) -> None:
        told = frames.read(line.frame) if line.frame else None
        match line.what:
            case "received" if told is not None:
                self._do(self.state.heard(told, line.at), line.at)
            case "sent" if isinstance(told, HelloFrame):
                presented = self.state.hello(line.at)
                self.presented.append(frames.write(HelloFrame(present=presented))["present"])
            case "sent" if isinstance(told, ExitsFrame):
                for end, at in frames.reported(told.exits, line.at):
                    self._do(self.state.held.exited(end, at), line.at)
            case "closed by coordinator" if self.state.ended is None:
                self.state.found_dead(line.at)
                self._do(self.state.down("the connection closed", line.at), line.at)

    def _do(self, orders: list[Order], now: float) -> None:
        held = self.state.held
        for order in orders:
            match order:
                case Send(frame=frame):
                    self.said.append(frame)
                case StartRanks(place=place):
                    self._do(held.up(place.number, now), now)
                case AwaitSaves(round=number):
                    self._do(held.saves_over(number, now), now)
                case StopRanks(round=number):
                    self._do(held.cleared(number, now), now)
                case Exit(code=code):
                    self.code = code


@pytest.mark.parametrize("name", ["a", "c"])
def test_todays_member_says_to_a_coordinator_of_0_1_0_what_its_own_member_said(name: str) -> None:
    member = Member(name)
    member.live()
    then = [one.frame for one in LINES if one.connection in member.connections and one.what == "sent"]
    driven = {"hello", "listens", "reached", "renew"}  # said by whoever drives it
    ours = [(frame.type, frame.round) for frame in member.said]
    assert sorted(ours) == sorted((one["type"], one["round"]) for one in then if one["type"] not in driven)
    assert member.code == 0
    old = [one["present"] for one in then if one["type"] == "hello"]
    assert [one.get("round") for one in old] == [None, 2]
    for before, now in zip(old, member.presented, strict=True):
        told = {"record", "outcome", "round", "running", "up", "finished", "exits", "why"}
        assert not missing({key: value for key, value in before.items() if key in told and value is not None}, now)

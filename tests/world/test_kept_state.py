"""What a coordinator tells of state that workers keep: its troubles once, and where each round goes on."""

from __future__ import annotations

from muster.cli.world import _state_lines
from muster.core.world.views import view
from muster.types.frames import (
    Frame,
    HelloFrame,
    HoldsFrame,
    Introduction,
    Presented,
    RenewFrame,
    RunRecord,
    StoppedFrame,
    UpFrame,
)
from muster.types.run_event import JOURNAL, Kind
from muster.types.state import Held, Holding
from muster.types.world import MemberId, RunId
from muster.world.protocol import RunProtocol

RUN = RunId("run")


class Peer:
    peer = "192.0.2.1:1"

    def send_raw(self, data: bytes) -> None: ...
    def refuse(self, code: str, message: str) -> None: ...


class World:
    """A coordinator of two workers, who train."""

    def __init__(self) -> None:
        self.now = 100.0
        self.protocol = RunProtocol(RUN)
        self.peers = {name: Peer() for name in "ab"}
        for name, peer in self.peers.items():
            member = Introduction(MemberId(name), name)
            settings = {"min": 1, "max": 2, "last_call_s": 0.0}
            self.protocol.greet(peer, HelloFrame(run_id=RUN, kind="agent", member=member, settings=settings), self.now)
        self.settle()
        for name in self.peers:
            self.says(name, UpFrame(epoch=1, round=0))
        self.protocol.news = False

    def settle(self) -> None:
        self.protocol.settle(self.now)

    def says(self, name: str, frame: Frame) -> None:
        self.now += 0.01
        self.protocol.hear(self.peers[name], frame, self.now)
        self.settle()

    def holds(self, name: str, step: int, *ranks: int, **known: str) -> None:
        held = tuple(Held(rank, 2, 0, step, 1 << 20) for rank in ranks)
        self.says(name, HoldsFrame(epoch=1, holding=Holding(held, ("127.0.0.1", 1), **known)))  # type: ignore[arg-type]

    def lose(self, name: str) -> None:
        self.protocol.part(self.peers.pop(name), self.now)
        self.settle()
        for other in self.peers:
            self.says(other, StoppedFrame(epoch=1, round=0))
        self.now += 2.1  # its ranks are certainly gone by then
        for other in self.peers:
            self.says(other, RenewFrame(epoch=1, round=0))
        assert self.protocol.run is not None and self.protocol.run.round is not None
        assert self.protocol.run.round.number == 1, self.protocol.at.reason

    def told(self, kind: Kind) -> list[str]:
        return [event.text for event in self.protocol.at.story if event.kind is kind]


def test_a_worker_without_room_and_a_damaged_piece_are_told_once() -> None:
    world = World()
    for _ in range(3):
        world.holds("a", 1, refused="64 MiB of state do not fit", damage="step 1 of rank 0 is damaged")
    assert world.told(Kind.STATE_REFUSED) == ["a: 64 MiB of state do not fit"]
    assert world.told(Kind.STATE_DAMAGED) == ["a: step 1 of rank 0 is damaged"]
    assert JOURNAL[Kind.STATE_REFUSED] == ("StateRefused", "Warning")


def test_where_a_round_goes_on_is_told_with_what_is_done_again() -> None:
    world = World()
    for name in "ab":
        world.holds(name, 8, 0, 1)
    world.says("a", RenewFrame(epoch=1, round=0, steps=((0, 9, 0.0),)))
    world.lose("b")
    assert world.told(Kind.RESUMED) == [
        "round 1 goes on from step 8 in memory (1 own, 1 replica); 1 step is done again"
    ]
    assert world.told(Kind.FELL_BACK) == []


def test_going_back_to_disk_is_a_warning() -> None:
    world = World()
    world.says("a", HoldsFrame(epoch=1, holding=Holding((Held(0, 2, 0, 8),), durable=5)))
    world.holds("b", 8, 1)
    world.lose("b")
    (text,) = world.told(Kind.FELL_BACK)
    assert text.startswith("round 1 goes on from step 5 on disk")
    assert world.told(Kind.RESUMED) == []


def test_a_new_step_of_a_world_that_trains_wakes_nobody() -> None:
    world = World()
    for name in "ab":
        world.holds(name, 8, 0, 1)
    world.protocol.news = False
    world.holds("a", 9, 0, 1)
    assert not world.protocol.news
    world.holds("a", 9, 0, 1, refused="no room")
    assert world.protocol.news, "trouble does"


def test_the_view_of_a_run_says_what_is_safe_and_who_has_how_much() -> None:
    world = World()
    for name in "ab":
        world.holds(name, 8, 0, 1)
    run = world.protocol.run
    assert run is not None
    shown = view(RUN, 1, run, "", world.now + 2)
    assert shown["kept_state"]["step"] == 8 and 1.9 < shown["kept_state"]["age_s"] < 2.1
    assert shown["members"][0]["holds"] == {"step": 8, "ranks": 2, "bytes": 0, "limit": 0}
    assert _state_lines(shown["kept_state"])[0] == "safe: step 8 is safe against the loss of any one worker, for 2s"
    assert _state_lines(None) == []


# After the coordinator's death -------------------------------------------------------------------


def a_hello(record: RunRecord, name: str, step: int, *ranks: int) -> HelloFrame:
    """Of a worker whose ranks were stopped while nobody led, and that has their state of that step."""
    holding = Holding(tuple(Held(rank, 2, record.round, step, 1 << 20) for rank in ranks), ("127.0.0.1", 1))
    shown = Presented(record=record, round=record.round, running=False, store_port=7, holding=holding, epoch=1)
    return HelloFrame(run_id=RUN, kind="agent", member=Introduction(MemberId(name), name), present=shown)


def test_the_first_round_of_a_new_coordinator_knows_what_the_last_to_come_back_holds() -> None:
    world = World()
    assert world.protocol.at.moment.record is not None
    after = RunProtocol(RUN)
    peer = Peer()
    after.greet(peer, a_hello(world.protocol.at.moment.record, "a", 5, 0), world.now)
    for _ in range(3):  # until no member can come back that knows of a later round
        world.now += 1.0
        after.hear(peer, RenewFrame(epoch=after.at.epoch), world.now)
        after.settle(world.now)
    after.greet(Peer(), a_hello(world.protocol.at.moment.record, "b", 5, 1), world.now)
    after.settle(world.now)
    assert after.run is not None and after.run.round is not None and after.run.round.number == 1, after.at.reason
    assert after.run.round.resume is not None and after.run.round.resume.step == 5


def test_what_the_first_to_come_back_holds_is_known_when_another_shows_a_later_round() -> None:
    world = World()
    first = world.protocol.at.moment.record
    for name in "ab":
        world.holds(name, 3, 0, 1)
    world.lose("b")
    later = world.protocol.at.moment.record
    assert first is not None and later is not None and later.round > first.round
    after = RunProtocol(RUN)
    after.greet(Peer(), a_hello(first, "b", 5, 0, 1), world.now)
    after.greet(Peer(), a_hello(later, "a", 4), world.now)
    assert after.run is not None and after.run.holdings[MemberId("b")].held[0].step == 5

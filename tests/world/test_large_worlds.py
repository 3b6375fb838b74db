"""Worlds of thousands: no frame grows with them, and a coordinator that has lost its record learns it seat by seat."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator

import pytest

from muster.core.world import records
from muster.core.world.run import Run
from muster.node.rank_env import environment
from muster.types import many
from muster.types.frames import (
    Frame,
    HelloFrame,
    Introduction,
    PartFrame,
    Presented,
    RecordFrame,
    ReleaseFrame,
    RunRecord,
)
from muster.types.records import replace
from muster.types.state import MOST_HELD, Held, Holding, Resume, Source
from muster.types.world import Member, MemberId, Outline, Role, Round, RunId, Seat, Settings
from muster.world import frames_out, wire
from muster.world.frames_out import Moment, Showing
from muster.world.wire import Channel, Decoder, WireError
from tests.simulator.large import LEASE_S, LargeFleet
from tests.simulator.worker import SimulatedWorker
from tests.simulator.worlds import a_training
from tests.world.test_histories import play

MANY = 10_000


def a_run(workers: int, *, takes_outline: bool = True) -> Run:
    ids = [MemberId(f"{rank:032x}") for rank in range(workers)]
    names = [f"a-long-name-of-a-training-worker-{rank}" for rank in range(workers)]
    seats = tuple(Seat(rank, ids[rank], names[rank], f"10.0.0.{rank}", 1 + rank % 2) for rank in range(workers))
    members = {
        seat.member_id: Member(seat.member_id, seat.name, role=Role.ACTIVE, takes_outline=takes_outline)
        for seat in seats
    }
    return Run(Settings(), workers, members, Round(3, seats, "10.0.0.0", 1, "because"))


def heard(data: bytes) -> Frame:
    (told,) = Decoder().feed(data)
    return wire.understood(told)


def test_a_release_is_as_short_in_a_world_of_ten_thousand_as_in_one_of_three_hundred() -> None:
    sizes = {}
    for workers in (300, MANY):
        run = a_run(workers)
        assert run.round is not None
        last = run.members[run.round.seats[-1].member_id]
        sizes[workers] = len(Showing(Moment(RunId("r"), 1, run)).to(last, ReleaseFrame))
    assert sizes[MANY] < sizes[300] + 32 < 2048


@pytest.mark.parametrize("rank", [0, 1, 298])
def test_an_outline_says_all_that_ranks_are_told(rank: int) -> None:
    run = a_run(299)
    assert run.round is not None
    member = run.members[run.round.seats[rank].member_id]
    told = heard(Showing(Moment(RunId("r"), 1, run)).to(member, ReleaseFrame))
    assert isinstance(told, ReleaseFrame) and told.record.outline is not None and not told.record.seats
    whole = records.record(RunId("r"), 1, run).place_of(member.member_id)
    part = told.record.place_of(member.member_id)
    assert whole is not None and part is not None
    shown = [environment(place, 0, "r") for place in (whole, part)]
    assert shown[0] == shown[1] and part.ranks == whole.ranks


@pytest.mark.parametrize("more", [0, 1])
def test_an_outline_says_where_the_state_of_its_ranks_is_and_of_all_after_a_resize(more: int) -> None:
    run = a_run(299)
    assert run.round is not None
    ranks = run.round.rank_count + more
    sources = tuple(Source(rank, f"m{rank}", ("h", 1)) for rank in range(ranks))
    formed = replace(run.round, resume=Resume(7, 0, ranks, sources))
    member = run.members[formed.seats[5].member_id]
    told = heard(Showing(Moment(RunId("r"), 1, replace(run, round=formed))).to(member, ReleaseFrame))
    assert isinstance(told, ReleaseFrame)
    place = told.record.place_of(member.member_id)
    assert place is not None and place.round.resume is not None
    assert place.round.resume.sources == (sources if more else tuple(sources[rank] for rank in place.ranks))


def test_small_worlds_and_members_of_0_1_get_every_seat() -> None:
    for run in (a_run(frames_out.ALL_TOLD), a_run(300, takes_outline=False)):
        assert run.round is not None
        member = run.members[run.round.seats[0].member_id]
        told = heard(Showing(Moment(RunId("r"), 1, run)).to(member, RecordFrame))
        assert isinstance(told, RecordFrame) and told.record.seats == run.round.seats and told.record.outline is None


def test_a_hello_that_presents_a_world_of_ten_thousand_fits_a_frame() -> None:
    record = records.record(RunId("r"), 1, a_run(MANY)).outlined(MemberId(f"{7:032x}"))
    hello = HelloFrame(member=Introduction(MemberId("m"), "a"), present=Presented(record=record))
    assert len(wire.encode(hello)) < 4096


def test_a_hello_of_one_who_holds_as_much_as_one_may_fits_a_frame() -> None:
    held = tuple(Held(rank, MOST_HELD, 10**6, 10**9, 10**12, 10**12) for rank in range(MOST_HELD))
    record = records.record(RunId("r"), 1, a_run(MANY)).outlined(MemberId(f"{7:032x}"))
    shown = Presented(record=record, holding=Holding(held, ("h" * 255, 65535)))
    assert len(wire.encode(HelloFrame(member=Introduction(MemberId("m"), "a"), present=shown))) < wire.MAX_FRAME


# Parts -------------------------------------------------------------------------------------------


def test_a_frame_that_is_too_long_for_one_comes_in_parts_to_whoever_is_proved() -> None:
    record = records.record(RunId("r"), 1, a_run(2 * MANY))
    data = wire.encode(RecordFrame(record=record))
    assert len(data) > wire.MAX_FRAME
    assert all(len(body) <= wire.MAX_FRAME for body in Decoder().bodies(data))
    got: list[Frame] = []
    channel = Channel(lambda _, frame: got.append(frame), lambda *_: None)
    channel.connection_made(_Nowhere())
    channel.proved = True
    for start in range(0, len(data), 65536):
        channel.data_received(data[start : start + 65536])
    assert got == [RecordFrame(record=record)]


def test_a_stranger_gets_no_memory_for_parts() -> None:
    got: list[Frame] = []
    channel = Channel(lambda _, frame: got.append(frame), lambda *_: None)
    channel.connection_made(_Nowhere())
    channel.data_received(wire.encode(PartFrame(text="{", more=True)))
    assert got == [PartFrame(text="{", more=True)]  # which is no hello, and ends it


def test_there_is_an_end_to_parts() -> None:
    decoder, part = Decoder(), PartFrame(text="x" * (1 << 19), more=True)
    with pytest.raises(WireError, match="over the limit"):
        for _ in range(33):
            decoder.joined(part)
    with pytest.raises(WireError, match="over the limit"):
        wire.pack({"type": "x", "text": "x" * wire.MAX_WHOLE})
    with pytest.raises(WireError, match="not JSON"):
        Decoder().joined(PartFrame(text="{"))


class _Nowhere(asyncio.Transport):
    def write(self, data: object) -> None: ...

    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0


# Outlines in small worlds: what is true for three is true for ten thousand --------------------------


@pytest.fixture
def outlines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames_out, "ALL_TOLD", 0)


@pytest.mark.usefixtures("outlines")
def test_a_round_goes_on_under_a_coordinator_that_learns_it_seat_by_seat() -> None:
    fleet = a_training("a b c d", size=3, min=3, max=3, spares=1)
    seats = fleet.seats
    fleet.crash(keep_record=False, back_after_s=0.1)
    fleet.until("it goes on", lambda: fleet.trains(0, 3), 20)
    assert fleet.seats == seats and not fleet.run.next_round > 1
    assert fleet.coordinator.saved is not None and fleet.coordinator.saved.seats == fleet.run.round.seats  # type: ignore[union-attr]


@pytest.mark.usefixtures("outlines")
def test_a_seat_that_nobody_shows_costs_a_round_and_its_number_is_not_used_again() -> None:
    fleet = a_training("a b c d", size=3, min=3, max=3, spares=1)
    fleet.crash(keep_record=False, back_after_s=0.1)
    fleet.agent("b").power_off()
    fleet.until("the next one trains", lambda: fleet.trains(1, 3), 30)
    assert fleet.seats == ["a", "d", "c"]


@pytest.mark.usefixtures("outlines")
def test_a_record_with_unknown_seats_can_be_kept_and_taken_up_again() -> None:
    fleet = a_training("a b c", size=3, min=3, max=3)
    fleet.crash(keep_record=False, back_after_s=0.1)
    fleet.until("it is being learnt", lambda: fleet.coordinator.saved is not None, 20)
    fleet.crash(back_after_s=0.1)
    fleet.until("it goes on", lambda: fleet.trains(0, 3), 20)
    assert fleet.seats == ["a", "b", "c"]


@pytest.mark.usefixtures("outlines")
def test_random_histories_keep_every_promise_when_nobody_knows_more_than_its_own_seat() -> None:
    play(range(100))


@pytest.mark.soak
@pytest.mark.usefixtures("outlines")
def test_many_random_histories_keep_every_promise_when_nobody_knows_more_than_its_own_seat() -> None:
    play(range(100, 2_000))


def test_an_outline_that_cannot_be_is_refused() -> None:
    shown = RunRecord(Settings(), 1, 0, round=1, store=("a", 1), outline=Outline(300, 300))
    told = json.loads(json.dumps(records.write(shown)))
    assert records.read(told) == shown
    told["outline"]["workers"] = 10**9
    with pytest.raises(ValueError, match="workers"):
        records.read(told)


# Very many ---------------------------------------------------------------------------------------


def test_a_thousand_form_and_form_again_when_some_are_killed_and_some_fall_silent() -> None:
    _form_and_heal(1_000)


@pytest.mark.soak
def test_ten_thousand_form_and_form_again_when_some_are_killed_and_some_fall_silent() -> None:
    _form_and_heal(MANY)


def _form_and_heal(workers: int) -> None:
    large = LargeFleet(workers)
    assert large.form().virtual_s < 5
    assert large.lose_some(1, SimulatedWorker.kill).virtual_s < 5
    assert large.lose_some(2, SimulatedWorker.power_off).virtual_s < LEASE_S + 1


@pytest.fixture(params=[3, 65, 1000])
def numbers(request: pytest.FixtureRequest) -> Iterator[dict[int, int]]:
    yield dict.fromkeys(range(request.param), 0)


def test_what_was_before_stays_as_it_was(numbers: dict[int, int]) -> None:
    versions = [many.changed(numbers, -1, 1)]
    crowds = [many.joined(frozenset(numbers), -1)]
    for one in range(200):
        versions.append(many.changed(versions[-1], one, one + 1))
        crowds.append(many.joined(crowds[-1], -one))
    expected, crowd = {**numbers, -1: 1}, {*numbers, -1}
    for one, (version, together) in enumerate(zip(versions, crowds, strict=True)):
        assert version == expected and list(version) == list(expected) and version.get(one) == expected.get(one)
        assert together == crowd and len(together) == len(crowd) and (one in together) == (one in crowd)
        expected, crowd = {**expected, one: one + 1}, crowd | {-one}
    assert crowds[-1] | {10**6} == {*crowds[-1], 10**6} and {1} - crowds[-1] == {1} - set(crowds[-1])

"""A frame of a newer version is no trouble: what is not known in it is ignored, by agents and by coordinators."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from muster.core.member.state import MemberState
from muster.types import frames
from muster.types.frames import HelloFrame, Introduction, KeepFrame, RunRecord, UnknownFrame
from muster.types.world import Elector, Electorate, MemberId, OutcomeState, RankEnd, RunId, RunOutcome, Settings
from muster.world import wire
from muster.world.protocol import RunProtocol

ELECTOR = Elector(MemberId("m0"), "a", ("127.0.0.1", 1))
ELECTORATE = Electorate(1, ELECTOR, ((ELECTOR,),))
NEEDED: dict[str, dict[str, Any]] = {
    "release": {"record": RunRecord(Settings(), 1, 0)},
    "record": {"record": RunRecord(Settings(), 1, 0)},
    "electors": {"electorate": ELECTORATE},
    "keep": {"term": 1, "stamp": 0.5, "leader": ELECTOR, "record": RunRecord(Settings(), 1, 0, electorate=ELECTORATE)},
    "kept": {"term": 1},
    "vote": {"term": 1, "candidate": ELECTOR, "last": (1, 2)},
    "voice": {"term": 1},
    "post": {"path": ("127.0.0.1", 1)},
    "outcome": {"outcome": RunOutcome(OutcomeState.FAILED, "rank_failed", "rank 0 failed")},
}


@pytest.mark.parametrize("kind", sorted(frames.TYPES.keys() - {""}))
def test_a_frame_reads_as_it_was_written_and_without_what_it_does_not_know(kind: str) -> None:
    frame = frames.TYPES[kind](epoch=2, round=3, **NEEDED.get(kind, {}))
    told = frames.write(frame)
    assert frames.read(told) == frame
    assert frames.read({**told, "of_the_future": {"a": [1]}}) == frame


def test_an_unknown_frame_is_read_and_nobody_does_anything_about_it() -> None:
    unknown = frames.read({"type": "of-the-future", "round": 1, "anything": [1, 2]})
    assert unknown == UnknownFrame(name="of-the-future")
    member = MemberState(MemberId("m0"), RunId("run"), Settings(), 0.0)
    assert member.heard(unknown, 0.1) == []

    protocol, peer = RunProtocol(RunId("run")), _Peer()
    protocol.greet(peer, HelloFrame(kind="agent", member=Introduction(MemberId("m0"), "a")), 0.0)
    before, protocol.at.outbox = protocol.run, []
    protocol.hear(peer, unknown, 0.1)
    assert protocol.run == before and not protocol.at.outbox


class _Peer:
    peer = "192.0.2.1:1"

    def send_raw(self, data: bytes) -> None: ...

    def refuse(self, code: str, message: str) -> None:
        raise AssertionError(message)


def test_electors_keep_of_very_many_ends_those_that_failed_first() -> None:
    """With everybody's last words a record did not fit into a frame, and nobody was told how the run ended."""
    ends = tuple(RankEnd(rank, int(rank == 9_000), stderr_tail=("x" * 100,) * 20) for rank in range(10_000))
    record = RunRecord(Settings(), 1, 0, exits=ends)
    kept = record.shortened()
    assert kept.exits[0].rank == 9_000 and len(kept.exits) == frames.MOST_ENDS
    assert not any(end.stderr_tail for end in kept.exits)
    assert len(wire.encode(KeepFrame(term=1, stamp=0.0, leader=Elector(MemberId("a"), "a", ("h", 1)), record=kept)))
    few = replace(record, exits=ends[: frames.FEW_ENDS])
    assert few.shortened() is few

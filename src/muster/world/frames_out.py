"""What is said to whom about a run?

Frames are rendered here for the peers that they concern; `protocol` sends them. A frame for many is encoded once. Of a
large world a member is told its own seat and no other, so that a round costs each of them the same, however many.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from muster.core.world import lending, records
from muster.core.world.run import Run
from muster.types import codec
from muster.types.frames import (
    Frame,
    NoticeFrame,
    OutcomeFrame,
    Presented,
    ReachFrame,
    RecallFrame,
    RecordFrame,
    ReleaseFrame,
    RunRecord,
)
from muster.types.world import LARGE, Cause, Member, MemberId, OutcomeState, Path, Role, Round, RunId, RunOutcome, Seat
from muster.world.wire import encode, pack, spoken

ALL_TOLD = LARGE  # workers: up to so many everyone has the whole record


class Peer(Protocol):
    """What a run's protocol needs of a connection."""

    def send_raw(self, data: bytes) -> None: ...
    def refuse(self, code: str, message: str) -> None: ...

    @property
    def peer(self) -> str:
        """Whom it sees at the other end."""


Addressed = tuple[Peer, bytes]
Shown = ReleaseFrame | RecordFrame


@dataclass(frozen=True)
class Moment:
    """Of which run, in which epoch and at which state something is said: every frame carries epoch and round."""

    run_id: RunId
    epoch: int
    run: Run | None
    clock: str = ""  # the name of the run's clock

    @property
    def number(self) -> int | None:
        return self.run.round.number if self.run is not None and self.run.round else None

    def encode(self, frame: Frame) -> bytes:
        return encode(frame, epoch=self.epoch, round=self.number)

    @property
    def record(self) -> RunRecord:
        assert self.run is not None
        return records.record(self.run_id, self.epoch, self.run, self.clock)

    def recall(self, current: Round, grace_s: float) -> bytes:
        recall = current.recall
        assert recall is not None
        return self.encode(
            RecallFrame(
                round=current.number,
                grace_s=grace_s,
                cause=recall.cause,
                reason=recall.reason,
                dump=recall.cause is Cause.HANG,
            )
        )

    def outcome(self, other: RunOutcome | None = None, *, late: bool = False) -> bytes:
        """Encode the outcome of the run, or the outcome `other` of an earlier run under the same run id."""
        assert self.run is not None
        outcome, settings = other or self.run.outcome, self.run.settings
        assert outcome is not None
        cancelled = outcome.state is OutcomeState.CANCELLED
        grace = settings.stop_grace_s if cancelled else settings.fail_grace_s
        return self.encode(OutcomeFrame(outcome=outcome, grace_s=grace, farewell_s=settings.farewell_s, late=late))


class Showing:
    """The record as it is at a moment, for each of those who are to have it."""

    def __init__(self, moment: Moment) -> None:
        assert moment.run is not None
        self._moment = moment
        self._round = moment.run.round
        self._kept = moment.record
        self._rendered: dict[type[Shown], bytes] = {}
        self._told: dict[type[Shown], dict[str, Any]] = {}

    def to(self, member: Member, kind: type[Shown]) -> bytes:
        if self._round is not None and self._round.world_size > ALL_TOLD and member.takes_outline:
            return self._outline(self._round, self._round.seat_of(member.member_id), kind)
        if kind not in self._rendered:
            self._rendered[kind] = self._moment.encode(kind(record=self._kept))
        return self._rendered[kind]

    def _outline(self, current: Round, seat: Seat | None, kind: type[Shown]) -> bytes:
        """What is the same for all is made once: there may be ten thousand of them."""
        if kind not in self._told:
            frame = kind(record=self._kept.outlined())
            self._told[kind] = spoken(frame, epoch=self._moment.epoch, round=self._moment.number)
        told = self._told[kind]
        if seat is not None:
            own = {"seat": codec.to_wire(seat, names=codec.plain), "first_rank": self._first_ranks[seat.rank]}
            record = told["record"]
            told = {
                **told,
                "record": {**record, "outline": {**record["outline"], **own}, **self._resume(current, seat)},
            }
        return pack(told)

    def _resume(self, current: Round, seat: Seat) -> dict[str, Any]:
        """Where the state of its ranks is: of all, where a world of another size kept it."""
        if current.resume is None or not current.resume.sources:
            return {}
        first = self._first_ranks[seat.rank]
        same_size = current.resume.ranks == current.rank_count
        resume = current.resume.of_ranks(range(first, first + seat.procs)) if same_size else current.resume
        return {"resume": codec.to_wire(resume, names=codec.plain)}

    @functools.cached_property
    def _first_ranks(self) -> list[int]:
        assert self._round is not None
        return list(itertools.accumulate((seat.procs for seat in self._round.seats), initial=0))


def notices(moment: Moment, agents: Mapping[MemberId, Peer], frame: NoticeFrame) -> list[Addressed]:
    """To everyone in the round whose ranks can be told."""
    assert moment.run is not None and moment.run.round is not None
    current, members = moment.run.round, moment.run.members
    data = moment.encode(replace(frame, round=current.number))
    there = [members[seat.member_id] for seat in current.seats if seat.member_id in members]
    return [(agents[one.member_id], data) for one in there if one.takes_notice and one.member_id in agents]


def recalls(moment: Moment, agents: Mapping[MemberId, Peer]) -> list[Addressed]:
    """To everyone whose ranks may still run: the round is called back."""
    assert moment.run is not None and moment.run.round is not None
    current = moment.run.round
    frames: dict[float, bytes] = {}
    found: list[Addressed] = []
    for seat in current.seats:
        if seat.member_id not in current.gone and (peer := agents.get(seat.member_id)):
            grace = _grace(current, seat.member_id)
            if grace not in frames:
                frames[grace] = moment.recall(current, grace)
            found.append((peer, frames[grace]))
    return found


def releases(moment: Moment, agents: Mapping[MemberId, Peer]) -> list[Addressed]:
    """A new round: those that have a rank start it, the others keep its record."""
    assert moment.run is not None
    showing = Showing(moment)
    return [
        (peer, showing.to(member, ReleaseFrame if member.role is Role.ACTIVE else RecordFrame))
        for member_id, member in moment.run.members.items()
        if (peer := agents.get(member_id))
    ]


def releases_to_idle(moment: Moment, agents: Mapping[MemberId, Peer]) -> list[Addressed]:
    """A round that was taken over goes on: those that never heard of it start now."""
    assert moment.run is not None and moment.run.round is not None
    current = moment.run.round
    if current.losses or lending.seats(moment.run, current):  # it is about to be called back
        return []
    idle = [seat.member_id for seat in current.seats if seat.member_id not in current.started]
    showing, members = Showing(moment), moment.run.members
    return [(peer, showing.to(members[i], ReleaseFrame)) for i in idle if i in members and (peer := agents.get(i))]


def known_to(moment: Moment, agents: Mapping[MemberId, Peer]) -> list[Addressed]:
    """The record, to everyone who is here."""
    assert moment.run is not None
    showing, members = Showing(moment), moment.run.members
    return [(peer, showing.to(members[i], RecordFrame)) for i, peer in agents.items() if i in members]


def peers(
    moment: Moment,
    agents: Mapping[MemberId, Peer],
    new: Mapping[MemberId, Peer],
    told: Mapping[MemberId, tuple[Path, ...]],
    listening: Mapping[MemberId, tuple[Path, ...]],
) -> list[Addressed]:
    """Whom to reach: everyone, to those that are new; what has changed, to the others."""
    found: list[Addressed] = []
    if new:
        order = moment.encode(ReachFrame(peers=tuple(listening.items())))
        found += [(peer, order) for peer in new.values()]
    more = tuple((member_id, paths) for member_id, paths in listening.items() if told.get(member_id) != paths)
    gone = tuple(member_id for member_id in told if member_id not in listening)
    if more or gone:
        order = moment.encode(ReachFrame(peers=more, gone=gone))
        found += [(peer, order) for i, peer in agents.items() if i in told and i in listening and i not in new]
    return found


def for_newcomer(moment: Moment, member_id: MemberId, present: Presented, now: float) -> list[bytes]:
    """What a member that was just welcomed has to hear, given what it presented, while there is no outcome."""
    assert moment.run is not None
    frames: list[bytes] = []
    current = moment.run.round
    held = present.round if present.running else None
    member = moment.run.members[member_id]
    mine = current is not None and member.role is Role.ACTIVE and current.seat_of(member_id) is not None
    if held is not None and not (mine and current is not None and current.number == held):
        frames.append(moment.encode(RecallFrame(round=held, cause=Cause.LOSS, reason="the world went on without it")))
    if current is None:
        return frames
    # One that does not know the round is not told to start it while a later one may still be presented.
    # One that is lent has nothing to start it on.
    begins = held == current.number or member.name not in moment.run.lent
    sure = begins and (present.round == current.number or now >= moment.run.not_before)
    if mine and current.recall is None and sure:
        return [*frames, Showing(moment).to(member, ReleaseFrame)]
    if mine and current.recall is not None and member_id not in current.gone:
        return [*frames, moment.recall(current, _grace(current, member_id))]
    return [*frames, Showing(moment).to(member, RecordFrame)]


def _grace(current: Round, member_id: MemberId) -> float:
    assert current.recall is not None
    return current.recall.leaver_grace_s if member_id in current.recall.leavers else current.recall.grace_s

"""What is said to whom about a run?

Frames are rendered here for the peers that they concern; `protocol` sends them. A frame for many is encoded once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from muster.core.world.run import Run
from muster.types.world import Cause, MemberId, OutcomeState, Path, Role, Round, RunId
from muster.world import records
from muster.world.wire import VERSION, encode, show


class Peer(Protocol):
    """What a protocol needs of a connection."""

    def send_raw(self, data: bytes) -> None: ...
    def refuse(self, code: str, message: str) -> None: ...


Notice = tuple[Peer, bytes]


@dataclass(frozen=True)
class Voice:
    """In whose name and at which moment something is said: every frame carries the epoch and the round."""

    run_id: RunId
    epoch: int
    run: Run | None

    def frame(self, kind: str, **fields: Any) -> bytes:
        number = self.run.round.number if self.run is not None and self.run.round else None
        return encode({"v": show(VERSION), "type": kind, "epoch": self.epoch, "round": number, **fields})

    def record(self, kind: str) -> bytes:
        assert self.run is not None
        return self.frame(kind, record=records.record(self.run_id, self.epoch, self.run))

    def recall(self, current: Round, grace_s: float) -> bytes:
        recall = current.recall
        assert recall is not None
        order = {"round": current.number, "grace_s": grace_s, "cause": str(recall.cause), "reason": recall.reason}
        return self.frame("recall", **order, dump=recall.cause is Cause.HANG)

    def outcome(self) -> bytes:
        assert self.run is not None and self.run.outcome is not None
        outcome, settings = self.run.outcome, self.run.settings
        cancelled = outcome.state is OutcomeState.CANCELLED
        grace = settings.stop_grace_s if cancelled else settings.fail_grace_s
        return self.frame("outcome", outcome=outcome.to_wire(), grace_s=grace, farewell_s=settings.farewell_s)


def recalls(voice: Voice, agents: Mapping[MemberId, Peer]) -> list[Notice]:
    """To everyone whose ranks may still run: the round is called back."""
    assert voice.run is not None and voice.run.round is not None
    current = voice.run.round
    frames: dict[float, bytes] = {}
    notices: list[Notice] = []
    for seat in current.seats:
        if seat.member_id not in current.gone and (peer := agents.get(seat.member_id)):
            grace = _grace(current, seat.member_id)
            if grace not in frames:
                frames[grace] = voice.recall(current, grace)
            notices.append((peer, frames[grace]))
    return notices


def releases(voice: Voice, agents: Mapping[MemberId, Peer]) -> list[Notice]:
    """A new round: those that have a rank start it, the others keep its record."""
    assert voice.run is not None
    release, record = voice.record("release"), voice.record("record")
    return [
        (peer, release if member.role is Role.ACTIVE else record)
        for member_id, member in voice.run.members.items()
        if (peer := agents.get(member_id))
    ]


def releases_to_idle(voice: Voice, agents: Mapping[MemberId, Peer]) -> list[Notice]:
    """A round that was taken over goes on: those that never heard of it start now."""
    assert voice.run is not None and voice.run.round is not None
    current = voice.run.round
    if current.losses:
        return []
    idle = [seat.member_id for seat in current.seats if seat.member_id not in current.started]
    release = voice.record("release")
    return [(peer, release) for member_id in idle if (peer := agents.get(member_id))]


def peers(
    voice: Voice,
    agents: Mapping[MemberId, Peer],
    new: Mapping[MemberId, Peer],
    told: Mapping[MemberId, tuple[Path, ...]],
    listening: Mapping[MemberId, tuple[Path, ...]],
) -> list[Notice]:
    """Whom to reach: everyone, to those that are new; what has changed, to the others."""
    found: list[Notice] = []
    if new:
        order = voice.frame("reach", peers=list(listening.items()))
        found += [(peer, order) for peer in new.values()]
    more = [(member_id, paths) for member_id, paths in listening.items() if told.get(member_id) != paths]
    gone = [member_id for member_id in told if member_id not in listening]
    if more or gone:
        order = voice.frame("reach", peers=more, gone=gone)
        found += [(peer, order) for i, peer in agents.items() if i in told and i in listening and i not in new]
    return found


def for_newcomer(voice: Voice, member_id: MemberId, present: Mapping[str, Any], now: float) -> list[bytes]:
    """What a member that was just welcomed has to hear, given what it presented, while there is no outcome."""
    assert voice.run is not None
    frames: list[bytes] = []
    current = voice.run.round
    held = present.get("round") if present.get("running") else None
    member = voice.run.members[member_id]
    mine = current is not None and member.role is Role.ACTIVE and current.seat_of(member_id) is not None
    if held is not None and not (mine and current is not None and current.number == held):
        reason = "the world went on without it"
        frames.append(voice.frame("recall", round=held, grace_s=0.0, cause="loss", reason=reason))
    if current is None:
        return frames
    # One that does not know the round is not told to start it while a later one may still be presented.
    sure = present.get("round") == current.number or now >= voice.run.not_before
    if mine and current.recall is None and sure:
        return [*frames, voice.record("release")]
    if mine and current.recall is not None and member_id not in current.gone:
        return [*frames, voice.recall(current, _grace(current, member_id))]
    return [*frames, voice.record("record")]


def _grace(current: Round, member_id: MemberId) -> float:
    assert current.recall is not None
    return current.recall.leaver_grace_s if member_id in current.recall.leavers else current.recall.grace_s

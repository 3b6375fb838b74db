"""Do ranks know that the round will be called back, and have they saved?

A planned recall is told first, so that `muster.should_save()` is true in all ranks at the same call. Those that ask are
held at their next call while all are counted; then everyone is told the call from which it is true. Where nobody asks,
nothing is waited for.
"""

from __future__ import annotations

from muster.core.world.run import CallBack, Decision, GiveNotice, Run, Stay, listed, next_expiry
from muster.types.many import changed
from muster.types.records import replace
from muster.types.world import Cause, MemberId, Notice, Recall, Round

HOLD_S = 2.0  # a rank is held, and an answer awaited, for no longer
AHEAD = 2  # a rank may be on its way from one call to the next when it is counted


def first(run: Run, current: Round, recall: Recall, now: float) -> Decision:
    """The recall, or what has to happen before it."""
    told = _told(run, current)
    if not told:
        return Decision(CallBack(recall), recall.reason)
    if (notice := current.notice) is None:
        return Decision(GiveNotice(for_s=HOLD_S), f"{recall.reason}; ranks are told first")
    if notice.call is None:
        return _counted(run, notice, told, recall, now)
    return _awaited(run, current, notice, recall, now)


def _told(run: Run, current: Round) -> frozenset[MemberId]:
    """Those whose ranks can be told."""
    here = (run.members.get(seat.member_id) for seat in current.seats)
    return frozenset(one.member_id for one in here if one is not None and one.takes_notice) - current.finished


def _counted(run: Run, notice: Notice, told: frozenset[MemberId], recall: Recall, now: float) -> Decision:
    silent, until = told - notice.calls.keys(), notice.at + HOLD_S
    if silent and now < until:
        names = listed(run.members[member_id].name for member_id in silent)
        return Decision(Stay(), f"{recall.reason}; asking {names} about their ranks", min(until, next_expiry(run)))
    if not notice.asking:
        return Decision(CallBack(recall), recall.reason)
    call = max(notice.calls.values()) + AHEAD
    return Decision(GiveNotice(call, patience(run, recall)), f"{recall.reason}; ranks are told to save")


def _awaited(run: Run, current: Round, notice: Notice, recall: Recall, now: float) -> Decision:
    late = notice.asking & run.members.keys() - notice.seen - current.finished
    until = notice.told_at + patience(run, recall)
    if now >= until or (notice.done and not late):
        return Decision(CallBack(recall), recall.reason)
    who = f"those of {listed(run.members[one].name for one in late)}" if late else "one"
    reason = f"{recall.reason}; ranks were told to save, {who} has not gone on since"
    return Decision(Stay(), reason, min(until, next_expiry(run)))


def patience(run: Run, recall: Recall) -> float:
    """A worker that was asked to go has the stop grace for everything: its machine may not wait any longer."""
    return run.settings.stop_grace_s / (2 if recall.cause is Cause.DRAIN else 1)


# What becomes of a round ---------------------------------------------------------------------------


def given(current: Round, call: int | None, now: float) -> Round:
    notice = current.notice
    if call is None or notice is None:
        return replace(current, notice=Notice(now))
    return replace(current, notice=replace(notice, call=call, told_at=now))


def answered(current: Round, member_id: MemberId, calls: int, *, seen: bool, done: bool) -> Round:
    """What a member says of its ranks: how often they have asked, and whether they have been told."""
    if (notice := current.notice) is None:
        return current
    if notice.call is None:
        return replace(current, notice=replace(notice, calls=changed(notice.calls, member_id, calls)))
    now_seen = notice.seen | ({member_id} if seen else set())
    return replace(current, notice=replace(notice, seen=now_seen, done=notice.done or done))

"""What happens next in a run, and why?

`decide(run, now)` answers with an action, a reason that a user can read, and the time at which to ask again.
`carry_out(run, action, now)` is the run after it. What members report is entered by `core.world.transitions`.

The stages of a run, in the order in which `decide` asks about them:

    expired      a lease ran out: that member is lost
    ended        an outcome exists: wait until everyone has stopped, then say farewell
    ordered      an end was asked for from outside: it becomes the outcome
    recovering   a new coordinator waits for the members of the round that it was shown
    live         a round is out: it succeeds, is called back, or goes on (`core.world.live`)
    closing      a round was called back: judge what it cost (`core.world.closing`)
    forming      nobody trains: seat the next world, or say what it waits for (`core.world.forming`)
"""

from __future__ import annotations

from muster.core.world import closing, forming, live, notices
from muster.core.world.run import (
    UNSEEN,
    Action,
    CallBack,
    CheckHealth,
    Decision,
    Dismiss,
    Farewell,
    Finish,
    GiveNotice,
    GiveUpOn,
    Heal,
    KeepOut,
    Lose,
    Release,
    ReportHeal,
    Run,
    Stay,
    TakeBack,
    TellStall,
    TellUnwatched,
    TurnGate,
    WithdrawNotice,
    listed,
    lose,
    next_expiry,
    silenced,
    unacknowledged,
)
from muster.types.many import merged
from muster.types.records import replace
from muster.types.world import Loss, Role, Round, Seat


def decide(run: Run, now: float) -> Decision:
    """The next thing to do, why, and when to ask again if nothing happens before."""
    return (
        _expired(run, now)
        or _ended(run, now)
        or _ordered(run)
        or _recovering(run, now)
        or live.succeeded(run)
        or live.decide(run, now)
        or closing.decide(run, now)
        or forming.decide(run, now)
    )


def carry_out(run: Run, action: Action, now: float) -> Run:
    match action:
        case Stay():
            return run
        case Lose(members=ids):
            for member_id in ids:
                member = run.members[member_id]
                silent = now - member.lease_until + run.settings.lease_s
                run = lose(run, member_id, now, f"silent for {silent:.1f} s", since=now - silent)
                run = silenced(run, member_id, now - silent)
            return run
        case GiveNotice(call=call):
            assert run.round is not None
            return replace(run, round=notices.given(run.round, call, now))
        case WithdrawNotice():
            assert run.round is not None
            return replace(run, round=replace(run.round, notice=None))
        case TakeBack(taken=taken):
            assert run.round is not None and run.round.recall is not None
            closed = replace(run.round, recall=replace(run.round.recall, forgiven=True))
            return replace(run, round=closed, taken_back=taken, proven=None)
        case CallBack(recall=recall):
            assert run.round is not None
            return replace(run, round=replace(run.round, recall=recall))
        case CheckHealth(members=ids):
            return replace(run, checking=run.checking | set(ids))
        case TurnGate(gate=gate):
            return replace(run, coming=gate)
        case KeepOut(members=ids, why=why):
            return replace(run, kept_out={**run.kept_out, **dict.fromkeys(ids, why)}, coming=None)
        case Heal(gate=gate):
            return replace(run, gate=gate)
        case Release():
            return forming.released(run, action, now)
        case TellStall(stall=stall):
            return replace(run, stall=stall)
        case TellUnwatched():
            return replace(run, told_unwatched=True)
        case ReportHeal():
            return replace(run, healing=None)
        case Dismiss(members=ids):
            leaving = {i: replace(run.members[i], role=Role.LEAVING) for i in ids if i in run.members}
            return replace(run, members=merged(run.members, leaving), surplus=run.surplus - set(ids))
        case GiveUpOn(members=seats):
            assert run.round is not None
            found = replace(run.round, fences={**run.round.fences, **{seat.member_id: now for seat in seats}})
            lost = {loss.member_id for loss in found.losses}
            news = [_given_up(seat, found) for seat in seats if seat.member_id not in lost]
            return replace(run, round=replace(found, losses=(*found.losses, *news)), recovery_until=None)
        case Finish(outcome=outcome):
            return replace(run, outcome=outcome, recovery_until=None, healing=None)
        case Farewell():
            return replace(run, farewell_said=True)


def _given_up(seat: Seat, last: Round) -> Loss:
    why = "its ranks are gone" if seat.member_id in last.gone else "not back under a new coordinator"
    return Loss(seat.member_id, seat.name, UNSEEN, why)


def _ended(run: Run, now: float) -> Decision | None:
    if run.outcome is None:
        return None
    if run.farewell_said:
        return Decision(Stay(), f"ended: {run.outcome.message}", next_expiry(run))
    if slow := unacknowledged(run):
        return Decision(Stay(), f"ended; {listed(slow)} still stopping ranks", next_expiry(run))
    if run.holds_farewell:
        return Decision(Stay(), "ended; no rank runs, the end is being recorded", next_expiry(run))
    return Decision(Farewell(), "everyone has the outcome and no rank runs")


def _ordered(run: Run) -> Decision | None:
    if run.ordered is None:
        return None
    number = run.round.number if run.round else None
    return Decision(Finish(replace(run.ordered, round=number)), run.ordered.message)


def _expired(run: Run, now: float) -> Decision | None:
    late = tuple(member.member_id for member in run.members.values() if member.lease_until <= now)
    if not late:
        return None
    return Decision(Lose(late), f"{listed(run.members[i].name for i in late)} silent for a lease")


def _recovering(run: Run, now: float) -> Decision | None:
    if run.recovery_until is None:
        return None
    assert run.round is not None
    missing = tuple(seat for seat in run.round.seats if seat.member_id not in run.members)
    awaited = [seat.name for seat in missing if seat.member_id not in run.round.gone]
    if awaited and now < run.recovery_until:
        reason = f"recovering round {run.round.number}: {listed(awaited)} not back yet"
        return Decision(Stay(), reason, min(run.recovery_until, next_expiry(run)))
    if missing:
        return Decision(GiveUpOn(missing), f"{listed(seat.name for seat in missing)} did not come back")
    known = run.round.started | run.round.gone
    idle = [seat.name for seat in run.round.seats if seat.member_id not in known]
    if idle and now < run.not_before:
        reason = f"recovering round {run.round.number}: {listed(idle)} does not run it, a later one may be presented"
        return Decision(Stay(), reason, min(run.not_before, next_expiry(run)))
    return Decision(GiveUpOn(()), f"round {run.round.number} goes on: all its members are back")

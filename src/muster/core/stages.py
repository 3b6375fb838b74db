"""What happens next in a run, and why?

`decide(roll, now)` answers with an action, a reason that a user can read, and the time at which to ask again.
`carry_out(roll, action, now)` is the roll after it. What members report is entered by `core.register`.

The stages of a run, in the order in which `decide` asks about them:

    expired      a lease ran out: that member is lost
    ended        an outcome exists: wait until everyone has stopped, then say farewell
    ordered      an end was asked for from outside: it becomes the outcome
    recovering   a new coordinator waits for the members of the round that it was shown
    live         a round is out: it succeeds, is called back, or goes on (`core.live`)
    closing      a round was called back: judge what it cost (`core.closing`)
    forming      nobody trains: seat the next world, or say what it waits for (`core.forming`)
"""

from __future__ import annotations

from dataclasses import replace

from muster.core import closing, forming, live
from muster.core.roll import (
    UNSEEN,
    Action,
    CallBack,
    CheckHealth,
    Decision,
    Dismiss,
    End,
    Farewell,
    GiveUpOn,
    Heal,
    KeepOut,
    Lose,
    Release,
    Roll,
    TurnGate,
    Wait,
    listed,
    lose,
    next_expiry,
    unacknowledged,
    with_loss,
)
from muster.types.world import Loss, Role


def decide(roll: Roll, now: float) -> Decision:
    """The next thing to do, why, and when to ask again if nothing happens before."""
    return (
        _expired(roll, now)
        or _ended(roll, now)
        or _ordered(roll)
        or _recovering(roll, now)
        or live.succeeded(roll)
        or live.decide(roll, now)
        or closing.decide(roll, now)
        or forming.decide(roll, now)
    )


def carry_out(roll: Roll, action: Action, now: float) -> Roll:
    match action:
        case Wait():
            return roll
        case Lose(members=ids):
            for member_id in ids:
                member = roll.members[member_id]
                silent = now - member.lease_until + roll.settings.lease_s
                roll = lose(roll, member_id, now, f"silent for {silent:.1f} s", since=now - silent)
            return roll
        case CallBack(recall=recall):
            assert roll.round is not None
            return replace(roll, round=replace(roll.round, recall=recall))
        case CheckHealth(members=ids):
            return replace(roll, checking=roll.checking | set(ids))
        case TurnGate(gate=gate):
            return replace(roll, coming=gate)
        case KeepOut(members=ids, why=why):
            return replace(roll, kept_out={**roll.kept_out, **dict.fromkeys(ids, why)}, coming=None)
        case Heal(gate=gate):
            return replace(roll, gate=gate)
        case Release():
            return forming.released(roll, action, now)
        case Dismiss(members=ids):
            leaving = {i: replace(roll.members[i], role=Role.LEAVING) for i in ids if i in roll.members}
            return replace(roll, members={**roll.members, **leaving}, surplus=roll.surplus - set(ids))
        case GiveUpOn(members=seats):
            assert roll.round is not None
            found = replace(roll.round, fences={**roll.round.fences, **{seat.member_id: now for seat in seats}})
            why = "not back after a coordinator restart"
            for seat in seats:
                found = with_loss(found, Loss(seat.member_id, seat.name, UNSEEN, why))
            return replace(roll, round=found, recovery_until=None)
        case End(outcome=outcome):
            return replace(roll, outcome=outcome, recovery_until=None)
        case Farewell():
            return replace(roll, farewell_said=True)


def _ended(roll: Roll, now: float) -> Decision | None:
    if roll.outcome is None:
        return None
    if roll.farewell_said:
        return Decision(Wait(), f"ended: {roll.outcome.message}", next_expiry(roll))
    if slow := unacknowledged(roll):
        return Decision(Wait(), f"ended; {listed(slow)} still stopping ranks", next_expiry(roll))
    if roll.holds_farewell:
        return Decision(Wait(), "ended; no rank runs, the end is being recorded", next_expiry(roll))
    return Decision(Farewell(), "everyone has the outcome and no rank runs")


def _ordered(roll: Roll) -> Decision | None:
    if roll.ordered is None:
        return None
    number = roll.round.number if roll.round else None
    return Decision(End(replace(roll.ordered, round=number)), roll.ordered.message)


def _expired(roll: Roll, now: float) -> Decision | None:
    late = tuple(member.member_id for member in roll.members.values() if member.lease_until <= now)
    if not late:
        return None
    return Decision(Lose(late), f"{listed(roll.members[i].name for i in late)} silent for a lease")


def _recovering(roll: Roll, now: float) -> Decision | None:
    if roll.recovery_until is None:
        return None
    assert roll.round is not None
    missing = tuple(seat for seat in roll.round.seats if seat.member_id not in roll.members)
    awaited = [seat.name for seat in missing if seat.member_id not in roll.round.gone]
    if awaited and now < roll.recovery_until:
        reason = f"recovering round {roll.round.number}: {listed(awaited)} not back yet"
        return Decision(Wait(), reason, min(roll.recovery_until, next_expiry(roll)))
    if missing:
        return Decision(GiveUpOn(missing), f"{listed(seat.name for seat in missing)} did not come back")
    idle = [seat.name for seat in roll.round.seats if seat.member_id not in roll.round.started | roll.round.gone]
    if idle and now < roll.not_before:
        reason = f"recovering round {roll.round.number}: {listed(idle)} does not run it, a later one may be presented"
        return Decision(Wait(), reason, min(roll.not_before, next_expiry(roll)))
    return Decision(GiveUpOn(()), f"round {roll.round.number} goes on: all its members are back")

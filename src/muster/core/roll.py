"""Who is in the next world, or why not yet.

`decide(roll, now)` answers with an action, a reason that a user can read, and the time at which to ask again.
`carry_out(roll, action, now)` is the roll after it. What members report is entered by `core.register`.

The stages of a run, in the order in which `decide` asks about them:

    ended        an outcome exists: wait until everyone has stopped, then say farewell
    expired      a lease ran out: that member is lost
    recovering   a new coordinator waits for the members of the round that it was shown
    live         a round is out: it succeeds, is called back, or goes on
    closing      a round was called back: judge what it cost, wait until all its ranks are gone
    forming      nobody trains: seat the next world, or say who is missing
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from muster.core import seating
from muster.types.world import (
    Cause,
    Loss,
    Member,
    MemberId,
    Outcome,
    OutcomeState,
    RankExit,
    RanksState,
    Recall,
    Role,
    Round,
    Seat,
    Settings,
)


@dataclass(frozen=True)
class Roll:
    """The coordinator's record of one run: who is present, in which round and role."""

    settings: Settings
    target: int
    members: Mapping[MemberId, Member] = field(default_factory=dict)
    round: Round | None = None
    outcome: Outcome | None = None
    restarts_used: int = 0
    next_round: int = 0
    target_set_at: float = -math.inf
    removals: tuple[str, ...] = ()  # names that the next shrink should take first
    ordered: Outcome | None = None  # an end that was asked for from outside
    min_reached_at: float | None = None
    below_min_since: float | None = None
    recovery_until: float | None = None
    not_before: float = -math.inf  # until then a later round than the one that we know may be presented
    departed: tuple[str, ...] = ()
    checking: frozenset[MemberId] = frozenset()
    surplus: frozenset[MemberId] = frozenset()  # sent out of the world by a smaller target
    best_step: int | None = None
    stale_rounds: int = 0
    blamed: str | None = None  # the worker that failed first in the last round, if a failure ended it
    blamed_times: int = 0
    holds_farewell: bool = False  # somebody else records the end first, and then lets the members go
    farewell_said: bool = False

    @property
    def running(self) -> Round | None:
        """The round that trains now."""
        return self.round if self.round is not None and self.round.recall is None and not self.outcome else None


UNSEEN = -math.inf  # when a member was lost that nobody watched: failures of its round are put down to that

# What can be done about a roll -------------------------------------------------------------------


@dataclass(frozen=True)
class Wait:
    pass


@dataclass(frozen=True)
class Lose:
    members: tuple[MemberId, ...]


@dataclass(frozen=True)
class CallBack:
    recall: Recall


@dataclass(frozen=True)
class CheckHealth:
    members: tuple[MemberId, ...]


@dataclass(frozen=True)
class Release:
    round: Round
    charged: bool = False  # it costs one of the run's restarts
    blamed: str | None = None
    parked: tuple[tuple[MemberId, str], ...] = ()


@dataclass(frozen=True)
class Dismiss:
    members: tuple[MemberId, ...]


@dataclass(frozen=True)
class GiveUpOn:
    """Recovery is over: these members of the round did not come back."""

    members: tuple[Seat, ...]


@dataclass(frozen=True)
class End:
    outcome: Outcome


@dataclass(frozen=True)
class Farewell:
    pass


Action = Wait | Lose | CallBack | CheckHealth | Release | Dismiss | GiveUpOn | End | Farewell


@dataclass(frozen=True)
class Decision:
    action: Action
    reason: str
    wake_at: float = math.inf


def decide(roll: Roll, now: float) -> Decision:
    """The next thing to do, why, and when to ask again if nothing happens before."""
    return (
        _expired(roll, now)
        or _ended(roll, now)
        or _ordered(roll)
        or _recovering(roll, now)
        or _succeeded(roll)
        or _live(roll, now)
        or _closing(roll, now)
        or _forming(roll, now)
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
        case Release():
            return _released(roll, action, now)
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


# Ended, expired, recovering ----------------------------------------------------------------------


def _ended(roll: Roll, now: float) -> Decision | None:
    if roll.outcome is None:
        return None
    if roll.farewell_said:
        return Decision(Wait(), f"ended: {roll.outcome.message}", _next_expiry(roll))
    if slow := unacknowledged(roll):
        return Decision(Wait(), f"ended; {_names(slow)} still stopping ranks", _next_expiry(roll))
    if roll.holds_farewell:
        return Decision(Wait(), "ended; no rank runs, the end is being recorded", _next_expiry(roll))
    return Decision(Farewell(), "everyone has the outcome and no rank runs")


def unacknowledged(roll: Roll) -> list[str]:
    """Members whose ranks may still be stopping, once there is an outcome."""
    return sorted(member.name for member in roll.members.values() if not member.acknowledged)


def _ordered(roll: Roll) -> Decision | None:
    if roll.ordered is None:
        return None
    number = roll.round.number if roll.round else None
    return Decision(End(replace(roll.ordered, round=number)), roll.ordered.message)


def _expired(roll: Roll, now: float) -> Decision | None:
    late = tuple(member.member_id for member in roll.members.values() if member.lease_until <= now)
    if not late:
        return None
    return Decision(Lose(late), f"{_names(roll.members[i].name for i in late)} silent for a lease")


def _recovering(roll: Roll, now: float) -> Decision | None:
    if roll.recovery_until is None:
        return None
    assert roll.round is not None
    missing = tuple(seat for seat in roll.round.seats if seat.member_id not in roll.members)
    awaited = [seat.name for seat in missing if seat.member_id not in roll.round.gone]
    if awaited and now < roll.recovery_until:
        reason = f"recovering round {roll.round.number}: {_names(awaited)} not back yet"
        return Decision(Wait(), reason, min(roll.recovery_until, _next_expiry(roll)))
    if missing:
        return Decision(GiveUpOn(missing), f"{_names(seat.name for seat in missing)} did not come back")
    idle = [seat.name for seat in roll.round.seats if seat.member_id not in roll.round.started | roll.round.gone]
    if idle and now < roll.not_before:
        reason = f"recovering round {roll.round.number}: {_names(idle)} does not run it, a later one may be presented"
        return Decision(Wait(), reason, min(roll.not_before, _next_expiry(roll)))
    return Decision(GiveUpOn(()), f"round {roll.round.number} goes on: all its members are back")


# Live --------------------------------------------------------------------------------------------


def _succeeded(roll: Roll) -> Decision | None:
    """Also for a round that was called back a moment too late: its work is done."""
    current = roll.round
    if current is None or not all(seat.member_id in current.finished for seat in current.seats):
        return None
    message = f"all {current.rank_count} ranks of round {current.number} exited 0"
    return Decision(End(Outcome(OutcomeState.SUCCEEDED, "succeeded", message, current.number)), message)


def _live(roll: Roll, now: float) -> Decision | None:
    current = roll.running
    if current is None:
        return None
    return _send_home(roll) or _broken(roll, current, now) or _resize(roll, current, now) or _goes_on(roll, current)


def _send_home(roll: Roll) -> Decision | None:
    """Those that a smaller target sent out of the world, and that were not needed as spares then."""
    leaving = tuple(sorted(roll.surplus))
    if not leaving:
        return None
    names = _names(roll.members[member_id].name for member_id in leaving)
    return Decision(Dismiss(leaving), f"{names} leaves: the world is smaller and there are spares enough")


def _broken(roll: Roll, current: Round, now: float) -> Decision | None:
    """Something in the live round is gone: call the rest back."""
    quick = roll.settings.restart_grace_s
    if missed := [loss for loss in current.losses if loss.member_id not in current.finished]:
        told = "; ".join(f"{loss.name}: {loss.why}" for loss in missed)
        return _call_back(Cause.LOSS, f"lost {told}", now, quick)
    if current.first_failed_rank is not None:
        first = current.exits[current.first_failed_rank]
        grace = quick if roll.restarts_used < roll.settings.max_restarts else roll.settings.fail_grace_s
        return _call_back(Cause.FAILURE, f"rank {first.rank} on {first.worker}: {first.reason}", now, grace)
    quiet_at = _quiet_at(roll, current)
    if quiet_at <= now:
        reason = f"no rank advanced for {roll.settings.hang_timeout_s:g} s"
        return _call_back(Cause.HANG, reason, now, quick)
    return None


def _quiet_at(roll: Roll, current: Round) -> float:
    """When the round counts as hung if nothing advances before; ranks that are done need not advance."""
    if roll.settings.hang_timeout_s is None:
        return math.inf
    if current.up_at is None:
        return math.inf
    latest = max((mark.at for mark in current.progress.values()), default=current.up_at)
    return max(latest, current.up_at) + roll.settings.hang_timeout_s


def _resize(roll: Roll, current: Round, now: float) -> Decision | None:
    if current.world_size > roll.target:
        leavers = _leavers(roll, current)
        names = _names(seat.name for seat in leavers)
        reason = f"target is {roll.target}, the world has {current.world_size}: {names} leaves"
        ids = frozenset(seat.member_id for seat in leavers)
        return _call_back(Cause.SHRINK, reason, now, roll.settings.restart_grace_s, ids, roll.settings.stop_grace_s)
    if current.world_size == roll.target or current.finished:
        return None
    spares = candidates(roll)
    planned = seating.again(_places(roll, current), spares, roll.target, roll.settings.segment)
    if planned.size <= current.world_size:
        return None
    reason = f"growing from {current.world_size} to {planned.size} of {roll.target}"
    since = max(roll.target_set_at, min(member.joined_at for member in spares))
    if planned.size < roll.target and now < since + roll.settings.scale_debounce_s:
        wake = min(since + roll.settings.scale_debounce_s, _next_expiry(roll), _quiet_at(roll, current))
        return Decision(Wait(), f"{reason}: gathering more", wake)
    if untested := _check_first(roll, planned):
        return replace(untested, wake_at=min(untested.wake_at, _quiet_at(roll, current)))
    return _call_back(Cause.GROW, reason, now, roll.settings.restart_grace_s)


def _leavers(roll: Roll, current: Round) -> tuple[Seat, ...]:
    """Named ones first, then the highest ranks; with segments, whole segments from the top."""
    count = current.world_size - roll.target
    if roll.settings.segment is not None:
        return current.seats[-count:]
    named = [seat for seat in current.seats if seat.name in roll.removals]
    rest = [seat for seat in reversed(current.seats) if seat.name not in roll.removals]
    return tuple((named + rest)[:count])


def _goes_on(roll: Roll, current: Round) -> Decision:
    done = f", {len(current.finished)} done" if current.finished else ""
    short = f" of {roll.target} wanted" if current.world_size < roll.target else ""
    reason = f"round {current.number}: {current.world_size}{short} workers train{done}"
    return Decision(Wait(), reason, min(_next_expiry(roll), _quiet_at(roll, current)))


def _call_back(
    cause: Cause,
    reason: str,
    now: float,
    grace_s: float,
    leavers: frozenset[MemberId] = frozenset(),
    leaver_grace_s: float = 0.0,
) -> Decision:
    return Decision(CallBack(Recall(cause, reason, now, grace_s, leavers, leaver_grace_s)), reason)


# Closing -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    """What the end of a round cost. `until` is set while it is too early to say."""

    charged: bool = False
    first: RankExit | None = None
    until: float | None = None
    why: str = ""


def judge(roll: Roll, now: float) -> Verdict:
    """Was the recalled round ended by its own ranks (an incident) or by a change of members (free)?"""
    closed = roll.round
    assert closed is not None and closed.recall is not None
    if closed.recall.cause is Cause.HANG:
        if _still_there(closed, now):
            ahead = [fence for fence in closed.fences.values() if fence > now]
            return Verdict(until=min(ahead, default=math.inf), why="collecting stacks")
        if any(loss.at <= closed.recall.at for loss in closed.losses):
            return Verdict()  # the others waited for a member that was gone
        return Verdict(charged=True, first=guilty_of_hang(closed))
    failed_at = closed.first_failed_at
    if failed_at is None or closed.first_failed_rank is None:
        return Verdict()
    called_back_before = closed.recall.cause is not Cause.FAILURE and failed_at >= closed.recall.at
    if called_back_before or closed.first_stopped_at < failed_at:
        return Verdict()  # members stop at different moments: the slower ones fail over the quicker ones
    window = failed_at + roll.settings.blame_s
    if any(loss.at <= window for loss in closed.losses):
        return Verdict()
    if now < window:
        return Verdict(until=window, why="a failure may come from a member that is being lost")
    return _silent_since(roll, closed, failed_at, now) or Verdict(
        charged=True, first=closed.exits[closed.first_failed_rank]
    )


def _silent_since(roll: Roll, closed: Round, failed_at: float, now: float) -> Verdict | None:
    """Too early to say while a member has not been heard since the failure: it may be the cause."""
    lease = roll.settings.lease_s
    quiet = [
        member
        for seat in closed.seats
        if (member := roll.members.get(seat.member_id)) and member.lease_until - lease < failed_at
    ]
    if not quiet:
        return None
    # One that is well renews by the middle of its lease, which nobody would wake us for.
    overdue = [member.lease_until - lease / 2 for member in quiet]
    until = min(at if at > now else member.lease_until for at, member in zip(overdue, quiet, strict=True))
    return Verdict(until=until, why=f"{_names(member.name for member in quiet)} silent: lost, or slow?")


def guilty_of_hang(closed: Round) -> RankExit | None:
    """The rank that stopped first: least advanced, not itself waiting for others, longest idle."""

    def suspicion(end: RankExit) -> tuple[float, bool, float, int]:
        step = -math.inf if end.step is None else end.step
        return (step, end.waiting or not end.stack, -(end.idle_s or 0.0), end.rank)

    return min((end for end in closed.exits.values() if end.hung), key=suspicion, default=None)


def _closing(roll: Roll, now: float) -> Decision | None:
    """A round was called back: what did it cost, and is everyone out of it?"""
    closed = roll.round
    if closed is None:
        return None
    assert closed.recall is not None
    verdict = judge(roll, now)
    if verdict.until is not None:
        wake = min(verdict.until, _next_expiry(roll))
        return Decision(Wait(), f"round {closed.number} ended ({closed.recall.reason}); {verdict.why}", wake)
    limit = roll.settings.no_progress_rounds
    if limit is not None and _stale_after(roll, closed) >= limit:
        step = "no step at all" if roll.best_step is None else f"highest step {roll.best_step}"
        message = f"{limit} rounds in a row made no progress ({step})"
        outcome = Outcome(OutcomeState.FAILED, "no_progress", message, closed.number, verdict.first)
        return Decision(End(outcome), message)
    if verdict.charged and roll.restarts_used >= roll.settings.max_restarts:
        return _failed(roll, closed, verdict.first)
    return None


def _failed(roll: Roll, closed: Round, first: RankExit | None) -> Decision:
    assert closed.recall is not None
    spent = f"{roll.restarts_used} of {roll.settings.max_restarts} restarts used"
    if first is None:
        message = f"round {closed.number}: {closed.recall.reason}; {spent}"
        return Decision(End(Outcome(OutcomeState.FAILED, "hang", message, closed.number)), message)
    where = f" at {first.stack}" if first.stack else ""
    tail = "".join(f"\n  {line}" for line in first.stderr_tail) if not first.hung else ""
    message = f"rank {first.rank} on {first.worker}: {first.reason}{where} in round {closed.number}; {spent}"
    message += f"; its last stderr lines:{tail}" if tail else ""
    reason = "hang" if first.hung else "rank_failed"
    outcome = Outcome(OutcomeState.FAILED, reason, message, closed.number, first)
    return Decision(End(outcome), message)


def _still_there(closed: Round, now: float) -> list[Seat]:
    """Seats whose ranks may still run: not confirmed gone, and not yet fenced off by time."""
    return [
        seat
        for seat in closed.seats
        if seat.member_id not in closed.gone and closed.fences.get(seat.member_id, math.inf) > now
    ]


def _stale_after(roll: Roll, closed: Round) -> int:
    """How many rounds in a row, this one included, brought no new highest step. A resize is nobody's fault."""
    assert closed.recall is not None
    if closed.recall.cause in (Cause.GROW, Cause.SHRINK):
        return 0
    top = max((mark.step for mark in closed.progress.values()), default=None)
    advanced = top is not None and (roll.best_step is None or top > roll.best_step)
    return 0 if advanced else roll.stale_rounds + 1


# Forming -----------------------------------------------------------------------------------------


def candidates(roll: Roll, *, last_resort: bool = False) -> list[Member]:
    """Members that could be given a rank. Those parked for failing first are tried only as a last resort."""
    return [
        member
        for member in roll.members.values()
        if member.role is Role.SPARE
        or (
            last_resort and member.role is Role.PARKED and member.member_id not in roll.checking and _was_blamed(member)
        )
    ]


_BLAMED_NOTE = "its ranks failed first twice"


def _was_blamed(member: Member) -> bool:
    return member.note.startswith(_BLAMED_NOTE)


def _sent_away(roll: Roll, last: Round) -> frozenset[MemberId]:
    """Members of `last` that a smaller target takes out; none if the target was raised again meanwhile."""
    count = last.world_size - roll.target
    if count <= 0:
        return frozenset()
    if last.recall is not None and last.recall.leavers:
        return last.recall.leavers
    if roll.settings.segment is not None:
        return frozenset()  # whole segments leave, from the top
    return frozenset([seat.member_id for seat in last.seats if seat.name in roll.removals][:count])


def _places(roll: Roll, last: Round, without: Iterable[MemberId] = ()) -> list[tuple[Seat, Member | None]]:
    """The seats of `last` with the members that still hold them."""
    empty = frozenset(without)
    places = []
    for seat in last.seats:
        member = roll.members.get(seat.member_id)
        kept = member is not None and member.role is Role.ACTIVE and member.member_id not in empty
        places.append((seat, member if kept else None))
    return places


def plan(roll: Roll, now: float) -> seating.Seating:
    """The world that could be formed from who is here, whether or not it is time."""
    spares = candidates(roll)
    segment = roll.settings.segment
    if roll.round is None:
        planned = seating.first(spares, roll.target, segment)
        if planned.size < roll.settings.min:
            planned = seating.first(candidates(roll, last_resort=True), roll.target, segment)
        return planned
    last, away = roll.round, _sent_away(roll, roll.round)
    unlucky = _unlucky(roll, now)
    if unlucky is not None:
        swapped = seating.again(_places(roll, last, {unlucky, *away}), spares, roll.target, segment)
        if not swapped.vacant and swapped.size >= min(last.world_size, roll.target):
            return swapped
    planned = seating.again(_places(roll, last, away), spares, roll.target, segment)
    if planned.vacant and away:
        # Somebody else was lost meanwhile: that made the world smaller already.
        planned = seating.again(_places(roll, last), spares, roll.target, segment)
    if planned.size < roll.settings.min:
        planned = seating.again(_places(roll, last), candidates(roll, last_resort=True), roll.target, segment)
    return planned


def _unlucky(roll: Roll, now: float) -> MemberId | None:
    """The worker whose ranks have now failed first in two rounds running."""
    assert roll.round is not None
    first = judge(roll, now).first
    seat = roll.round.worker_of(first.rank) if first else None
    if seat is None or seat.name != roll.blamed or roll.blamed_times < 1:
        return None
    return seat.member_id


def available(roll: Roll, now: float) -> int:
    """How many workers the next world could have. Without segments a count will do: any spare fits any gap."""
    if roll.settings.segment is not None:
        return plan(roll, now).size
    count = len(candidates(roll))
    if roll.round is not None:
        count += sum(
            member.role is Role.ACTIVE
            for seat in roll.round.seats
            if (member := roll.members.get(seat.member_id)) is not None
        )
    if count < roll.settings.min:
        count += len(candidates(roll, last_resort=True)) - len(candidates(roll))
    return min(count, roll.target)


def _forming(roll: Roll, now: float) -> Decision:
    last = roll.round
    if now < roll.not_before:
        reason = "a member that has not come back yet may know of a later round"
        return Decision(Wait(), reason, min(roll.not_before, _next_expiry(roll)))
    if last is not None and (held := _still_there(last, now)):
        wake = min([fence for fence in last.fences.values() if fence > now] + [_next_expiry(roll)])
        reason = f"waiting until the ranks of round {last.number} on {_names(s.name for s in held)} are gone"
        return Decision(Wait(), reason, wake)
    planned = plan(roll, now)
    if planned.size < roll.settings.min:
        return _below_min(roll, planned, now)
    if not (wait := _last_call(roll, planned, now)):
        return _release(roll, planned, now)
    return wait


def _below_min(roll: Roll, planned: seating.Seating, now: float) -> Decision:
    need = roll.settings.min
    since = now if roll.below_min_since is None else roll.below_min_since
    until = since + roll.settings.below_min_timeout_s
    whole = f" in whole segments of {roll.settings.segment}" if roll.settings.segment else ""
    reason = f"{planned.size} of at least {need} workers{whole}: {need - planned.size} missing"
    if roll.departed:
        reason += f"; left: {_names(roll.departed)}"
    parked = [member for member in roll.members.values() if member.role is Role.PARKED]
    if parked:
        reason += "; parked: " + ", ".join(f"{member.name} ({member.note})" for member in parked)
    if now < until:
        return Decision(Wait(), reason, min(until, _next_expiry(roll)))
    message = f"below the minimum for {roll.settings.below_min_timeout_s:g} s: {reason}"
    number = roll.round.number if roll.round else None
    return Decision(End(Outcome(OutcomeState.FAILED, "below_minimum", message, number)), message)


def _last_call(roll: Roll, planned: seating.Seating, now: float) -> Decision | None:
    """Is it worth waiting a little for more members? None when it is not."""
    settings = roll.settings
    if roll.round is None:
        full = planned.size == roll.target and len(candidates(roll)) >= roll.target + settings.spares
        since = now if roll.min_reached_at is None else roll.min_reached_at
        missing = roll.target + settings.spares - len(candidates(roll))
    else:
        assert roll.round.recall is not None
        full = not planned.vacant or planned.size == roll.target
        since = max(roll.round.recall.at, -math.inf if roll.min_reached_at is None else roll.min_reached_at)
        missing = planned.vacant
    until = since + settings.last_call_s
    if full or now >= until:
        return None
    reason = f"{planned.size} workers are here; last call for {missing} more"
    return Decision(Wait(), reason, min(until, _next_expiry(roll)))


def _check_first(roll: Roll, planned: seating.Seating) -> Decision | None:
    """Those that are to get a rank and have not shown that they are well; None if there are none."""
    untested = tuple(
        member.member_id
        for member in planned.order
        if member.role is not Role.ACTIVE and member.checks_health and member.fit_for < roll.next_round
    )
    if not untested:
        return None
    asked = tuple(i for i in untested if i not in roll.checking)
    reason = f"{_names(roll.members[i].name for i in untested)} checks its health before it gets a rank"
    return Decision(CheckHealth(asked) if asked else Wait(), reason, _next_expiry(roll))


def _release(roll: Roll, planned: seating.Seating, now: float) -> Decision:
    if untested := _check_first(roll, planned):
        return untested
    seats = tuple(
        Seat(rank, member.member_id, member.name, member.addr, member.procs, member.domain)
        for rank, member in enumerate(planned.order)
    )
    reason, charged, blamed, parked = _story(roll, planned, now)
    host = planned.order[0]
    formed = Round(
        roll.next_round, seats, store_addr=host.addr, store_port=host.store_port, released_at=now, why=reason
    )
    return Decision(Release(formed, charged, blamed, parked), reason)


def _story(
    roll: Roll, planned: seating.Seating, now: float
) -> tuple[str, bool, str | None, tuple[tuple[MemberId, str], ...]]:
    """Why the round forms, whether it costs a restart, who is blamed, who is parked for it."""
    last = roll.round
    if last is None:
        return f"round {roll.next_round}: {planned.size} workers", False, None, ()
    assert last.recall is not None
    verdict = judge(roll, now)
    seat = last.worker_of(verdict.first.rank) if verdict.first else None
    seated = {member.member_id for member in planned.order}
    parked: tuple[tuple[MemberId, str], ...] = ()
    if seat is not None and seat.member_id not in seated and seat.member_id == _unlucky(roll, now):
        parked = ((seat.member_id, f"{_BLAMED_NOTE}, in rounds {last.number - 1} and {last.number}"),)
    newcomers = [
        f"{member.name} takes rank {rank}"
        for rank, member in enumerate(planned.order)
        if rank < last.world_size and last.seat_of(member.member_id) is None
    ]
    reason = f"round {roll.next_round}: {planned.size} workers, after {last.recall.reason}"
    if verdict.first is not None and verdict.first.hung:
        reason += f"; rank {verdict.first.rank} on {verdict.first.worker} stopped first"
    if newcomers:
        reason += "; " + ", ".join(newcomers)
    return reason, verdict.charged, seat.name if seat else None, parked


def _not_needed(
    roll: Roll, out: list[Member], members: Mapping[MemberId, Member], formed: Round
) -> frozenset[MemberId]:
    """Of those that a shrink sends out of the world, the ones that spares are not short of: highest ranks first."""
    spares = sum(member.role is Role.SPARE for member in members.values())
    extra = spares - roll.settings.spares - max(0, roll.target - formed.world_size)
    highest_first = sorted(out, key=lambda member: -(member.rank or 0))
    return frozenset(member.member_id for member in highest_first[: max(0, extra)])


def _released(roll: Roll, action: Release, now: float) -> Roll:
    """The roll with a new round out: roles, ranks, restarts and the score of the round before."""
    formed, last = action.round, roll.round
    ranks = {seat.member_id: seat.rank for seat in formed.seats}
    parked = dict(action.parked)
    out: list[Member] = []
    members: dict[MemberId, Member] = {}
    for member_id, member in roll.members.items():
        if member_id in ranks:
            port = 0 if ranks[member_id] == 0 else member.store_port
            member = replace(
                member,
                role=Role.ACTIVE,
                rank=ranks[member_id],
                ranks_state=RanksState.RUNNING,
                note="",
                store_port=port,
            )
        elif member_id in parked:
            member = replace(member, role=Role.PARKED, rank=None, note=parked[member_id])
        elif member.role is Role.ACTIVE:
            out.append(member)
            member = replace(member, role=Role.SPARE, rank=None)
        elif member.rank is not None:
            member = replace(member, rank=None)
        members[member_id] = member
    seen = [mark.step for mark in last.progress.values()] if last else []
    best = max([*seen, *([] if roll.best_step is None else [roll.best_step])], default=None)
    return replace(
        roll,
        members=members,
        round=formed,
        next_round=formed.number + 1,
        restarts_used=roll.restarts_used + action.charged,
        removals=(),
        checking=frozenset(),
        surplus=_not_needed(roll, out, members, formed) if last and last.world_size > roll.target else frozenset(),
        best_step=best,
        stale_rounds=_stale_after(roll, last) if last else 0,
        blamed=action.blamed,
        blamed_times=(roll.blamed_times + 1 if roll.blamed == action.blamed else 1) if action.blamed else 0,
        min_reached_at=None,
        below_min_since=None,
        departed=(),
    )


# Losing a member (by silence here, by a closed connection in `core.register`) ---------------------


def lose(roll: Roll, member_id: MemberId, now: float, why: str, since: float | None = None) -> Roll:
    """The roll without that member. `since` is when it was last known to be well: now, if its connection closed."""
    member = roll.members.get(member_id)
    if member is None:
        return roll
    members = {key: value for key, value in roll.members.items() if key != member_id}
    departed = (*(name for name in roll.departed if name != member.name), member.name)[-8:]
    roll = replace(roll, members=members, departed=departed, surplus=roll.surplus - {member_id})
    current = roll.round
    if current is None or current.seat_of(member_id) is None:
        return roll
    well_at = now if since is None else since
    if member_id not in current.gone:
        # An agent whose connection closes may take us for dead; from then it keeps its ranks for one more lease.
        fence = well_at + roll.settings.lease_s + roll.settings.kill_margin_s
        current = replace(current, fences={**current.fences, member_id: fence})
    return replace(roll, round=with_loss(current, Loss(member_id, member.name, well_at, why)))


def with_loss(current: Round, loss: Loss) -> Round:
    """None is lost twice."""
    if any(known.member_id == loss.member_id for known in current.losses):
        return current
    return replace(current, losses=(*current.losses, loss))


def _next_expiry(roll: Roll) -> float:
    return min((member.lease_until for member in roll.members.values()), default=math.inf)


def _names(names: Iterable[str]) -> str:
    listed = sorted(set(names), key=seating.natural)
    return ", ".join(listed) if len(listed) <= 8 else f"{', '.join(listed[:8])} and {len(listed) - 8} more"

"""Who is in the next world, or why not yet?

Here is asked who may have a rank, whether it is worth waiting for more, and what a release does to the roll. Who sits
where is `core.seating`'s question; what the round before cost is `core.closing`'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace

from muster.core import gates, seating
from muster.core.closing import judge, stale_after, still_there
from muster.core.roll import CheckHealth, Decision, End, KeepOut, Release, Roll, TurnGate, Wait, listed, next_expiry
from muster.types.world import Member, MemberId, Outcome, OutcomeState, RanksState, Role, Round, Seat

_BLAMED_NOTE = "its ranks failed first twice"


def decide(roll: Roll, now: float) -> Decision:
    last = roll.round
    if now < roll.not_before:
        reason = "a member that has not come back yet may know of a later round"
        return Decision(Wait(), reason, min(roll.not_before, next_expiry(roll)))
    if last is not None and (held := still_there(last, now)):
        wake = min([fence for fence in last.fences.values() if fence > now] + [next_expiry(roll)])
        reason = f"waiting until the ranks of round {last.number} on {listed(s.name for s in held)} are gone"
        if told := [last.saves[seat.member_id] for seat in held if seat.member_id in last.saves]:
            reason += f" ({'; '.join(told[:4])})"
        return Decision(Wait(), reason, wake)
    planned = plan(roll, now)
    if planned.size < roll.settings.min:
        if roll.coming is not None:
            return Decision(TurnGate(None), "too few workers are left to wait for their mesh")
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
        reason += f"; left: {listed(roll.departed)}"
    parked = [member for member in roll.members.values() if member.role is Role.PARKED]
    if parked:
        reason += "; parked: " + ", ".join(f"{member.name} ({member.note})" for member in parked)
    if now < until:
        return Decision(Wait(), reason, min(until, next_expiry(roll)))
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
    return Decision(Wait(), reason, min(until, next_expiry(roll)))


def check_first(roll: Roll, planned: seating.Seating) -> Decision | None:
    """Those that are to get a rank and have not shown that they are well; None if there are none."""
    untested = tuple(
        member.member_id
        for member in planned.order
        if member.role is not Role.ACTIVE and member.checks_health and member.fit_for < roll.next_round
    )
    if not untested:
        return None
    asked = tuple(i for i in untested if i not in roll.checking)
    reason = f"{listed(roll.members[i].name for i in untested)} checks its health before it gets a rank"
    return Decision(CheckHealth(asked) if asked else Wait(), reason, next_expiry(roll))


def reach_first(roll: Roll, planned: seating.Seating, now: float) -> Decision | None:
    """Those that are to train together have to reach each other; None when they do, or have had time enough."""
    if roll.settings.gate_timeout_s is None:
        return None
    verdict = gates.judge(planned.order, roll.reach, roll.coming, roll.settings.gate_timeout_s, now)
    if verdict.gate.state is not gates.State.READY and (out := _worse_with(roll, planned, verdict.gate)):
        names = listed(roll.members[member_id].name for member_id in out)
        reason = f"{names} stays out: {verdict.gate.named}"
        return Decision(KeepOut(out, reason), reason)
    if verdict.gate != roll.coming:
        return Decision(TurnGate(verdict.gate), verdict.reason)
    if verdict.look_at is None:
        return None
    return Decision(Wait(), verdict.reason, min(verdict.look_at, next_expiry(roll)))


def _worse_with(roll: Roll, planned: seating.Seating, gate: gates.Gate) -> frozenset[MemberId]:
    """Newcomers for whom a world whose mesh was ready would get a degraded one, though there are enough without them.

    They are given the gate's time, unless others can take their places now. A world that trains, and some of whose
    own ways have shut meanwhile, takes in nobody: called back, it might not come up again.
    """
    last = roll.round
    if last is None or roll.gate is None or roll.gate.state is not gates.State.READY:
        return frozenset()
    seated = {seat.member_id for seat in last.seats}
    newcomers = [member for member in planned.order if member.member_id not in seated]
    core = [member for member in planned.order if member.member_id in seated]
    out = gates.left_out(core, newcomers, roll.reach)
    if not out and gate.is_open and roll.running is not None:
        out = frozenset(member.member_id for member in newcomers)
    if out <= roll.kept_out.keys():
        return frozenset()  # there are too few without them
    others = [member for member in candidates(roll) if member.member_id not in out]
    smaller = seating.again(places_of(roll, last), others, roll.target, roll.settings.segment)
    enough = roll.settings.min if gate.is_open else planned.size
    return out if smaller.size >= enough else frozenset()


def _release(roll: Roll, planned: seating.Seating, now: float) -> Decision:
    if held := check_first(roll, planned) or reach_first(roll, planned, now):
        return held
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


# Who could be seated -----------------------------------------------------------------------------


def candidates(roll: Roll, *, last_resort: bool = False) -> list[Member]:
    """Members that could be given a rank. As a last resort also those that were kept out or failed first."""
    return [
        member
        for member in roll.members.values()
        if (member.role is Role.SPARE and (last_resort or member.member_id not in roll.kept_out))
        or (
            last_resort and member.role is Role.PARKED and member.member_id not in roll.checking and _was_blamed(member)
        )
    ]


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


def places_of(roll: Roll, last: Round, without: Iterable[MemberId] = ()) -> list[tuple[Seat, Member | None]]:
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
        swapped = seating.again(places_of(roll, last, {unlucky, *away}), spares, roll.target, segment)
        if not swapped.vacant and swapped.size >= min(last.world_size, roll.target):
            return swapped
    planned = seating.again(places_of(roll, last, away), spares, roll.target, segment)
    if planned.vacant and away:
        # Somebody else was lost meanwhile: that made the world smaller already.
        planned = seating.again(places_of(roll, last), spares, roll.target, segment)
    if planned.size < roll.settings.min:
        planned = seating.again(places_of(roll, last), candidates(roll, last_resort=True), roll.target, segment)
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


# After a release ---------------------------------------------------------------------------------


def released(roll: Roll, action: Release, now: float) -> Roll:
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
        stale_rounds=stale_after(roll, last) if last else 0,
        blamed=action.blamed,
        blamed_times=(roll.blamed_times + 1 if roll.blamed == action.blamed else 1) if action.blamed else 0,
        min_reached_at=None,
        below_min_since=None,
        departed=(),
        gate=roll.coming,
        coming=None,
        kept_out={key: why for key, why in roll.kept_out.items() if key not in ranks},
    )


def _not_needed(
    roll: Roll, out: list[Member], members: Mapping[MemberId, Member], formed: Round
) -> frozenset[MemberId]:
    """Of those that a shrink sends out of the world, the ones that spares are not short of: highest ranks first."""
    spares = sum(member.role is Role.SPARE for member in members.values())
    extra = spares - roll.settings.spares - max(0, roll.target - formed.world_size)
    highest_first = sorted(out, key=lambda member: -(member.rank or 0))
    return frozenset(member.member_id for member in highest_first[: max(0, extra)])

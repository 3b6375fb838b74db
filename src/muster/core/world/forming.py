"""Who is in the next world, or why not yet?

Here is asked who may have a rank, whether it is worth waiting for more, and what a release does to the run. Who sits
where is `core.world.seating`'s question; what the round before cost is `core.world.closing`'s.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from muster.core.world import gates, heals, hopeless, lending, resuming, seating, sizes
from muster.core.world.closing import again, judge, stale_after, still_there, stuck
from muster.core.world.run import (
    CheckHealth,
    Decision,
    Finish,
    KeepOut,
    Release,
    Run,
    Stay,
    TurnGate,
    listed,
    next_expiry,
    told,
)
from muster.types import plural
from muster.types.records import replace
from muster.types.world import (
    Gate,
    GateState,
    Member,
    MemberId,
    OutcomeState,
    RanksState,
    Role,
    Round,
    RunOutcome,
    Seat,
)

_BLAMED_NOTE = "its ranks failed first twice"


def decide(run: Run, now: float) -> Decision:
    last = run.round
    if now < run.not_before:
        reason = "a member that has not come back yet may know of a later round"
        return Decision(Stay(), reason, min(run.not_before, next_expiry(run)))
    if last is not None and (held := still_there(last, now)):
        wake = min([fence for fence in last.fences.values() if fence > now] + [next_expiry(run)])
        reason = f"waiting until the ranks of round {last.number} on {listed(s.name for s in held)} are gone"
        if saves := [last.saves[seat.member_id] for seat in held if seat.member_id in last.saves]:
            reason += f" ({'; '.join(saves[:4])})"
        return Decision(Stay(), reason, wake)
    if (here := available(run, now)) >= run.settings.min:
        planned = plan(run, now)
        here = planned.size
    if here < run.settings.min:
        if run.coming is not None:
            return Decision(TurnGate(None), "too few workers are left to wait for their mesh")
        return _below_min(run, here, now)
    if not (wait := _last_call(run, planned, now)):
        return _release(run, planned, now)
    return wait


def _below_min(run: Run, here: int, now: float) -> Decision:
    need = run.settings.min
    since = now if run.below_min_since is None else run.below_min_since
    until = since + run.settings.below_min_timeout_s
    whole = f" in whole segments of {run.settings.segment}" if run.settings.segment else ""
    reason = f"{here} of at least {plural.workers(need)}{whole}: {need - here} missing"
    if run.departed:
        reason += f"; left: {listed(run.departed)}"
    if lent := lending.here(run):
        reason += f"; lent: {listed(member.name for member in lent)}"
    parked = [member for member in run.members.values() if member.role is Role.PARKED]
    if parked:
        reason += "; parked: " + told([f"{member.name} ({member.note})" for member in parked], ", ")
    nowhere = [member.name for member in run.members.values() if member.domain is None and member.role is Role.SPARE]
    if run.settings.segment and nowhere:
        reason += f"; in no domain that is known: {listed(nowhere)}"
    if now < until:
        return Decision(Stay(), reason, min(until, next_expiry(run)))
    message = f"below the minimum for {run.settings.below_min_timeout_s:g} s: {reason}"
    number = run.round.number if run.round else None
    return Decision(Finish(RunOutcome(OutcomeState.FAILED, "below_minimum", message, number)), message)


def _last_call(run: Run, planned: seating.Seating, now: float) -> Decision | None:
    """Is it worth waiting a little for more members? None when it is not."""
    settings = run.settings
    if run.round is None:
        back = False
        lent = len(lending.here(run))
        missing = run.aim + settings.spares - len(candidates(run)) - lent
        full = planned.size + lent >= run.aim and missing <= 0
        since = now if run.min_reached_at is None else run.min_reached_at
    else:
        assert run.round.recall is not None
        back = run.round.recall.forgiven  # the size before is needed, not only what is left of this one
        vacant = max(0, planned.vacant - _kept_free(run, run.round))
        full = planned.size == run.aim or not (vacant or back)
        since = max(run.round.recall.at, -math.inf if run.min_reached_at is None else run.min_reached_at)
        missing = run.aim - planned.size if back else vacant
    until = since + (sizes.back_s(settings) if back else settings.last_call_s)
    if full or now >= until:
        return None
    reason = f"{plural.workers(planned.size)} {'is' if planned.size == 1 else 'are'} here; last call for {missing} more"
    return Decision(Stay(), reason, min(until, next_expiry(run)))


def _kept_free(run: Run, last: Round) -> int:
    """Places of that round whose workers are lent, and that a smaller target does not close: nobody is awaited."""
    return max(0, len(lending.seats(run, last)) - max(0, last.world_size - run.aim))


def check_first(run: Run, planned: seating.Seating) -> Decision | None:
    """Those that are to get a rank and have not shown that they are well; None if there are none."""
    untested = tuple(
        member.member_id
        for member in planned.order
        if member.role is not Role.ACTIVE and member.checks_health and member.fit_for < run.next_round
    )
    if not untested:
        return None
    asked = tuple(i for i in untested if i not in run.checking)
    reason = f"{listed(run.members[i].name for i in untested)} checks its health before it gets a rank"
    return Decision(CheckHealth(asked) if asked else Stay(), reason, next_expiry(run))


def reach_first(run: Run, planned: seating.Seating, now: float) -> Decision | None:
    """Those that are to train together have to reach each other; None when they do, or have had time enough."""
    if run.settings.gate_timeout_s is None:
        return None
    verdict = gates.judge(planned.order, run.reach, run.coming, run.settings.gate_timeout_s, now)
    if verdict.gate.state is not GateState.READY and (out := _worse_with(run, planned, verdict.gate)):
        names = listed(run.members[member_id].name for member_id in out)
        reason = f"{names} stays out: {verdict.gate.named}"
        return Decision(KeepOut(out, reason), reason)
    if verdict.gate != run.coming:
        return Decision(TurnGate(verdict.gate), verdict.reason)
    if verdict.look_at is None:
        return None
    return Decision(Stay(), verdict.reason, min(verdict.look_at, next_expiry(run)))


def _worse_with(run: Run, planned: seating.Seating, gate: Gate) -> frozenset[MemberId]:
    """Newcomers for whom a world whose mesh was ready would get a degraded one, though there are enough without them.

    They are given the gate's time, unless others can take their places now. A world that trains, and some of whose
    own ways have shut meanwhile, takes in nobody: called back, it might not come up again.
    """
    last = run.round
    if last is None or run.gate is None or run.gate.state is not GateState.READY:
        return frozenset()
    seated = {seat.member_id for seat in last.seats}
    newcomers = [member for member in planned.order if member.member_id not in seated]
    core = [member for member in planned.order if member.member_id in seated]
    out = gates.left_out(core, newcomers, run.reach)
    if not out and gate.is_open and run.running is not None:
        out = frozenset(member.member_id for member in newcomers)
    if out <= run.kept_out.keys():
        return frozenset()  # there are too few without them
    others = [member for member in candidates(run) if member.member_id not in out]
    smaller = seating.again(places_of(run, last), others, run.aim, run.settings.segment)
    enough = run.settings.min if gate.is_open else planned.size
    return out if smaller.size >= enough else frozenset()


def _release(run: Run, planned: seating.Seating, now: float) -> Decision:
    if held := check_first(run, planned) or reach_first(run, planned, now):
        return held
    seats = tuple(
        Seat(rank, member.member_id, member.name, member.addr, member.procs, member.domain)
        for rank, member in enumerate(planned.order)
    )
    reason, charged, blamed, parked = _story(run, planned, now)
    host = planned.order[0]
    barred = resuming.barred(run, charged)
    resume = resuming.choose(resuming.living(run), seats, barred)
    if resume is not None:
        reason += f"; {resume.why}"
    formed = Round(run.next_round, seats, host.addr, host.store_port, reason, resume)
    first = judge(run, now).first if run.round is not None else None
    path, times = stuck(run, run.round, first) if run.round is not None else ("", 0)
    line = hopeless.line_of(run, run.round, first) if run.round is not None else ""
    return Decision(Release(formed, charged, blamed, parked, barred, path, times, line), reason)


def _story(
    run: Run, planned: seating.Seating, now: float
) -> tuple[str, bool, str | None, tuple[tuple[MemberId, str], ...]]:
    """Why the round forms, whether it costs a restart, who is blamed, who is parked for it."""
    last = run.round
    if last is None:
        return f"round {run.next_round}: {plural.workers(planned.size)}", False, None, ()
    assert last.recall is not None
    verdict = judge(run, now)
    seat = last.worker_of(verdict.first.rank) if verdict.first else None
    seated = {member.member_id for member in planned.order}
    parked: tuple[tuple[MemberId, str], ...] = ()
    if seat is not None and seat.member_id not in seated and seat.member_id == _unlucky(run, now):
        parked = ((seat.member_id, f"{_BLAMED_NOTE}, in rounds {last.number - 1} and {last.number}"),)
    newcomers = [
        f"{member.name} takes rank {rank}"
        for rank, member in enumerate(planned.order)
        if rank < last.world_size and last.seat_of(member.member_id) is None
    ]
    reason = f"round {run.next_round}: {plural.workers(planned.size)}, after {last.recall.reason}"
    reason += again(run, last, verdict.first)
    if last.recall.forgiven and run.taken_back is not None:
        reason += f"; taken back to {run.taken_back.size}: {run.taken_back.why}"
    if verdict.first is not None and verdict.first.hung:
        reason += f"; rank {verdict.first.rank} on {verdict.first.worker} stopped first"
    if newcomers:
        reason += "; " + told(newcomers, ", ")
    return reason, verdict.charged, seat.name if seat else None, parked


# Who could be seated -----------------------------------------------------------------------------


def candidates(run: Run, *, last_resort: bool = False) -> list[Member]:
    """Members that could be given a rank. As a last resort also those that were kept out or failed first.

    One that is lent has nothing to run ranks on, whatever is needed.
    """
    # With segments, nobody knows yet with whom one that is in no domain could train.
    anywhere = run.settings.segment is None
    known = [
        member
        for member in run.members.values()
        if (anywhere or member.domain is not None) and member.name not in run.lent
    ]
    if not last_resort and not run.kept_out:
        return [member for member in known if member.role is Role.SPARE]
    return [
        member
        for member in known
        if (member.role is Role.SPARE and (last_resort or member.member_id not in run.kept_out))
        or (last_resort and member.role is Role.PARKED and member.member_id not in run.checking and _was_blamed(member))
    ]


def _was_blamed(member: Member) -> bool:
    return member.note.startswith(_BLAMED_NOTE)


def _sent_away(run: Run, last: Round) -> frozenset[MemberId]:
    """Members of `last` that a smaller target takes out; none if the target was raised again meanwhile.

    Those that are lent are out already.
    """
    count = last.world_size - run.aim - len(lending.seats(run, last))
    if count <= 0:
        return frozenset()
    if last.recall is not None and last.recall.leavers:
        return last.recall.leavers
    if run.settings.segment is not None:
        return frozenset()  # whole segments leave, from the top
    named = [seat.member_id for seat in last.seats if seat.name in run.removals and seat.name not in run.lent]
    return frozenset(named[:count])


def _stays(run: Run, member: Member | None) -> bool:
    """Whether it keeps the place that it has."""
    return member is not None and member.role is Role.ACTIVE and member.name not in run.lent


def places_of(run: Run, last: Round, without: Iterable[MemberId] = ()) -> list[tuple[Seat, Member | None]]:
    """The seats of `last` with the members that still hold them."""
    empty = frozenset(without)
    places = []
    for seat in last.seats:
        member = run.members.get(seat.member_id)
        kept = _stays(run, member) and seat.member_id not in empty
        places.append((seat, member if kept else None))
    return places


def plan(run: Run, now: float) -> seating.Seating:
    """The world that could be formed from who is here, whether or not it is time."""
    spares = candidates(run)
    segment = run.settings.segment
    if run.round is None:
        planned = seating.first(spares, run.aim, segment)
        if planned.size < run.settings.min:
            planned = seating.first(candidates(run, last_resort=True), run.aim, segment)
        return planned
    last, away = run.round, _sent_away(run, run.round)
    unlucky = _unlucky(run, now)
    if unlucky is not None:
        swapped = seating.again(places_of(run, last, {unlucky, *away}), spares, run.aim, segment)
        if not swapped.vacant and swapped.size >= min(last.world_size, run.aim):
            return swapped
    planned = seating.again(places_of(run, last, away), spares, run.aim, segment)
    if planned.vacant and away:
        # Somebody else was lost meanwhile: that made the world smaller already.
        planned = seating.again(places_of(run, last), spares, run.aim, segment)
    if planned.size < run.settings.min:
        planned = seating.again(places_of(run, last), candidates(run, last_resort=True), run.aim, segment)
    return planned


def _unlucky(run: Run, now: float) -> MemberId | None:
    """The worker whose ranks have now failed first in two rounds running."""
    assert run.round is not None
    first = judge(run, now).first
    seat = run.round.worker_of(first.rank) if first else None
    if seat is None or seat.name != run.blamed or run.blamed_times < 1:
        return None
    return seat.member_id


def available(run: Run, now: float) -> int:
    """How many workers the next world could have. Without segments a count will do: any spare fits any gap."""
    if run.settings.segment is not None:
        return plan(run, now).size
    count = len(candidates(run))
    if run.round is not None:
        count += sum(_stays(run, run.members.get(seat.member_id)) for seat in run.round.seats)
    if count < run.settings.min and (run.kept_out or any(member.note for member in run.members.values())):
        count += len(candidates(run, last_resort=True)) - len(candidates(run))
    return min(count, run.aim)


# After a release ---------------------------------------------------------------------------------


def released(run: Run, action: Release, now: float) -> Run:
    """The run with a new round out: roles, ranks, restarts and the score of the round before."""
    healing, last = heals.begun(run, action.round), run.round
    formed = replace(action.round, since=heals.since(run, healing))
    ranks = {seat.member_id: seat.rank for seat in formed.seats}
    parked = dict(action.parked)
    out: list[Member] = []
    members: dict[MemberId, Member] = {}
    for member_id, member in run.members.items():
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
    best = max([*seen, *([] if run.best_step is None else [run.best_step])], default=None)
    return replace(
        run,
        members=members,
        round=formed,
        next_round=formed.number + 1,
        restarts_used=run.restarts_used + action.charged,
        removals=(),
        checking=frozenset(),
        surplus=_not_needed(run, out, members, formed) if last and _shrinks(run, last) else frozenset(),
        best_step=best,
        stale_rounds=stale_after(run, last) if last else 0,
        proven=sizes.proven_after(run, last) if last else None,
        stuck_at=action.stuck_at,
        stuck_times=action.stuck_times,
        hopeless=action.hopeless,
        healing=healing,
        blamed=action.blamed,
        blamed_times=(run.blamed_times + 1 if run.blamed == action.blamed else 1) if action.blamed else 0,
        barred=action.barred,
        min_reached_at=None,
        below_min_since=None,
        departed=(),
        gate=run.coming,
        coming=None,
        kept_out={key: why for key, why in run.kept_out.items() if key not in ranks},
    )


def _shrinks(run: Run, last: Round) -> bool:
    """A size that is taken back sends nobody home: those that it had more than before were there before."""
    return last.world_size > run.aim and not (last.recall is not None and last.recall.forgiven)


def _not_needed(run: Run, out: list[Member], members: Mapping[MemberId, Member], formed: Round) -> frozenset[MemberId]:
    """Of those that a shrink sends out of the world, the ones that spares are not short of: highest ranks first.

    Those that are lent come back one day, and are no spares before.
    """
    out = [member for member in out if member.name not in run.lent]
    spares = sum(member.role is Role.SPARE and member.name not in run.lent for member in members.values())
    extra = spares - run.settings.spares - max(0, run.aim - formed.world_size)
    highest_first = sorted(out, key=lambda member: -(member.rank or 0))
    return frozenset(member.member_id for member in highest_first[: max(0, extra)])

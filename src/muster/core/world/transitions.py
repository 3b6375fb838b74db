"""What a report does to the run: one function per kind of event, each returning the run after it.

Nothing is decided here; `core.world.decisions.decide` looks at the result. An event that may not be entered gives
`Refusal` (with the reason to send back) or `Held` (ask again at that time) instead of a run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields

from muster.core.world import launches, notices, pace, sizes
from muster.core.world.forming import available
from muster.core.world.run import UNSEEN, Run, kept_lease, lose, silenced, with_loss
from muster.types.bench import Bench
from muster.types.many import changed, joined, merged
from muster.types.records import replace
from muster.types.state import Holding
from muster.types.world import (
    COORDINATOR_SILENT,
    NEVER_S,
    Gate,
    Healing,
    Loss,
    Member,
    MemberId,
    OutcomeState,
    Pace,
    Path,
    Progress,
    RankEnd,
    RanksState,
    Reach,
    Role,
    Round,
    RunOutcome,
    Seat,
    Settings,
    Spot,
)

ALL_ENDED = "all its processes ended"
GUARD_ENDED = "its guard ended its ranks"


@dataclass(frozen=True)
class Refusal:
    code: str
    message: str


@dataclass(frozen=True)
class Held:
    """Not yet: the old bearer of this name may still be alive until then."""

    until: float
    message: str


def open_run(settings: Settings) -> Run:
    return Run(settings=settings, target=settings.first_target)


def restored(
    settings: Settings,
    target: int,
    restarts_used: int,
    last: Round | None,
    now: float,
    *,
    gate: Gate | None = None,
    lent: Mapping[str, str] | None = None,
    healing: Healing | None = None,
    usual: Pace | None = None,
    certain: bool = True,
    soon: bool = False,
) -> Run:
    """A run from a record that outlived its coordinator; the members of `last` are awaited.

    One that is not `certain` came from a member, which may not know of the last round. Whoever does comes back within
    a lease, or has ended its ranks by then. The same if they are awaited only so `soon`.
    A member's record was made when the round began, so the heal that it shows may be over: this heal is dropped.
    """
    fence = settings.lease_s + settings.kill_margin_s
    wait = fence if soon else max(settings.recovery_s, fence)
    return Run(
        settings=settings,
        target=target,
        restarts_used=restarts_used,
        round=last,
        next_round=0 if last is None else last.number + 1,
        recovery_until=None if last is None else now + wait,
        not_before=-math.inf if certain else now + fence,
        gate=gate,
        lent=lent or {},
        healing=healing if certain else None,
        pace=usual or Pace(),
    )


def tell_time(run: Run, now: float) -> Run:
    """Note since when there are enough members, or too few; `decide` measures its patience from it."""
    if run.running is not None or run.outcome is not None or run.recovery_until is not None:
        return run
    enough = available(run, now) >= run.settings.min
    since_enough = (now if run.min_reached_at is None else run.min_reached_at) if enough else None
    since_short = None if enough else (now if run.below_min_since is None else run.below_min_since)
    if (since_enough, since_short) == (run.min_reached_at, run.below_min_since):
        return run
    return replace(run, min_reached_at=since_enough, below_min_since=since_short)


# Coming and going --------------------------------------------------------------------------------


def join(run: Run, member: Member, now: float) -> Run | Refusal | Held:
    """A member says hello, or the same process says it again after its connection broke."""
    infra, member = member.infra_rank, _at(member, run.spots)
    if run.settings.segment is not None and member.domain is None and not run.holds_farewell:
        return Refusal("no_domain", f"{member.name} has no --domain, and segment={run.settings.segment} needs one")
    bearers = _bearers(run)
    if (other := _rival(run, bearers, member, member.name)) is not None and other.name == member.name:
        return _same_name(run, member, other, now)
    if infra is not None and (other := _rival(run, bearers, member, infra)) is not None and other.infra_rank == infra:
        both = f"{_who(other)} and {_who(member)}"
        return Refusal("duplicate_infra_rank", f"infra rank {infra} is claimed by {both}")
    if run.recovery_until is None:
        run = lose(run, member.member_id, now, "it connected anew")
    back = replace(
        member, joined_at=now, lease_until=now + run.settings.lease_s, role=_role_on_return(run, member.member_id)
    )
    if back.role is Role.ACTIVE and run.round is not None:
        seat = run.round.seat_of(back.member_id)
        back = replace(back, rank=seat.rank if seat else None, ranks_state=RanksState.RUNNING)
    if back.unfit:
        back = replace(back, role=Role.PARKED, rank=None, note=back.unfit, fit_for=-1)
    elif not back.fit_for:
        back = replace(back, fit_for=run.next_round)
    departed = tuple(name for name in run.departed if name != back.name)
    run = launches.with_launch(run, back.launch)
    bearers = changed(bearers, back.name, back.member_id)
    if infra is not None:
        bearers = changed(bearers, infra, back.member_id)
    return replace(run, members=changed(run.members, back.member_id, back), departed=departed, bearers=bearers)


def _at(member: Member, spots: Mapping[str, Spot]) -> Member:
    """The member with what it does not know of its own place."""
    spot = spots.get(member.name)
    if spot is None or (member.domain is not None and member.infra_rank is not None):
        return member
    domain = spot.domain if member.domain is None else member.domain
    return replace(
        member, domain=domain, infra_rank=spot.infra_rank if member.infra_rank is None else member.infra_rank
    )


def placed(run: Run, spots: Mapping[str, Spot]) -> Run:
    """Whoever directs the run says where its members are. A round that is out has its seats already."""
    members = {
        member_id: replace(member, domain=spot.domain, infra_rank=spot.infra_rank)
        for member_id, member in run.members.items()
        if (spot := spots.get(member.name)) is not None
        and (member.domain, member.infra_rank) != (spot.domain, spot.infra_rank)
    }
    return replace(run, spots=spots, members=merged(run.members, members))


def _bearers(run: Run) -> Mapping[str | int, MemberId]:
    """Who came last with each name and each infra rank. Whoever has left since is still among them."""
    if run.bearers is not None:
        return run.bearers
    found: dict[str | int, MemberId] = {one.name: key for key, one in run.members.items()}
    return found | {one.infra_rank: key for key, one in run.members.items() if one.infra_rank is not None}


def _rival(run: Run, bearers: Mapping[str | int, MemberId], member: Member, claim: str | int) -> Member | None:
    bearer = bearers.get(claim)
    return run.members.get(bearer) if bearer is not None and bearer != member.member_id else None


def false_alarm(run: Run, member_id: MemberId, why: str, now: float) -> str:
    """What a hello shows to have been no loss: it was given up, or gave us up, for silence alone. "" if it was not.

    `why` is what it says of the end of its ranks, which it repeats with every hello.
    """
    if (heard := run.silent.get(member_id)) is not None:
        return f"silent for {now - heard:.1f} s, then heard from again"
    last = run.round
    if why != COORDINATOR_SILENT or last is None or last.seat_of(member_id) is None or member_id in last.gone:
        return ""
    return "heard nothing for a lease and ended its ranks, then heard from us again"


def heard_again(run: Run, member_id: MemberId) -> Run:
    """It was a false alarm: it is counted, and not told twice."""
    silent = {key: at for key, at in run.silent.items() if key != member_id}
    return replace(run, silent=silent, false_alarms=run.false_alarms + 1)


def _role_on_return(run: Run, member_id: MemberId) -> Role:
    """Only a coordinator that is itself recovering gives a place back; a lost member parks as a spare."""
    if run.round is None or run.recovery_until is None or run.round.seat_of(member_id) is None:
        return Role.SPARE
    return Role.ACTIVE


def _same_name(run: Run, new: Member, old: Member, now: float) -> Refusal | Held:
    heard = old.lease_until - run.settings.lease_s
    if heard > new.joined_at:
        return Refusal(
            "duplicate_name", f"the name {new.name!r} is taken: {_who(old)} is alive, {_who(new)} may not use it"
        )
    return Held(old.lease_until, f"waiting until the lease of {_who(old)} ends")


def _who(member: Member) -> str:
    return f"{member.name} ({member.host or member.addr}, pid {member.pid})"


def renew(run: Run, heard: Mapping[MemberId, float]) -> Run:
    """Leases of everyone heard from, entered together."""
    lease_s = run.settings.lease_s
    news = {
        member_id: replace(member, lease_until=at + lease_s)
        for member_id, at in heard.items()
        if (member := run.members.get(member_id)) is not None and member.lease_until != at + lease_s
    }
    return replace(run, members=merged(run.members, news))


def extend_leases(run: Run, by_s: float) -> Run:
    """The coordinator itself stood still for that long: nobody's silence in it counts."""
    members = {key: replace(member, lease_until=member.lease_until + by_s) for key, member in run.members.items()}
    stall = replace(run.stall, since=run.stall.since + by_s) if run.stall is not None else None
    return replace(run, members=members, pace=replace(run.pace, last_at=run.pace.last_at + by_s), stall=stall)


def disconnected(run: Run, member_id: MemberId, now: float) -> Run:
    return lose(run, member_id, now, "its connection closed")


def leaving(run: Run, member_id: MemberId, why: str, now: float, *, planned: bool = False) -> Run:
    """It will stop its ranks and go; the world should not wait for that to know. Planned, it waits for the world."""
    member = run.members.get(member_id)
    if member is None:
        return run
    run = _with_member(run, replace(member, role=Role.LEAVING, note=why))
    return _missed(run, Loss(member_id, member.name, now, why, planned))


def _missed(run: Run, loss: Loss) -> Run:
    """The round without that member, if it has a seat there."""
    if run.round is None or run.round.seat_of(loss.member_id) is None:
        return run
    return replace(run, round=with_loss(run.round, loss))


def unfit(run: Run, member_id: MemberId, why: str, now: float) -> Run:
    """Its health check failed: connected, but never chosen, and out of the round if it had a place already."""
    member = run.members.get(member_id)
    if member is None:
        return run
    run = replace(run, checking=run.checking - {member_id})
    run = _with_member(run, replace(member, role=Role.PARKED, note=why, fit_for=-1))
    return _missed(run, Loss(member_id, member.name, now, why))


def fit(run: Run, member_id: MemberId) -> Run:
    member = run.members.get(member_id)
    if member is None:
        return run
    role = Role.SPARE if member.role is Role.PARKED and member.fit_for == -1 else member.role
    run = replace(run, checking=run.checking - {member_id})
    return _with_member(run, replace(member, role=role, fit_for=run.next_round, note=""))


def posted(run: Run, member_id: MemberId, post: Path) -> Run:
    """It keeps records there, and can be asked who leads."""
    member = run.members.get(member_id)
    return run if member is None else _with_member(run, replace(member, post=post))


# The mesh ----------------------------------------------------------------------------------------


def listens(run: Run, member_id: MemberId, paths: tuple[Path, ...]) -> Run:
    """It can be probed there."""
    member = run.members.get(member_id)
    return run if member is None else _with_member(run, replace(member, paths=paths))


def reached(run: Run, member_id: MemberId, found: Reach) -> Run:
    """What it found at those peers that it speaks of; of others it is known what it said before."""
    if member_id not in run.members:
        return run
    old = run.reach.get(member_id, Reach())
    is_open = {i: rtt for i, rtt in old.open.items() if i in run.members and i not in found.shut} | dict(found.open)
    shut = {i: why for i, why in old.shut.items() if i in run.members and i not in found.open} | dict(found.shut)
    run = replace(run, reach={**run.reach, member_id: Reach(is_open, shut)})
    # Only news lets those in again that were kept out: what was judged on the same ways would be judged the same.
    return replace(run, kept_out={}) if found.open.keys() - old.open.keys() else run


def measured(run: Run, member_id: MemberId, number: int, found: Bench) -> Run:
    """What the worker of rank 0 found; once is enough."""
    current = _current(run, member_id, number)
    seat = current.seat_of(member_id) if current is not None else None
    if run.bench is not None or seat is None or seat.rank != 0:
        return run
    return replace(run, bench=replace(found, round=number, measured_at=None))


# State ------------------------------------------------------------------------------------------


def holds(run: Run, member_id: MemberId, holding: Holding, now: float) -> Run:
    """What state it has in memory now."""
    if member_id not in run.members:
        return run
    known = run.held_since.get(member_id, {})
    keys = [(one.step, one.round, one.ranks, one.rank) for one in holding.held]
    since = {key: known.get(key, now) for key in keys}
    holdings = changed(run.holdings, member_id, holding)
    durable = max((step for step in (run.durable_step, holding.durable) if step is not None), default=None)
    held_since = changed(run.held_since, member_id, since)
    return replace(run, holdings=holdings, held_since=held_since, durable_step=durable)


def does(run: Run, member_id: MemberId, doing: str) -> Run:
    """What its ranks wait for; none of them waits for anything if it is empty."""
    member = run.members.get(member_id)
    return run if member is None or member.doing == doing else _with_member(run, replace(member, doing=doing))


# Ranks -------------------------------------------------------------------------------------------


def started(run: Run, member_id: MemberId, number: int) -> Run:
    current = _current(run, member_id, number)
    if current is None:
        return run
    return replace(run, round=replace(current, started=joined(current.started, member_id)))


def up(run: Run, member_id: MemberId, number: int, now: float, *, seen: bool = True) -> Run:
    """Enter that all ranks of a worker run. Until everyone's do, none of them can be expected to advance.

    `seen`: they run since now; otherwise they have run for some time.
    """
    current = _current(run, member_id, number)
    if current is None:
        return run
    run = does(run, member_id, "")
    current = replace(current, up=joined(current.up, member_id))
    if current.up_at is None and len(current.up) == current.world_size:
        ran_at = now if seen and current.ran_at is None else current.ran_at
        current = replace(current, up_at=now, ran_at=ran_at)
    return replace(run, round=current)


def exited(run: Run, member_id: MemberId, number: int, ends: Iterable[tuple[RankEnd, float]]) -> Run:
    """Ranks of the current round ended, each at its time on the run's clock. Told twice, it counts once."""
    current = _current(run, member_id, number)
    ends = tuple(ends)
    if current is None or not ends:
        return run
    exits, progress = current.exits, current.progress
    first_at, first_rank, stopped_at = current.first_failed_at, current.first_failed_rank, current.first_stopped_at
    failed = False
    for end, at in ends:
        if end.rank in exits:
            continue
        exits = changed(exits, end.rank, end)
        if end.step is not None:
            progress = changed(progress, end.rank, Progress(end.step, at - (end.idle_s or 0.0)))
        if end.failed and not end.hung:
            failed = True
            if first_at is None or at < first_at:
                first_at, first_rank = at, end.rank
        elif end.stopped:
            stopped_at = min(stopped_at, at)
    current = replace(
        current,
        exits=exits,
        progress=progress,
        first_failed_at=first_at,
        first_failed_rank=first_rank,
        first_stopped_at=stopped_at,
    )
    member = run.members.get(member_id)
    if failed and member is not None:
        run = _with_member(run, replace(member, ranks_state=RanksState.FAILED))
    return replace(run, round=current)


def finished(run: Run, member_id: MemberId, number: int) -> Run:
    """All its ranks exited 0. It stays, in case the round has to run again."""
    current = _current(run, member_id, number)
    if current is None:
        return run
    member = run.members.get(member_id)
    if member is not None and member.role is not Role.ACTIVE:
        return run  # a leaver's 0 is never success
    if member is not None:
        run = _with_member(run, replace(member, ranks_state=RanksState.SUCCEEDED))
    return replace(run, round=replace(current, finished=joined(current.finished, member_id)))


def stopped(run: Run, member_id: MemberId, number: int, store_port: int, now: float, why: str = "") -> Run:
    """The agent confirms that no rank of that round runs on it. Without a recall, the round is broken there."""
    member = run.members.get(member_id)
    if member is not None and store_port:
        state = member.ranks_state if member.ranks_state is RanksState.FAILED else RanksState.STOPPED
        run = _with_member(run, replace(member, store_port=store_port, ranks_state=state))
    run = gone(run, member_id, number)
    current = _current(run, member_id, number)
    if current is None or current.recall is not None:
        return run
    name = member.name if member else member_id
    # One that stopped for reasons of its own while there was no coordinator did so before we knew of any failure.
    at = UNSEEN if why and run.recovery_until is not None else now
    loss = Loss(member_id, name, at, why or "its ranks were stopped on its side")
    return replace(run, round=with_loss(current, loss))


def saves(run: Run, member_id: MemberId, number: int, what: str) -> Run:
    """Called back, it lets its ranks end a save first."""
    current = _current(run, member_id, number)
    if current is None:
        return run
    return replace(run, round=replace(current, saves=changed(current.saves, member_id, what)))


def noticed(run: Run, member_id: MemberId, number: int, calls: int, *, seen: bool, done: bool) -> Run:
    """What its ranks know of a recall that is planned."""
    current = _current(run, member_id, number)
    if current is None:
        return run
    return replace(run, round=notices.answered(current, member_id, calls, seen=seen, done=done))


def gone(run: Run, member_id: MemberId, number: int) -> Run:
    """The guard, or the agent itself, confirms that no rank of that round is left."""
    current = _current(run, member_id, number)
    if current is None:
        return run
    return replace(run, round=replace(current, gone=joined(current.gone, member_id)))


def guard_cleared(run: Run, member_id: MemberId, number: int, now: float) -> Run:
    """The guard ended everything: its agent is dead, or so silent that it counts as lost before its lease is over."""
    if (member := run.members.get(member_id)) is not None:
        run = silenced(run, member_id, member.lease_until - run.settings.lease_s)
    return lose(gone(run, member_id, number), member_id, now, GUARD_ENDED)


def ended(run: Run, member_id: MemberId, now: float) -> Run:
    """No process of that worker is left: no rank of any round runs there, and none will."""
    number = -1 if run.round is None else run.round.number
    return lose(gone(run, member_id, number), member_id, now, ALL_ENDED)


def guard_alive(run: Run, member_id: MemberId, now: float) -> Run:
    """The guard of a lost member answers: wait for its word, not for the clock."""
    current = run.round
    if current is None or member_id not in current.fences:
        return run
    until = now + run.settings.lease_s + run.settings.kill_margin_s
    return replace(run, round=replace(current, fences={**current.fences, member_id: until}))


def advanced(
    run: Run, member_id: MemberId, number: int, marks: Iterable[tuple[int, Progress]], first: Progress | None = None
) -> Run:
    """`first` is the first step that its ranks told in this round, with its time."""
    current = _current(run, member_id, number)
    if current is None:
        return run
    progress, marks = current.progress, tuple(marks)
    moved = [(current.progress.get(rank), mark) for rank, mark in marks]
    for rank, mark in marks:
        progress = changed(progress, rank, mark)
    current = replace(current, progress=progress)
    if first is not None:
        step = first.step if current.first_step is None else min(current.first_step, first.step)
        step_at = first.at if current.first_step_at is None else min(current.first_step_at, first.at)
        current = replace(current, first_step=step, first_step_at=step_at)
    return replace(run, round=current, pace=pace.advanced(run.pace, number, moved))


# Orders from outside -----------------------------------------------------------------------------


def set_target(run: Run, target: int, remove: Iterable[str], now: float) -> Run | Refusal:
    settings = run.settings
    if run.outcome is not None:
        return Refusal("terminal_state", f"the run has ended ({run.outcome.state}): its target cannot change")
    if not settings.min <= target <= settings.max:
        return Refusal("out_of_bounds", f"target {target} is not between min {settings.min} and max {settings.max}")
    if settings.segment and target % settings.segment:
        return Refusal("out_of_bounds", f"target {target} is not a multiple of segment {settings.segment}")
    names = tuple(remove)
    unknown = sorted(set(names) - {member.name for member in run.members.values()})
    if unknown:
        return Refusal("not_found", f"no member is called {', '.join(unknown)}")
    if names and (settings.segment or target >= run.target):
        why = "whole segments leave" if settings.segment else f"the target does not go down from {run.target}"
        return Refusal("out_of_bounds", f"names to remove are of no use: {why}")
    return replace(sizes.asked(run, target), removals=names, target_set_at=now)


def cancel(run: Run, why: str) -> Run | Refusal:
    """Cancelled twice is cancelled; a run that ended otherwise cannot be."""
    if run.outcome is None:
        return replace(run, ordered=RunOutcome(OutcomeState.CANCELLED, "cancelled", why))
    if run.outcome.state is OutcomeState.CANCELLED:
        return run
    return Refusal("terminal_state", f"the run has ended ({run.outcome.state}): it cannot be cancelled")


def order(run: Run, outcome: RunOutcome) -> Run:
    """Ended from outside; an end that was decided or ordered before stands."""
    return run if run.outcome is not None or run.ordered is not None else replace(run, ordered=outcome)


def reconfigure(run: Run, settings: Settings, target: int, now: float, lent: Mapping[str, str] | None = None) -> Run:
    """Whoever fixed the settings from outside fixes them anew, and who is `lent`; None: those that are."""
    settings = kept_lease(run, settings)
    lent = run.lent if lent is None else lent
    if run.outcome is not None or (settings == run.settings and target == run.target and lent == run.lent):
        return run
    if target != run.target:
        run = replace(sizes.asked(run, target, lending=lent.keys() != run.lent.keys()), target_set_at=now)
    if lent != run.lent:
        run = replace(
            run, lent=dict(lent), surplus=frozenset(i for i in run.surplus if run.members[i].name not in lent)
        )
    if run.settings.below_min_timeout_s == NEVER_S and run.below_min_since is not None:
        run = replace(run, below_min_since=now)  # it was suspended: the time for workers to come begins now
    return replace(run, settings=settings)


def lent_too(run: Run, lent: Mapping[str, str]) -> Run:
    """A record shows who else was lent, as far as it knows; whoever directs the run has not said so yet."""
    return replace(run, lent={**lent, **run.lent}) if lent.keys() - run.lent.keys() else run


def confirm(run: Run, outcome: RunOutcome) -> Run:
    """The outcome as it was recorded, which is the one that counts."""
    return replace(run, outcome=outcome, recovery_until=None)


def let_go(run: Run) -> Run:
    """The end is recorded: members may leave."""
    return replace(run, holds_farewell=False)


def seat_shown(run: Run, number: int, seat: Seat) -> Run:
    """One of a round that is being recovered tells its own seat, which nobody else knew."""
    current = run.round
    if run.recovery_until is None or current is None or current.number != number or seat.rank >= current.world_size:
        return run
    unknown = not current.seats[seat.rank].procs
    return replace(run, round=current.with_seat(seat)) if unknown else run


def skip_past(run: Run, number: int) -> Run:
    """A round with that number was formed elsewhere: it is not used again."""
    return run if number < run.next_round else replace(run, next_round=number + 1)


def adopt(run: Run, outcome: RunOutcome) -> Run:
    """An outcome that a member already holds was decided once, by a coordinator that is no more."""
    return run if run.outcome is not None else replace(run, outcome=outcome, recovery_until=None)


def acknowledge(run: Run, member_id: MemberId) -> Run:
    member = run.members.get(member_id)
    return run if member is None else _with_member(run, replace(member, acknowledged=True))


def settings_differ(fixed: Settings, given: Mapping[str, object]) -> list[str]:
    """What a member asks for and the run has otherwise, each with both values. What we do not know is ignored."""
    known = [item.name for item in fields(Settings) if item.name in given]
    if all(given[name] == getattr(fixed, name) for name in known):
        return []
    asked = Settings.parse({**{"min": fixed.min, "max": fixed.max}, **given})
    differences = []
    for name in known:
        have, want = getattr(fixed, name), getattr(asked, name)
        if name == "target":
            have, want = fixed.first_target, asked.first_target
        if have != want:
            differences.append(f"{name} is {have}, this member has {want}")
    return differences


def _with_member(run: Run, member: Member) -> Run:
    return replace(run, members=changed(run.members, member.member_id, member))


def _current(run: Run, member_id: MemberId, number: int) -> Round | None:
    """The round, if it is the one spoken of and the speaker has a seat in it."""
    current = run.round
    if current is None or current.number != number or current.seat_of(member_id) is None:
        return None
    return current

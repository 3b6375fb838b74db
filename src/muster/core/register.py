"""What a report does to the roll: one function per kind of event, each returning the roll after it.

Nothing is decided here; `core.stages.decide` looks at the result. An event that may not be entered gives
`Refused` (with the reason to send back) or `Held` (ask again at that time) instead of a roll.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace

from muster.core.forming import available
from muster.core.gates import Gate
from muster.core.roll import UNSEEN, Roll, lose, with_loss
from muster.types.world import (
    Loss,
    Member,
    MemberId,
    Outcome,
    OutcomeState,
    Path,
    Progress,
    RankExit,
    RanksState,
    Reach,
    Role,
    Round,
    Settings,
)


@dataclass(frozen=True)
class Refused:
    code: str
    message: str


@dataclass(frozen=True)
class Held:
    """Not yet: the old bearer of this name may still be alive until then."""

    until: float
    message: str


def open_roll(settings: Settings) -> Roll:
    return Roll(settings=settings, target=settings.first_target)


def restored(
    settings: Settings,
    target: int,
    restarts_used: int,
    last: Round | None,
    now: float,
    *,
    gate: Gate | None = None,
    certain: bool = True,
) -> Roll:
    """A roll from a record that outlived its coordinator; the members of `last` are awaited.

    One that is not `certain` came from a member, which may not know of the last round. Whoever does comes back within
    a lease, or has ended its ranks by then.
    """
    fence = settings.lease_s + settings.kill_margin_s
    wait = max(settings.recovery_s, fence)
    return Roll(
        settings=settings,
        target=target,
        restarts_used=restarts_used,
        round=None if last is None else replace(last, released_at=now),
        next_round=0 if last is None else last.number + 1,
        recovery_until=None if last is None else now + wait,
        not_before=-math.inf if certain else now + fence,
        gate=gate,
    )


def tell_time(roll: Roll, now: float) -> Roll:
    """Note since when there are enough members, or too few; `decide` measures its patience from it."""
    if roll.running is not None or roll.outcome is not None or roll.recovery_until is not None:
        return roll
    enough = available(roll, now) >= roll.settings.min
    since_enough = (now if roll.min_reached_at is None else roll.min_reached_at) if enough else None
    since_short = None if enough else (now if roll.below_min_since is None else roll.below_min_since)
    if (since_enough, since_short) == (roll.min_reached_at, roll.below_min_since):
        return roll
    return replace(roll, min_reached_at=since_enough, below_min_since=since_short)


# Coming and going --------------------------------------------------------------------------------


def join(roll: Roll, member: Member, now: float) -> Roll | Refused | Held:
    """A member says hello, or the same process says it again after its connection broke."""
    if roll.settings.segment is not None and member.domain is None:
        return Refused("no_domain", f"{member.name} has no --domain, and segment={roll.settings.segment} needs one")
    for other in roll.members.values():
        if other.member_id == member.member_id:
            continue
        if other.name == member.name:
            return _same_name(roll, member, other, now)
        if member.infra_rank is not None and other.infra_rank == member.infra_rank:
            both = f"{_who(other)} and {_who(member)}"
            return Refused("duplicate_infra_rank", f"infra rank {member.infra_rank} is claimed by {both}")
    if roll.recovery_until is None:
        roll = lose(roll, member.member_id, now, "it connected anew")
    back = replace(
        member, joined_at=now, lease_until=now + roll.settings.lease_s, role=_role_on_return(roll, member.member_id)
    )
    if back.role is Role.ACTIVE and roll.round is not None:
        seat = roll.round.seat_of(back.member_id)
        back = replace(back, rank=seat.rank if seat else None, ranks_state=RanksState.RUNNING)
    if back.unfit:
        back = replace(back, role=Role.PARKED, rank=None, note=back.unfit, fit_for=-1)
    elif not back.fit_for:
        back = replace(back, fit_for=roll.next_round)
    departed = tuple(name for name in roll.departed if name != back.name)
    return replace(roll, members={**roll.members, back.member_id: back}, departed=departed)


def _role_on_return(roll: Roll, member_id: MemberId) -> Role:
    """Only a coordinator that is itself recovering gives a place back; a lost member parks as a spare."""
    if roll.round is None or roll.recovery_until is None or roll.round.seat_of(member_id) is None:
        return Role.SPARE
    return Role.ACTIVE


def _same_name(roll: Roll, new: Member, old: Member, now: float) -> Refused | Held:
    heard = old.lease_until - roll.settings.lease_s
    if heard > new.joined_at:
        return Refused(
            "duplicate_name", f"the name {new.name!r} is taken: {_who(old)} is alive, {_who(new)} may not use it"
        )
    return Held(old.lease_until, f"waiting until the lease of {_who(old)} ends")


def _who(member: Member) -> str:
    return f"{member.name} ({member.host or member.addr}, pid {member.pid})"


def renew(roll: Roll, heard: Mapping[MemberId, float]) -> Roll:
    """Leases of everyone heard from, entered together."""
    members = dict(roll.members)
    for member_id, at in heard.items():
        member = members.get(member_id)
        if member is not None and member.lease_until != at + roll.settings.lease_s:
            members[member_id] = replace(member, lease_until=at + roll.settings.lease_s)
    return replace(roll, members=members)


def extend_leases(roll: Roll, by_s: float) -> Roll:
    """The coordinator itself stood still for that long: nobody's silence in it counts."""
    members = {key: replace(member, lease_until=member.lease_until + by_s) for key, member in roll.members.items()}
    return replace(roll, members=members)


def disconnected(roll: Roll, member_id: MemberId, now: float) -> Roll:
    return lose(roll, member_id, now, "its connection closed")


def leaving(roll: Roll, member_id: MemberId, why: str, now: float) -> Roll:
    """It will stop its ranks and go; the world should not wait for that to know."""
    member = roll.members.get(member_id)
    if member is None:
        return roll
    roll = _with_member(roll, replace(member, role=Role.LEAVING, note=why))
    return _missed(roll, Loss(member_id, member.name, now, why))


def _missed(roll: Roll, loss: Loss) -> Roll:
    """The round without that member, if it has a seat there."""
    if roll.round is None or roll.round.seat_of(loss.member_id) is None:
        return roll
    return replace(roll, round=with_loss(roll.round, loss))


def unfit(roll: Roll, member_id: MemberId, why: str, now: float) -> Roll:
    """Its health check failed: connected, but never chosen, and out of the round if it had a place already."""
    member = roll.members.get(member_id)
    if member is None:
        return roll
    roll = replace(roll, checking=roll.checking - {member_id})
    roll = _with_member(roll, replace(member, role=Role.PARKED, note=why, fit_for=-1))
    return _missed(roll, Loss(member_id, member.name, now, why))


def fit(roll: Roll, member_id: MemberId) -> Roll:
    member = roll.members.get(member_id)
    if member is None:
        return roll
    role = Role.SPARE if member.role is Role.PARKED and member.fit_for == -1 else member.role
    roll = replace(roll, checking=roll.checking - {member_id})
    return _with_member(roll, replace(member, role=role, fit_for=roll.next_round, note=""))


# The mesh ----------------------------------------------------------------------------------------


def listens(roll: Roll, member_id: MemberId, paths: tuple[Path, ...]) -> Roll:
    """It can be probed there."""
    member = roll.members.get(member_id)
    return roll if member is None else _with_member(roll, replace(member, paths=paths))


def reached(roll: Roll, member_id: MemberId, found: Reach) -> Roll:
    """What it found at those peers that it speaks of; of others it is known what it said before."""
    if member_id not in roll.members:
        return roll
    old = roll.reach.get(member_id, Reach())
    is_open = {i: rtt for i, rtt in old.open.items() if i in roll.members and i not in found.shut} | dict(found.open)
    shut = {i: why for i, why in old.shut.items() if i in roll.members and i not in found.open} | dict(found.shut)
    roll = replace(roll, reach={**roll.reach, member_id: Reach(is_open, shut)})
    # Only news lets those in again that were kept out: what was judged on the same ways would be judged the same.
    return replace(roll, kept_out={}) if found.open.keys() - old.open.keys() else roll


# Ranks -------------------------------------------------------------------------------------------


def started(roll: Roll, member_id: MemberId, number: int) -> Roll:
    current = _current(roll, member_id, number)
    if current is None:
        return roll
    return replace(roll, round=replace(current, started=current.started | {member_id}))


def up(roll: Roll, member_id: MemberId, number: int, now: float) -> Roll:
    """All its ranks run. Until everyone's do, none of them can be expected to advance."""
    current = _current(roll, member_id, number)
    if current is None:
        return roll
    current = replace(current, up=current.up | {member_id})
    if current.up_at is None and all(seat.member_id in current.up for seat in current.seats):
        current = replace(current, up_at=now)
    return replace(roll, round=current)


def exited(roll: Roll, member_id: MemberId, number: int, ends: Iterable[tuple[RankExit, float]]) -> Roll:
    """Ranks of the current round ended, each at its time on the roll's clock. Told twice, it counts once."""
    current = _current(roll, member_id, number)
    if current is None:
        return roll
    exits, progress = dict(current.exits), dict(current.progress)
    first_at, first_rank, stopped_at = current.first_failed_at, current.first_failed_rank, current.first_stopped_at
    failed = False
    for end, at in ends:
        if end.rank in exits:
            continue
        exits[end.rank] = end
        if end.step is not None:
            progress[end.rank] = Progress(end.step, at - (end.idle_s or 0.0))
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
    member = roll.members.get(member_id)
    if failed and member is not None:
        roll = _with_member(roll, replace(member, ranks_state=RanksState.FAILED))
    return replace(roll, round=current)


def finished(roll: Roll, member_id: MemberId, number: int) -> Roll:
    """All its ranks exited 0. It stays, in case the round has to run again."""
    current = _current(roll, member_id, number)
    if current is None:
        return roll
    member = roll.members.get(member_id)
    if member is not None and member.role is not Role.ACTIVE:
        return roll  # a leaver's 0 is never success
    if member is not None:
        roll = _with_member(roll, replace(member, ranks_state=RanksState.SUCCEEDED))
    return replace(roll, round=replace(current, finished=current.finished | {member_id}))


def stopped(roll: Roll, member_id: MemberId, number: int, store_port: int, now: float, why: str = "") -> Roll:
    """The agent confirms that no rank of that round runs on it. Without a recall, the round is broken there."""
    member = roll.members.get(member_id)
    if member is not None and store_port:
        state = member.ranks_state if member.ranks_state is RanksState.FAILED else RanksState.STOPPED
        roll = _with_member(roll, replace(member, store_port=store_port, ranks_state=state))
    roll = gone(roll, member_id, number)
    current = _current(roll, member_id, number)
    if current is None or current.recall is not None:
        return roll
    name = member.name if member else member_id
    # One that stopped for reasons of its own while there was no coordinator did so before we knew of any failure.
    at = UNSEEN if why and roll.recovery_until is not None else now
    loss = Loss(member_id, name, at, why or "its ranks were stopped on its side")
    return replace(roll, round=with_loss(current, loss))


def saves(roll: Roll, member_id: MemberId, number: int, what: str) -> Roll:
    """Called back, it lets its ranks end a save first."""
    current = _current(roll, member_id, number)
    if current is None:
        return roll
    return replace(roll, round=replace(current, saves={**current.saves, member_id: what}))


def gone(roll: Roll, member_id: MemberId, number: int) -> Roll:
    """The guard, or the agent itself, confirms that no rank of that round is left."""
    current = _current(roll, member_id, number)
    if current is None:
        return roll
    return replace(roll, round=replace(current, gone=current.gone | {member_id}))


def guard_cleared(roll: Roll, member_id: MemberId, number: int, now: float) -> Roll:
    """The guard ended everything: its agent is dead, or so silent that it counts as lost before its lease is over."""
    return lose(gone(roll, member_id, number), member_id, now, "its guard ended its ranks")


def guard_alive(roll: Roll, member_id: MemberId, now: float) -> Roll:
    """The guard of a lost member answers: wait for its word, not for the clock."""
    current = roll.round
    if current is None or member_id not in current.fences:
        return roll
    until = now + roll.settings.lease_s + roll.settings.kill_margin_s
    return replace(roll, round=replace(current, fences={**current.fences, member_id: until}))


def advanced(roll: Roll, member_id: MemberId, number: int, marks: Iterable[tuple[int, Progress]]) -> Roll:
    current = _current(roll, member_id, number)
    if current is None:
        return roll
    return replace(roll, round=replace(current, progress={**current.progress, **dict(marks)}))


# Orders from outside -----------------------------------------------------------------------------


def set_target(roll: Roll, target: int, remove: Iterable[str], now: float) -> Roll | Refused:
    settings = roll.settings
    if roll.outcome is not None:
        return Refused("terminal_state", f"the run has ended ({roll.outcome.state}): its target cannot change")
    if not settings.min <= target <= settings.max:
        return Refused("out_of_bounds", f"target {target} is not between min {settings.min} and max {settings.max}")
    if settings.segment and target % settings.segment:
        return Refused("out_of_bounds", f"target {target} is not a multiple of segment {settings.segment}")
    names = tuple(remove)
    unknown = sorted(set(names) - {member.name for member in roll.members.values()})
    if unknown:
        return Refused("not_found", f"no member is called {', '.join(unknown)}")
    if names and (settings.segment or target >= roll.target):
        why = "whole segments leave" if settings.segment else f"the target does not go down from {roll.target}"
        return Refused("out_of_bounds", f"names to remove are of no use: {why}")
    return replace(roll, target=target, removals=names, target_set_at=now)


def cancel(roll: Roll, why: str) -> Roll | Refused:
    """Cancelled twice is cancelled; a run that ended otherwise cannot be."""
    if roll.outcome is None:
        return replace(roll, ordered=Outcome(OutcomeState.CANCELLED, "cancelled", why))
    if roll.outcome.state is OutcomeState.CANCELLED:
        return roll
    return Refused("terminal_state", f"the run has ended ({roll.outcome.state}): it cannot be cancelled")


def order(roll: Roll, outcome: Outcome) -> Roll:
    """Ended from outside; an end that was decided or ordered before stands."""
    return roll if roll.outcome is not None or roll.ordered is not None else replace(roll, ordered=outcome)


def reconfigure(roll: Roll, settings: Settings, target: int, now: float) -> Roll:
    """Whoever fixed the settings from outside fixes them anew."""
    if roll.outcome is not None or (settings == roll.settings and target == roll.target):
        return roll
    since = now if target != roll.target else roll.target_set_at
    return replace(roll, settings=settings, target=target, target_set_at=since)


def confirm(roll: Roll, outcome: Outcome) -> Roll:
    """The outcome as it was recorded, which is the one that counts."""
    return replace(roll, outcome=outcome, recovery_until=None)


def let_go(roll: Roll) -> Roll:
    """The end is recorded: members may leave."""
    return replace(roll, holds_farewell=False)


def skip_past(roll: Roll, number: int) -> Roll:
    """A round with that number was formed elsewhere: it is not used again."""
    return roll if number < roll.next_round else replace(roll, next_round=number + 1)


def adopt(roll: Roll, outcome: Outcome) -> Roll:
    """An outcome that a member already holds was decided once, by a coordinator that is no more."""
    return roll if roll.outcome is not None else replace(roll, outcome=outcome, recovery_until=None)


def acknowledge(roll: Roll, member_id: MemberId) -> Roll:
    member = roll.members.get(member_id)
    return roll if member is None else _with_member(roll, replace(member, acknowledged=True))


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


def _with_member(roll: Roll, member: Member) -> Roll:
    return replace(roll, members={**roll.members, member.member_id: member})


def _current(roll: Roll, member_id: MemberId, number: int) -> Round | None:
    """The round, if it is the one spoken of and the speaker has a seat in it."""
    current = roll.round
    if current is None or current.number != number or current.seat_of(member_id) is None:
        return None
    return current

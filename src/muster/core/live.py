"""Does the round that is out go on, or is it over or called back?

A round is called back when a member or a rank is lost, when no rank advances, and when the target asks for another
size. What that costs is judged by `core.closing`, who sits in the next one by `core.forming`.
"""

from __future__ import annotations

import math
from dataclasses import replace

from muster.core import gates, seating
from muster.core.forming import candidates, check_first, places_of, reach_first
from muster.core.roll import CallBack, Decision, Dismiss, End, Heal, Roll, TurnGate, Wait, listed, next_expiry
from muster.types.world import Cause, MemberId, Outcome, OutcomeState, Recall, Round, Seat


def succeeded(roll: Roll) -> Decision | None:
    """Also for a round that was called back a moment too late: its work is done."""
    current = roll.round
    if current is None or not all(seat.member_id in current.finished for seat in current.seats):
        return None
    message = f"all {current.rank_count} ranks of round {current.number} exited 0"
    return Decision(End(Outcome(OutcomeState.SUCCEEDED, "succeeded", message, current.number)), message)


def decide(roll: Roll, now: float) -> Decision | None:
    current = roll.running
    if current is None:
        return None
    return (
        _send_home(roll)
        or _broken(roll, current, now)
        or _healed(roll, current)
        or _resize(roll, current, now)
        or _goes_on(roll, current)
    )


def _send_home(roll: Roll) -> Decision | None:
    """Those that a smaller target sent out of the world, and that were not needed as spares then."""
    leaving = tuple(sorted(roll.surplus))
    if not leaving:
        return None
    names = listed(roll.members[member_id].name for member_id in leaving)
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


def _healed(roll: Roll, current: Round) -> Decision | None:
    better = gates.healed(roll.gate, current.seats, roll.reach) if roll.gate is not None else None
    if better is None:
        return None
    return Decision(Heal(better), f"all {current.world_size} workers of round {current.number} reach each other now")


def _resize(roll: Roll, current: Round, now: float) -> Decision | None:
    if current.world_size > roll.target:
        leavers = _leavers(roll, current)
        names = listed(seat.name for seat in leavers)
        reason = f"target is {roll.target}, the world has {current.world_size}: {names} leaves"
        ids = frozenset(seat.member_id for seat in leavers)
        return _call_back(Cause.SHRINK, reason, now, roll.settings.restart_grace_s, ids, roll.settings.stop_grace_s)
    if current.world_size == roll.target or current.finished:
        return None
    spares = candidates(roll)
    planned = seating.again(places_of(roll, current), spares, roll.target, roll.settings.segment)
    if planned.size <= current.world_size:
        return None
    reason = f"growing from {current.world_size} to {planned.size} of {roll.target}"
    since = max(roll.target_set_at, min(member.joined_at for member in spares))
    if planned.size < roll.target and now < since + roll.settings.scale_debounce_s:
        wake = min(since + roll.settings.scale_debounce_s, next_expiry(roll), _quiet_at(roll, current))
        return Decision(Wait(), f"{reason}: gathering more", wake)
    if held := check_first(roll, planned) or reach_first(roll, planned, now):
        return replace(held, wake_at=min(held.wake_at, _quiet_at(roll, current)))
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
    if roll.coming is not None:
        return Decision(TurnGate(None), "no larger world waits for its mesh any more")
    done = f", {len(current.finished)} done" if current.finished else ""
    short = f" of {roll.target} wanted" if current.world_size < roll.target else ""
    reason = f"round {current.number}: {current.world_size}{short} workers train{done}"
    if roll.kept_out:
        reason += f"; {'; '.join(sorted(set(roll.kept_out.values())))}"
    return Decision(Wait(), reason, min(next_expiry(roll), _quiet_at(roll, current)))


def _call_back(
    cause: Cause,
    reason: str,
    now: float,
    grace_s: float,
    leavers: frozenset[MemberId] = frozenset(),
    leaver_grace_s: float = 0.0,
) -> Decision:
    return Decision(CallBack(Recall(cause, reason, now, grace_s, leavers, leaver_grace_s)), reason)

"""Does the round that is out go on, or is it over or called back?

A round is called back when a member or a rank is lost, when no rank advances, when a worker was asked to go or lends
its GPUs, and when the target asks for another size. The last three are planned: ranks are told first
(`core.world.notices`). What a recall costs is judged by `core.world.closing`, who sits in the next round by
`core.world.forming`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from muster.core.world import gates, heals, lending, notices, pace, seating, sizes
from muster.core.world.forming import candidates, check_first, places_of, reach_first
from muster.core.world.pace import Stall
from muster.core.world.run import (
    CallBack,
    Decision,
    Dismiss,
    Finish,
    Heal,
    ReportHeal,
    Run,
    Stay,
    TellStall,
    TellUnwatched,
    TurnGate,
    WithdrawNotice,
    listed,
    next_expiry,
    told,
)
from muster.types import plural
from muster.types.records import replace
from muster.types.world import Cause, OutcomeState, Recall, Round, RunOutcome, Seat


def succeeded(run: Run) -> Decision | None:
    """Also for a round that was called back a moment too late: its work is done."""
    current = run.round
    if current is None or not all(seat.member_id in current.finished for seat in current.seats):
        return None
    ranks = "the only rank" if current.rank_count == 1 else f"all {current.rank_count} ranks"
    message = f"{ranks} of round {current.number} exited 0"
    return Decision(Finish(RunOutcome(OutcomeState.SUCCEEDED, "succeeded", message, current.number)), message)


def decide(run: Run, now: float) -> Decision | None:
    current = run.running
    if current is None:
        return None
    return (
        _send_home(run)
        or _broken(run, current, now)
        or _unwatched(run, current, now)
        or _stalled(run, current, now)
        or _mesh_healed(run, current)
        or _healed(run, now)
        or _planned(run, current, now)
        or _goes_on(run, current)
    )


def _send_home(run: Run) -> Decision | None:
    """Those that a smaller target sent out of the world, and that were not needed as spares then."""
    leaving = tuple(sorted(run.surplus))
    if not leaving:
        return None
    names = listed(run.members[member_id].name for member_id in leaving)
    return Decision(Dismiss(leaving), f"{names} leaves: the world is smaller and there are spares enough")


def _broken(run: Run, current: Round, now: float) -> Decision | None:
    """Something in the live round is gone: call the rest back."""
    quick = run.settings.restart_grace_s
    if missed := [loss for loss in current.losses if loss.member_id not in current.finished and not loss.planned]:
        lost = told([f"{loss.name}: {loss.why}" for loss in missed], "; ")
        return _call_back(Cause.LOSS, f"lost {lost}", now, quick)
    if current.first_failed_rank is not None:
        first = current.exits[current.first_failed_rank]
        grace = quick if run.restarts_used < run.settings.max_restarts else run.settings.fail_grace_s
        if any(loss.planned for loss in current.losses):
            grace = _planned_grace(run)  # whoever asks workers to go may ask their ranks as well
        return _call_back(Cause.FAILURE, f"rank {first.rank} on {first.worker}: {first.reason}", now, grace)
    quiet_at = _quiet_at(run, current)
    if quiet_at <= now:
        reason = f"no rank advanced for {run.settings.hang_timeout_s:g} s"
        return _call_back(Cause.HANG, reason, now, quick)
    return None


def _watched(run: Run, current: Round) -> bool:
    """Whether its ranks tell steps, or did in a round before: of others nobody knows whether they advance."""
    return bool(current.progress) or run.best_step is not None


def _quiet_at(run: Run, current: Round) -> float:
    """When the round counts as hung if nothing advances before; ranks that are done need not advance."""
    if run.settings.hang_timeout_s is None or current.up_at is None or not _watched(run, current):
        return math.inf
    latest = max((mark.at for mark in current.progress.values()), default=current.up_at)
    return max(latest, current.up_at) + run.settings.hang_timeout_s


def _unwatched_at(run: Run, current: Round) -> float:
    """When it has to be said that a hang would not be noticed: once in a run."""
    if run.settings.hang_timeout_s is None or current.up_at is None or run.told_unwatched or _watched(run, current):
        return math.inf
    return current.up_at + run.settings.hang_timeout_s


def _unwatched(run: Run, current: Round, now: float) -> Decision | None:
    if now < _unwatched_at(run, current):
        return None
    limit = f"{run.settings.hang_timeout_s:g} s"
    reason = f"no rank has called muster.progress(step) in {limit}: a hang would not be noticed"
    return Decision(TellUnwatched(), reason)


def _stalled_at(run: Run, current: Round) -> float:
    """When it is unusual that no step has come in this round; never before its first one."""
    limit = pace.limit_s(run.pace)
    if limit is None or run.stall is not None or run.pace.round != current.number or current.up_at is None:
        return math.inf
    return run.pace.last_at + limit


def _stalled(run: Run, current: Round, now: float) -> Decision | None:
    stall, last = run.stall, run.pace
    if stall is not None and last.round == current.number and last.last_at > stall.since:
        return Decision(TellStall(None), f"steps come again, after {last.last_at - stall.since:.0f} s without")
    if now < _stalled_at(run, current):
        return None
    found = Stall(current.number, last.last_at, pace.warning(last))
    return Decision(TellStall(found), found.warning)


def _healed(run: Run, now: float) -> Decision | None:
    report = heals.report(run) if now >= heals.due(run) else None
    return None if report is None else Decision(ReportHeal(report.data), report.text)


def _mesh_healed(run: Run, current: Round) -> Decision | None:
    better = gates.healed(run.gate, current.seats, run.reach) if run.gate is not None else None
    if better is None:
        return None
    return Decision(
        Heal(better), f"all {plural.workers(current.world_size)} of round {current.number} reach each other now"
    )


def _planned(run: Run, current: Round, now: float) -> Decision | None:
    """Nothing has happened to the round, but another one is wanted."""
    wanted = _drained(run, current, now) or _resize(run, current, now)
    if isinstance(wanted, Recall):
        return notices.first(run, current, wanted, now)
    if current.notice is not None:
        return Decision(WithdrawNotice(), "the round goes on after all")
    return wanted


def _planned_grace(run: Run) -> float:
    return max(run.settings.stop_grace_s, run.settings.restart_grace_s)


def _drained(run: Run, current: Round, now: float) -> Recall | None:
    """Workers that were asked to go, and wait for the others to be ready for it."""
    going = [loss for loss in current.losses if loss.planned and loss.member_id not in current.finished]
    if not going:
        return None
    reason = told([f"{loss.name} leaves: {loss.why}" for loss in going], "; ")
    return Recall(Cause.DRAIN, reason, now, _planned_grace(run))


def _resize(run: Run, current: Round, now: float) -> Recall | Decision | None:
    grace = _planned_grace(run)
    lent = lending.seats(run, current)
    if lent or current.world_size > run.aim:
        leavers = _leavers(run, current, lent)
        reasons = [lending.why(run, [seat.name for seat in lent])] if lent else []
        if leavers:
            names = listed(seat.name for seat in leavers)
            reasons.append(f"target is {run.aim}, the world has {current.world_size}: {names} leaves")
        ids = frozenset(seat.member_id for seat in (*lent, *leavers))
        return Recall(Cause.SHRINK, "; ".join(reasons), now, grace, ids, grace)
    if current.world_size == run.aim or current.finished:
        return None
    spares = candidates(run)
    planned = seating.again(places_of(run, current), spares, run.aim, run.settings.segment)
    if planned.size <= current.world_size:
        return None
    reason = f"growing from {current.world_size} to {planned.size} of {run.aim}"
    since = max(run.target_set_at, min(member.joined_at for member in spares))
    if planned.size < run.aim and now < since + run.settings.scale_debounce_s:
        wake = min(since + run.settings.scale_debounce_s, next_expiry(run), _quiet_at(run, current))
        return Decision(Stay(), f"{reason}: gathering more", wake)
    if held := check_first(run, planned) or reach_first(run, planned, now):
        return replace(held, wake_at=min(held.wake_at, _quiet_at(run, current)))
    return Recall(Cause.GROW, reason, now, grace)


def _leavers(run: Run, current: Round, lent: Sequence[Seat]) -> tuple[Seat, ...]:
    """Who has to go beside those that are lent: named ones first, then the highest ranks.

    With segments whole ones go, from the top, and those with a lent worker before.
    """
    size = run.settings.segment or 1
    broken = {seat.rank // size for seat in lent}
    count = max(0, current.world_size - run.aim - size * len(broken))
    whole = [seat for seat in current.seats if seat.rank // size not in broken]
    if run.settings.segment is not None:
        return tuple(whole[len(whole) - count :])
    named = [seat for seat in whole if seat.name in run.removals]
    rest = [seat for seat in reversed(whole) if seat.name not in run.removals]
    return tuple((named + rest)[:count])


def _goes_on(run: Run, current: Round) -> Decision:
    if run.coming is not None:
        return Decision(TurnGate(None), "no larger world waits for its mesh any more")
    done = f", {len(current.finished)} done" if current.finished else ""
    short = current.world_size < run.target
    counted = f"{current.world_size} of {run.target} wanted workers" if short else plural.workers(current.world_size)
    doing = _doing(run, current) if current.up_at is None else ""
    verb = "train" if current.up_at is not None else "start"
    ending = "s" if current.world_size == 1 and not short else ""
    reason = f"round {current.number}: {counted} {verb}{ending}{doing}{done}"
    if run.healing is not None:
        parts = [f"healing: {heals.progress_of(run.healing, current)}", f"start{doing}" if doing else ""]
        parts.append(counted if short else "")
        reason = "; ".join(part for part in parts if part) + done
    elif sizes.on_trial(run):
        reason += "; no rank has made a step at this size yet"
    if run.aim != run.target and run.taken_back is not None:
        reason += f"; taken back to {run.aim}: {run.taken_back.why}"
    if lent := lending.here(run):
        reason += f"; {lending.why(run, [member.name for member in lent])}"
    if run.kept_out:
        reason += f"; {'; '.join(sorted(set(run.kept_out.values())))}"
    if run.stall is not None and run.stall.round == current.number:
        reason += f"; {run.stall.warning}"
    look_at = min(_quiet_at(run, current), _unwatched_at(run, current), _stalled_at(run, current), heals.due(run))
    return Decision(Stay(), reason, min(next_expiry(run), look_at))


def _doing(run: Run, current: Round) -> str:
    """Return what ranks that do not run yet wait for, or nothing where no worker has reported it."""
    found: dict[str, list[str]] = {}
    for seat in current.seats:
        member = run.members.get(seat.member_id)
        if member is not None and member.doing and seat.member_id not in current.up:
            found.setdefault(member.doing, []).append(member.name)
    return f", {told([f'{doing} on {listed(names)}' for doing, names in found.items()], ', ')}" if found else ""


def _call_back(cause: Cause, reason: str, now: float, grace_s: float) -> Decision:
    return Decision(CallBack(Recall(cause, reason, now, grace_s)), reason)

"""What did a round that was called back cost, and does the run end with it?

A round that its own ranks ended is an incident and costs a restart; one that a change of members ended is free.
Which of the two it was can take a moment to tell. The next world is `core.world.forming`'s business.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from muster.core.world import hopeless, last_words, resuming, sizes
from muster.core.world.run import Decision, Finish, Run, Stay, TakeBack, advanced, listed, next_expiry
from muster.types.world import Cause, OutcomeState, RankEnd, Round, RunOutcome, Seat


def decide(run: Run, now: float) -> Decision | None:
    """A round was called back: what did it cost, and is everyone out of it?"""
    closed = run.round
    if closed is None:
        return None
    assert closed.recall is not None
    verdict = judge(run, now)
    if verdict.until is not None:
        wake = min(verdict.until, next_expiry(run))
        return Decision(Stay(), f"round {closed.number} ended ({closed.recall.reason}); {verdict.why}", wake)
    if verdict.charged and (taken := sizes.taken_back(run, closed, verdict.first)) is not None:
        return Decision(TakeBack(taken), f"taken back to {taken.size}: {taken.why}")
    limit = run.settings.no_progress_rounds
    if limit is not None and stale_after(run, closed) >= limit:
        step = "no step at all" if run.best_step is None else f"highest step {run.best_step}"
        message = f"{limit} rounds in a row made no progress ({step})" + _last_end(verdict.first)
        outcome = RunOutcome(OutcomeState.FAILED, "no_progress", message, closed.number, verdict.first)
        return Decision(Finish(outcome), message)
    if verdict.charged and verdict.first is not None and hopeless.again(run, closed, verdict.first):
        return _cannot_work(closed, verdict.first)
    if verdict.charged and run.restarts_used >= run.settings.max_restarts:
        return _failed(run, closed, verdict.first)
    return None


def _cannot_work(closed: Round, first: RankEnd) -> Decision:
    when = f"round {closed.number} before the first step, as in the round before: another would end the same way"
    message = last_words.report(first, when)
    outcome = RunOutcome(OutcomeState.FAILED, "cannot_start", message, closed.number, first)
    return Decision(Finish(outcome), message)


def _last_end(first: RankEnd | None) -> str:
    return f"; {last_words.report(first)}" if first is not None else ""


def _failed(run: Run, closed: Round, first: RankEnd | None) -> Decision:
    assert closed.recall is not None
    spent = f"{run.restarts_used} of {run.settings.max_restarts} restarts used"
    if first is None:
        message = f"round {closed.number}: {closed.recall.reason}; {spent}"
        return Decision(Finish(RunOutcome(OutcomeState.FAILED, "hang", message, closed.number)), message)
    tail = "".join(f"\n  {line}" for line in first.stderr_tail) if not first.hung else ""
    message = last_words.report(first, f"round {closed.number}{again(run, closed, first)}; {spent}")
    message += f"; its last stderr lines:{tail}" if tail else ""
    reason = "hang" if first.hung else "rank_failed"
    outcome = RunOutcome(OutcomeState.FAILED, reason, message, closed.number, first)
    return Decision(Finish(outcome), message)


@dataclass(frozen=True)
class RoundCost:
    """What the end of a round cost. `until` is set while it is too early to say."""

    charged: bool = False
    first: RankEnd | None = None
    until: float | None = None
    why: str = ""


def judge(run: Run, now: float) -> RoundCost:
    """Was the recalled round ended by its own ranks (an incident) or by a change of members (free)?"""
    closed = run.round
    assert closed is not None and closed.recall is not None
    if closed.recall.forgiven:
        return RoundCost()
    if closed.recall.cause is Cause.HANG:
        if still_there(closed, now):
            ahead = [fence for fence in closed.fences.values() if fence > now]
            return RoundCost(until=min(ahead, default=math.inf), why="collecting stacks")
        if any(loss.at <= closed.recall.at for loss in closed.losses):
            return RoundCost()  # the others waited for a member that was gone
        return RoundCost(charged=True, first=guilty_of_hang(closed))
    failed_at = closed.first_failed_at
    if failed_at is None or closed.first_failed_rank is None:
        return RoundCost()
    called_back_before = closed.recall.cause is not Cause.FAILURE and failed_at >= closed.recall.at
    if called_back_before or closed.first_stopped_at < failed_at:
        return RoundCost()  # members stop at different moments: the slower ones fail over the quicker ones
    window = failed_at + run.settings.blame_s
    if any(loss.at <= window for loss in closed.losses):
        return RoundCost()
    if resuming.unusable(run):
        return RoundCost()
    if now < window:
        return RoundCost(until=window, why="a failure may come from a member that is being lost")
    return _silent_since(run, closed, failed_at, now) or RoundCost(
        charged=True, first=closed.exits[closed.first_failed_rank]
    )


def _silent_since(run: Run, closed: Round, failed_at: float, now: float) -> RoundCost | None:
    """Too early to say while a member has not been heard since the failure: it may be the cause."""
    lease = run.settings.lease_s
    quiet = [
        member
        for seat in closed.seats
        if (member := run.members.get(seat.member_id)) and member.lease_until - lease < failed_at
    ]
    if not quiet:
        return None
    # One that is well renews by the middle of its lease, which nobody would wake us for.
    overdue = [member.lease_until - lease / 2 for member in quiet]
    until = min(at if at > now else member.lease_until for at, member in zip(overdue, quiet, strict=True))
    return RoundCost(until=until, why=f"{listed(member.name for member in quiet)} silent: lost, or slow?")


def guilty_of_hang(closed: Round) -> RankEnd | None:
    """The rank that stopped first: least advanced, not itself waiting for others, longest idle."""

    def suspicion(end: RankEnd) -> tuple[float, bool, float, int]:
        step = -math.inf if end.step is None else end.step
        return (step, end.waiting or not end.stack, -(end.idle_s or 0.0), end.rank)

    return min((end for end in closed.exits.values() if end.hung), key=suspicion, default=None)


def still_there(closed: Round, now: float) -> list[Seat]:
    """Seats whose ranks may still run: not confirmed gone, and not yet fenced off by time."""
    return [
        seat
        for seat in closed.seats
        if seat.member_id not in closed.gone and closed.fences.get(seat.member_id, math.inf) > now
    ]


def over(run: Run, number: int, now: float) -> bool:
    """Whether no rank of that round is left, as its members have confirmed or time tells."""
    last = run.round
    if last is None or last.number < number:
        return False
    if last.number > number:  # it was not released before those of the round before were gone
        return True
    ended = last.recall is not None or run.outcome is not None
    return ended and not still_there(last, now)


def stale_after(run: Run, closed: Round) -> int:
    """How many rounds in a row, this one included, brought no new highest step. A resize is nobody's fault."""
    assert closed.recall is not None
    if closed.recall.cause.planned or closed.recall.forgiven:
        return 0
    return 0 if advanced(run, closed) else run.stale_rounds + 1


def stuck(run: Run, closed: Round, first: RankEnd | None) -> tuple[str, int]:
    """What the first rank to fail named, and in how many rounds in a row it did, none of which got on."""
    if first is None or not first.path or advanced(run, closed):
        return "", 0
    return first.path, run.stuck_times + 1 if run.stuck_at == first.path else 1


def again(run: Run, closed: Round, first: RankEnd | None) -> str:
    """A restart that fails at once at the same file will do so again: whoever reads the reason should know the file."""
    path, times = stuck(run, closed, first)
    return f", {'twice' if times == 2 else f'{times} times'} with {path}" if times > 1 else ""

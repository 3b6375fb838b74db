"""Heals: what was lost, who replaces it, when ranks ran, when the next step was made, and which steps are repeated.

A heal begins with the release after a round that broke. It is over when the training gets on again:

- After the loss of a worker: with the first step that any rank makes.
- After a crash of a rank: with the first step beyond the highest one before the crash. Until then it may repeat.
- Where no rank tells steps: when all ranks have run for `SETTLE_S`, and after a crash for half as long again as the
  round that crashed, at most `MOST_SETTLE_S`.

Another loss before that belongs to the same heal. A planned resize is none. A training that fails has not healed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from muster.core.world.run import NAMED, UNSEEN, Run, listed, told
from muster.types.records import record, replace
from muster.types.world import Cause, Healing, Loss, Round, Seat, show_round_times

SETTLE_S = 10.0  # for how long ranks that tell no steps have to run
MOST_SETTLE_S = 60.0  # the same, however long the round that crashed had run


@record()
class HealReport:
    text: str
    data: Mapping[str, Any]  # the same for programs


def begun(before: Run, formed: Round) -> Healing | None:
    """Return the heal that the release of `formed` belongs to."""
    last, known = before.round, before.healing
    if last is None or last.recall is None or last.recall.cause.planned or last.recall.forgiven:
        return known
    losses = [loss for loss in last.losses if not loss.planned]
    gone = {loss.member_id for loss in losses}
    heirs = frozenset(
        seat.member_id
        for seat in formed.seats[: last.world_size]
        if seat.member_id in gone or last.seat_of(seat.member_id) is None
    )
    begins = Healing(
        why=last.recall.reason,
        size=last.world_size,
        since=_broken_at(last, losses),
        top=max((mark.step for mark in last.progress.values()), default=before.best_step),
        lost=tuple(dict.fromkeys(loss.name for loss in losses)),
        heirs=heirs,
        crashed=not losses,
        settle_s=SETTLE_S if losses else _settle_s(last),
    )
    return begins if known is None else _joined(known, begins)


def _settle_s(crashed: Round) -> float:
    """A crash that repeats does so after about the same time: a round that outlives it by half has healed."""
    assert crashed.recall is not None
    lived_s = 0.0 if crashed.up_at is None else crashed.recall.at - crashed.up_at
    return min(max(SETTLE_S, 1.5 * lived_s), MOST_SETTLE_S)


def _broken_at(last: Round, losses: list[Loss]) -> float | None:
    """Return when the round stopped training as it should; None if it was lost while there was no coordinator."""
    assert last.recall is not None
    moments = [last.recall.at, *(loss.at for loss in losses)]
    if last.recall.cause is Cause.FAILURE and last.first_failed_at is not None:
        moments.append(last.first_failed_at)
    earliest = min(moments)
    return None if earliest == UNSEEN else earliest


def _joined(known: Healing, begins: Healing) -> Healing:
    """Return both as one: it began with the first, and only the second got anywhere."""
    return replace(
        known,
        top=max((top for top in (known.top, begins.top) if top is not None), default=None),
        lost=tuple(dict.fromkeys((*known.lost, *begins.lost))),
        heirs=known.heirs | begins.heirs,
        crashed=known.crashed or begins.crashed,
        settle_s=max(known.settle_s, begins.settle_s),
    )


def since(before: Run, healing: Healing | None) -> float | None:
    """Return the loss or the request that the round after this one follows; None for the first round."""
    last = before.round
    if last is None or last.recall is None:
        return None
    if healing is not None:
        return healing.since
    asked_at = before.target_set_at
    is_answer = last.recall.cause in (Cause.GROW, Cause.SHRINK) and (last.up_at is None or asked_at >= last.up_at)
    return asked_at if is_answer and asked_at > -math.inf else last.recall.at


def awaits_step(run: Run) -> bool:
    """Whether ranks that tell steps have not made any since the loss or the request that the round follows."""
    current = run.running
    if current is None or run.best_step is None or current.progress or current.finished:
        return False
    return run.healing is not None or current.since is not None


def report(run: Run) -> HealReport | None:
    """Return what can be reported of the heal that is under way; None if there is none, or no rank runs yet."""
    current = run.running
    if run.healing is None or current is None or current.up_at is None:
        return None
    return _sentence(run.healing, current)


def due(run: Run) -> float:
    """Return when the heal is over, if nothing happens before; -inf if it is over now."""
    known, current = run.healing, run.running
    if known is None or current is None or current.up_at is None:
        return math.inf
    highest = max((mark.step for mark in current.progress.values()), default=None)
    if known.top is None:
        return current.up_at + known.settle_s if highest is None or known.crashed else -math.inf
    is_beyond = highest is not None and (highest > known.top if known.crashed else current.first_step is not None)
    return -math.inf if is_beyond else math.inf


# In words ----------------------------------------------------------------------------------------


def progress_of(known: Healing, current: Round) -> str:
    """Return how far a heal has got that is not over yet."""
    parts = [*_who(known, current, "start"), *_times(current)]
    highest = max((mark.step for mark in current.progress.values()), default=None)
    if known.top is None:
        parts += [f"reported as healed when they have run for {known.settle_s:.3g} s"] if current.up_at else []
    elif highest is None:
        parts.append(f"no step yet, step {known.top} was the last before")
    elif known.crashed:
        parts.append(f"at step {highest}, step {known.top} was the last before the crash")
    return "; ".join(parts)


def _sentence(known: Healing, current: Round) -> HealReport:
    heirs = _heirs(known, current)
    parts = [*_who(known, current, "train"), *_times(current)]
    data: dict[str, Any] = {"lost": list(known.lost[:NAMED]), "workers": current.world_size}
    data["heirs"] = [{"worker": seat.name, "ranks": _ranks(current, seat)} for seat in heirs[:NAMED]]
    times = {"ranksRunSeconds": current.ranks_run_s, "nextStepSeconds": current.next_step_s}
    data |= {name: round(seconds, 4) for name, seconds in times.items() if seconds is not None}
    if (back := _back_at(known, current)) is not None:
        step, again = back
        data |= {"step": step} if again is None else {"step": step, "redone": again}
        redone = "" if again is None else f", {again or 'no'} {'step' if again in (0, 1) else 'steps'} redone"
        parts.append(f"back at step {step}{redone}")
    return HealReport("; ".join(parts), data)


def _back_at(known: Healing, current: Round) -> tuple[int, int | None] | None:
    """Return the step that ranks went back to, and how many are repeated; None if that is not known."""
    if current.resume is not None:
        step, done = current.resume.step, 0
    elif current.first_step is not None:  # told when it is done, like the highest of before
        step, done = current.first_step, 1
    else:
        return None
    return step, None if known.top is None else max(0, known.top - step + done)


def _times(current: Round) -> list[str]:
    shown = show_round_times(current.ranks_run_s, current.next_step_s)
    return [shown] if shown else []


def _who(known: Healing, current: Round, verb: str) -> tuple[str, str]:
    """Say what was lost, and who trains now in its place."""
    lost = f"{listed(known.lost)} lost" if known.lost else known.why
    size = current.world_size
    workers = f"{size} worker{'s' * (size > 1)}"
    heirs = told([f"{seat.name} has {_named(current, seat)}" for seat in _heirs(known, current)[: NAMED + 1]], ", ")
    if size < known.size:
        return lost, f"{heirs}, goes on with {workers}" if heirs else f"goes on with {workers}"
    return lost, heirs or f"{workers} {verb}{'s' * (size == 1)} again"


def _heirs(known: Healing, current: Round) -> list[Seat]:
    return [seat for seat in current.seats if seat.member_id in known.heirs]


def _named(current: Round, seat: Seat) -> str:
    ranks = _ranks(current, seat)
    return f"rank {ranks}" if seat.procs == 1 else f"ranks {ranks}"


def _ranks(current: Round, seat: Seat) -> str:
    first = current.first_rank_of(seat.rank)
    return str(first) if seat.procs == 1 else f"{first}-{first + seat.procs - 1}"

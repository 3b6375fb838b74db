"""What is told of a heal: who was lost, who stands in, how long it took, and which steps are done again?

For people to read; nothing is decided upon it. A heal begins with the release after a round that broke, and is over
when all ranks of a round run and the first of them has said how far back it is. Another loss before that belongs to
the same heal. A planned resize is none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from muster.core.world.run import NAMED, UNSEEN, Run, listed, told
from muster.types.records import record, replace
from muster.types.world import Cause, Loss, MemberId, Round, Seat

STEP_WAIT_S = 15.0  # for the first step of ranks that run; a heal is told without it after that


@record()
class Healing:
    """A round broke, and what replaces it has not been told of yet."""

    why: str  # of a round that lost nobody
    size: int  # of the world before
    since: float | None  # when it was noticed; None: nobody watched
    top: int | None  # the highest step that was told before
    lost: tuple[str, ...] = ()
    heirs: frozenset[MemberId] = frozenset()


@record()
class Healed:
    text: str
    data: Mapping[str, Any]  # the same for programs


def begun(before: Run, formed: Round, known: Healing | None) -> Healing | None:
    """The heal that the release of `formed` belongs to. `known`: one that was under way already."""
    last = before.round
    if last is None or last.recall is None or last.recall.cause.planned or last.recall.forgiven:
        return known
    losses = [loss for loss in last.losses if not loss.planned]
    gone = {loss.member_id for loss in losses}
    heirs = frozenset(
        seat.member_id
        for seat in formed.seats[: last.world_size]
        if seat.member_id in gone or last.seat_of(seat.member_id) is None
    )
    top = max((mark.step for mark in last.progress.values()), default=None)
    names = tuple(dict.fromkeys(loss.name for loss in losses))
    found = Healing(last.recall.reason, last.world_size, _since(last, losses), top, names, heirs)
    return found if known is None else _joined(known, found)


def _since(last: Round, losses: list[Loss]) -> float | None:
    """Since when it did not train as it should. Nobody knows of one that was lost while there was no coordinator."""
    assert last.recall is not None
    moments = [last.recall.at, *(loss.at for loss in losses)]
    if last.recall.cause is Cause.FAILURE and last.first_failed_at is not None:
        moments.append(last.first_failed_at)
    since = min(moments)
    return None if since == UNSEEN else since


def _joined(known: Healing, found: Healing) -> Healing:
    """Both as one: it began with the first, and only the second got anywhere."""
    return replace(
        known,
        since=known.since,
        top=max((top for top in (known.top, found.top) if top is not None), default=None),
        lost=tuple(dict.fromkeys((*known.lost, *found.lost))),
        heirs=known.heirs | found.heirs,
    )


def over(known: Healing, run: Run, now: float, *, final: bool = False) -> Healed | None:
    """What can be told now; None: not yet. `final`: it will not be known better."""
    current = run.running
    if current is None or current.up_at is None:
        return None
    back = _back_at(known, current)
    if back is None and not final and now < due(known, run):
        return None
    return _sentence(known, current, back)


def due(known: Healing, run: Run) -> float:
    """When to tell it if nothing is heard before."""
    current = run.running
    if current is None or current.up_at is None:
        return math.inf
    return current.up_at + STEP_WAIT_S if known.top is not None else current.up_at


def _back_at(known: Healing, current: Round) -> tuple[int, int | None] | None:
    """The step that the ranks went back to, and how many are done again; None where it does not count them."""
    if current.resume is not None:
        step = current.resume.step
        return step, None if known.top is None else max(0, known.top - step)
    if current.first_step is not None:  # told when it is done, like the highest of before
        step = current.first_step
        return step, None if known.top is None else max(0, known.top - step + 1)
    steps = [mark.step for mark in current.progress.values()]  # of an agent that tells no first one
    return (min(steps), None) if steps else None


# In words ----------------------------------------------------------------------------------------


def _sentence(known: Healing, current: Round, back: tuple[int, int | None] | None) -> Healed:
    took = None if known.since is None or current.up_at is None else max(0.0, current.up_at - known.since)
    heirs = [seat for seat in current.seats if seat.member_id in known.heirs]
    parts = [f"{listed(known.lost)} lost" if known.lost else known.why]
    parts.append(_instead(known, current, heirs) + (f" after {_shown(took)}" if took is not None else ""))
    data: dict[str, Any] = {"lost": list(known.lost[:NAMED]), "workers": current.world_size}
    data["heirs"] = [{"worker": seat.name, "ranks": _ranks(current, seat)} for seat in heirs[:NAMED]]
    data |= {} if took is None else {"seconds": round(took, 4)}
    if back is not None:
        step, again = back
        data |= {"step": step} if again is None else {"step": step, "redone": again}
        redone = "" if again is None else f", {again or 'no'} {'step' if again in (0, 1) else 'steps'} redone"
        parts.append(f"back at step {step}{redone}")
    return Healed("; ".join(parts), data)


def _instead(known: Healing, current: Round, heirs: list[Seat]) -> str:
    """Who trains now in place of what was lost."""
    size = current.world_size
    workers = f"{size} worker{'s' * (size > 1)}"
    found = told([f"{seat.name} has {_named(current, seat)}" for seat in heirs[: NAMED + 1]], ", ")
    if size < known.size:
        return f"{found}, goes on with {workers}" if found else f"goes on with {workers}"
    return found or f"{workers} train{'s' * (size == 1)} again"


def _named(current: Round, seat: Seat) -> str:
    ranks = _ranks(current, seat)
    return f"rank {ranks}" if seat.procs == 1 else f"ranks {ranks}"


def _ranks(current: Round, seat: Seat) -> str:
    first = current.first_rank_of(seat.rank)
    return str(first) if seat.procs == 1 else f"{first}-{first + seat.procs - 1}"


def _shown(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 0.9995 else f"{seconds:.1f} s"

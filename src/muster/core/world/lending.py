"""Whose GPUs are with somebody else, and is nothing of the worker's left on them?

A worker that is lent stays connected and keeps what it has in memory, but has no rank. Who is lent is said by whoever
directs the run (`core.world.transitions.reconfigure`); who sits where without it is `core.world.forming`'s question.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from muster.core.world import resuming
from muster.core.world.closing import still_there
from muster.core.world.run import Run, told
from muster.types.world import Member, Round, Seat


def seats(run: Run, last: Round) -> list[Seat]:
    """Seats of that round whose workers are lent."""
    return [seat for seat in last.seats if seat.name in run.lent] if run.lent else []


def here(run: Run) -> list[Member]:
    """Members that are lent."""
    return [member for member in run.members.values() if member.name in run.lent] if run.lent else []


def why(run: Run, names: Iterable[str]) -> str:
    """The sentence for users."""
    return told([f"{name} lends its GPUs: {run.lent[name]}" for name in names], "; ")


def changes(before: Mapping[str, str], run: Run) -> str:
    """What has become of who was lent before."""
    news = [name for name in run.lent if name not in before]
    back = [f"{name} has its GPUs again" for name in before if name not in run.lent]
    return "; ".join(part for part in (why(run, news), told(back, "; ")) if part)


def dispensable(run: Run, name: str, now: float) -> bool:
    """Whether a worker that is lent may end: ranks run without it, and none of them has to go on from what it holds."""
    member_id = next((member.member_id for member in run.members.values() if member.name == name), None)
    if name not in run.lent or member_id is None:
        return name in run.lent and run.recovery_until is None  # it has not joined yet, or is gone already
    current = run.running
    if current is None or not vacated(run, name, now) or len(current.up) < current.world_size:
        return False
    others = {other: holding for other, holding in run.holdings.items() if other != member_id}
    return not run.holdings or any(number == current.number for _, number, _ in resuming.complete(others))


def vacated(run: Run | None, name: str, now: float) -> bool:
    """Whether no rank of the worker of that name runs, and none can be started while it is lent. In doubt False.

    `now` is the time of the run's own clock. A run that is not open here (None) tells nothing: nobody gives the worker
    a rank, but those that it was given by a coordinator before may run. Whoever has no run has to look for processes.
    """
    if run is None or name not in run.lent or now < run.not_before:
        return False  # a member that has not come back yet may know of a later round
    last = run.round
    if last is None:
        # This coordinator has released nothing, but one before it may have. A worker that has come shows what it runs.
        return any(member.name == name for member in run.members.values())
    # Of a large world that is taken over not every seat is known: one without processes may be anybody's.
    return not any(seat.name == name or not seat.procs for seat in still_there(last, now))

"""Launches: which run a worker belongs to when it says hello, and when the next run may begin.

A run id can be used again. Each run under it is an *incarnation* with an id of its own, which its members present with
every later hello. A *launch* is one start of a group of workers; its identity comes from the user or from Slurm.
"""

from __future__ import annotations

from enum import StrEnum

from muster.core.world.run import Run, listed, next_expiry, unacknowledged
from muster.types.records import record, replace
from muster.types.world import EndedRun, RunOutcome

MOST_INCARNATIONS = 8  # ids of one run, which has several if two of its records were merged
MOST_LAUNCHES = 16
MOST_EARLIER = 4
LONGEST_ID = 256


class Belonging(StrEnum):
    HERE = "a member of this run, or a worker that may become one"
    LATE = "a worker of a launch whose run has ended"
    EARLIER = "a member of an earlier run"
    NEXT = "a worker of a new launch"


@record()
class Verdict:
    belonging: Belonging
    reason: str
    outcome: RunOutcome | None = None  # of the run that a late worker or an earlier member belongs to


def judge(run: Run, launch: str, incarnation: str, outcome: RunOutcome | None) -> Verdict:
    """Return the run that a worker belongs to, by its `launch` and the `incarnation` of which it was a member.

    `outcome` is the outcome that the worker sent, if it has one.
    """
    if incarnation and incarnation in run.incarnations:
        return Verdict(Belonging.HERE, "it is a member")
    for ended in run.earlier:
        if incarnation and incarnation in ended.incarnations:
            return Verdict(Belonging.EARLIER, "it was a member of a run before this one", ended.outcome)
    if incarnation and outcome is not None:
        return Verdict(Belonging.EARLIER, "it brings the outcome of another run", outcome)
    if launch and not incarnation:
        if launch in run.launches and run.outcome is not None:
            return Verdict(Belonging.LATE, f"launch {launch} has ended", run.outcome)
        for ended in () if launch in run.launches else reversed(run.earlier):
            if launch in ended.launches:
                return Verdict(Belonging.LATE, f"launch {launch} has ended", ended.outcome)
    if run.outcome is not None:
        return Verdict(Belonging.NEXT, "it did not belong to the run that has ended")
    return Verdict(Belonging.HERE, "the run has not ended")


@record()
class Wait:
    """The next run must wait for the ranks of the last one."""

    reason: str
    until: float


def wait_for_ranks(run: Run, now: float) -> Wait | None:
    """Return why ranks of a run that has ended may still be there; None when the next run may begin."""
    if not run.farewell_said:
        slow = unacknowledged(run)
        cause = f"{listed(slow)} still stopping ranks" if slow else "its members are about to leave"
        return Wait(f"the last run has just ended; {cause}", next_expiry(run))
    until = run.not_before
    if run.round is not None:
        finished = {*run.round.gone, *run.round.finished}
        until = max([until, *(fence for member_id, fence in run.round.fences.items() if member_id not in finished)])
    if now < until:
        return Wait("the last run has just ended; ranks of lost workers may still run", until)
    return None


def earlier_runs(run: Run) -> tuple[EndedRun, ...]:
    """Return the runs under this id that have ended, including this run."""
    assert run.outcome is not None
    short = replace(run.outcome, first_failure=None)
    return (*run.earlier, EndedRun(run.incarnations, run.launches, short))[-MOST_EARLIER:]


def merged(first: tuple[str, ...], second: tuple[str, ...], limit: int) -> tuple[str, ...]:
    """Return the newest ids of both, without duplicates. A member can put anything into a record: drop long ids."""
    ids = dict.fromkeys((*(name for name in first if name not in second), *second))
    return tuple(name for name in ids if 0 < len(name) <= LONGEST_ID)[-limit:]


def with_launch(run: Run, launch: str) -> Run:
    """Return the run with the launch of a member added."""
    if not launch or launch in run.launches or run.outcome is not None:
        return run
    return replace(run, launches=merged(run.launches, (launch,), MOST_LAUNCHES))

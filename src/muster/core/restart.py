"""The decision of a worker's agent to start the lost control plane of its machine again.

Every agent of the machine decides for itself, from what it sees in the home. The start lock and the home's lock see to
it that only one of them succeeds.
"""

from __future__ import annotations

from dataclasses import dataclass

from muster.backoff import Backoff

FIRST_S = (0.2, 1.0)  # agents that lose the control plane together look at different moments
AGAIN_S = 0.5  # between two looks of one agent while the control plane is away
PAUSES = Backoff(2.0, 300.0)  # after starts in a row, by any agent
FORGOTTEN_S = 900.0  # a control plane that ran for so long since its last start was well


@dataclass(frozen=True)
class LostControlPlane:
    """What an agent sees of the control plane that it has lost."""

    runs: bool  # a process has the home's lock
    stopped: bool  # somebody stopped it on purpose, or removed its home
    obstacle: str = ""  # why it may not be started by an agent
    starts: int = 0  # by agents, in a row
    last_start_ago_s: float = 0.0


@dataclass(frozen=True)
class RestartPlan:
    """`look_after_s` is None where no later look can change the answer, until the control plane was there again."""

    start: bool
    reason: str
    look_after_s: float | None = AGAIN_S


def decide(seen: LostControlPlane) -> RestartPlan:
    """Start it, wait, or leave it to people. Starts in a row come ever more slowly."""
    if seen.stopped:
        return RestartPlan(False, "it was stopped on purpose: muster server start starts it")
    if seen.runs:
        return RestartPlan(False, "it runs, and is starting or silent")
    if seen.obstacle:
        return RestartPlan(False, seen.obstacle, None)
    count = starts_in_a_row(seen)
    left_s = PAUSES.after(count) - seen.last_start_ago_s
    if count and left_s > 0:
        return RestartPlan(False, f"it was started {seen.starts} times in a row and ended again", max(left_s, AGAIN_S))
    return RestartPlan(True, "it ended without being stopped")


def starts_in_a_row(seen: LostControlPlane) -> int:
    """Return how many starts by agents count as failed, which is none after a long time without another."""
    return seen.starts if 0 <= seen.last_start_ago_s < FORGOTTEN_S else 0

"""What follows for a training from what Kueue says of its Workload, and the other way round? Pure.

Kueue gives out quota by `Workload` objects: one is made for each queued training, for all its workers. When it is
admitted, perhaps for fewer of them, the training goes on; when it is evicted, the training is suspended, and once no
worker is left the quota is given back. What somebody resumed without Kueue's word is suspended again.
"""

from __future__ import annotations

from dataclasses import dataclass

from muster.types import plural
from muster.types.training import QUEUE, Training


@dataclass(frozen=True)
class Workload:
    """What there is of it."""

    asked_target: int  # what the training wanted when it was queued
    asked_spares: int
    admitted: int | None = None  # for so many workers; None: it is not, or no longer
    reserved: bool = False  # quota is held for it
    evicted: str = ""  # why, while that is so
    finished: bool = False


@dataclass(frozen=True)
class Queue:
    """Make a Workload for it."""


@dataclass(frozen=True)
class Admit:
    """Let it go on, with so many."""

    target: int
    spares: int
    why: str


@dataclass(frozen=True)
class Withdraw:
    """Suspend it, and let it want again what it wanted."""

    target: int
    spares: int
    why: str


@dataclass(frozen=True)
class GiveBack:
    """Its quota: nothing of it runs any more."""

    why: str


@dataclass(frozen=True)
class Finish:
    """Tell that it has ended, so that its quota is free."""

    why: str


Verdict = Queue | Admit | Withdraw | GiveBack | Finish


def verdict(training: Training, workload: Workload | None, workers_alive: int) -> Verdict | None:
    """What is to be done now, if anything."""
    if training.is_terminal:
        outcome = training.status.outcome
        over = workload is not None and not workload.finished and not workers_alive
        return Finish(outcome.message if outcome is not None else "it has ended") if over else None
    if training.metadata.labels.get(QUEUE) is None or training.metadata.deletion_timestamp is not None:
        return None
    if workload is None:
        return Queue()
    suspended = training.spec.suspend
    if workload.admitted is not None and not workload.evicted:
        if not suspended:
            return None
        target, spares = shares(training, workload, workload.admitted)
        fewer = f", for {plural.workers(workload.admitted)}" if workload.admitted < _asked(workload) else ""
        return Admit(target, spares, f"its queue has admitted it{fewer}")
    if not suspended:
        why = workload.evicted or "its queue has not admitted it"
        return Withdraw(workload.asked_target, workload.asked_spares, why)
    if workload.reserved and workload.evicted and not workers_alive:
        return GiveBack(workload.evicted)
    return None


def _asked(workload: Workload) -> int:
    return workload.asked_target + workload.asked_spares


def shares(training: Training, workload: Workload, workers: int) -> tuple[int, int]:
    """Target and spares of so many workers: at least `min` train, then as many as were wanted; the rest are spares."""
    least = training.spec.world_size.min
    target = min(workload.asked_target, max(least, workers - workload.asked_spares))
    return target, max(0, min(workload.asked_spares, workers - target))

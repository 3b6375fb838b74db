"""How did each rank end? What its agent reported, joined with what the platform says of its worker.

The most telling answer counts: an agent that died with its ranks reported nothing, and one that saw a rank killed
does not know by whom. Whose end neither of them tells was lost with its node.
"""

from __future__ import annotations

from datetime import UTC, datetime

from muster.core.training import status as statuses
from muster.core.training.status import Observed
from muster.types import world
from muster.types.training import RankExit, RankStatus, Training
from muster.types.worker import OOM_KILLED, Worker

_SENT_AWAY = frozenset({"Evicted", "Preempted"})
_LOSS_TELLS = frozenset({"rank_failed", "below_minimum", "no_progress"})  # outcomes that lost workers can be behind


def collected(training: Training, seen: Observed, state: str, now: datetime) -> tuple[RankExit, ...]:
    """Exactly one for each rank of the last round, in a run that ends in that state."""
    before = {rank.rank: rank for rank in training.status.ranks}
    last, workers = seen.last_round, seen.by_name
    if last is None:
        return tuple(_lost(rank, workers.get(rank.worker), seen) for rank in training.status.ranks)
    found = []
    for rank in statuses.ranks(training, seen, now):
        if (end := last.exits.get(rank.rank)) is not None:
            found.append(told(end, state, before.get(rank.rank), seen))
        else:
            found.append(_lost(rank, workers.get(rank.worker), seen))
    return tuple(found)


def told(end: world.RankEnd, state: str, old: RankStatus | None, seen: Observed) -> RankExit:
    """An exit that was reported, as the training shows it."""
    worker = seen.by_name.get(end.worker)
    return RankExit(
        rank=end.rank,
        exit_code=end.exit_code,
        termination_reason=_reason(end, state, worker, seen),
        signal=end.signal,
        worker=end.worker,
        node=worker.node if worker is not None else "",
        round=end.round,
        restart_count=statuses.restarts(old, end.round),
        finished_at=datetime.fromtimestamp(end.finished_at, UTC) if end.finished_at else None,
        stderr_tail=end.stderr_tail,
        exception=end.exception,
        place=end.place,
    )


def first_failure(training: Training, seen: Observed, proposal: world.RunOutcome, now: datetime) -> RankExit | None:
    """The rank that a failed run failed for; where none reported it, the first that the platform ended."""
    if proposal.first_failure is not None:
        return told(proposal.first_failure, proposal.state.value, None, seen)
    if proposal.state is not world.OutcomeState.FAILED or proposal.reason not in _LOSS_TELLS:
        return None
    ended = {name: worker.ended_at for name, worker in seen.by_name.items() if worker.ended_at and worker.reason}
    ends = [end for end in collected(training, seen, "failed", now) if end.failed and end.worker in ended]
    return min(ends, key=lambda end: (ended[end.worker], end.rank), default=None)


def _reason(end: world.RankEnd, state: str, worker: Worker | None, seen: Observed) -> str:
    if end.exit_code == 0:
        return "Completed"
    if end.stopped and state == "cancelled":
        return "Cancelled"
    if worker is not None and not worker.alive:
        if worker.reason == OOM_KILLED and end.reason == "Signal SIGKILL":
            return OOM_KILLED
        if worker.reason in _SENT_AWAY and end.stopped and state == "failed" and _broke_the_round(end.worker, seen):
            return worker.reason
    return end.reason


def _broke_the_round(name: str, seen: Observed) -> bool:
    """It left first, and the others were called back for it."""
    last = seen.last_round
    if last is None or last.recall is None:
        return False
    return any(loss.name == name and loss.at <= last.recall.at for loss in last.losses)


def _lost(rank: RankStatus, worker: Worker | None, seen: Observed) -> RankExit:
    """Nobody reported it: its worker's end was its own, as far as the platform knows that."""
    known = RankExit(rank.rank, None, "NodeLost", None, rank.worker, rank.node, rank.round, rank.restarts)
    if worker is None or worker.alive or not worker.reason:
        return known
    code = worker.exit_code or None  # an agent's 0 is not its rank's
    signal = None if code is None or code <= 128 else world.RankEnd.from_status(rank.rank, 128 - code).signal
    return RankExit(
        rank.rank,
        code,
        worker.reason,
        signal,
        rank.worker,
        rank.node,
        rank.round,
        rank.restarts,
        finished_at=seen.shown(worker.ended_at) if worker.ended_at is not None else None,
    )

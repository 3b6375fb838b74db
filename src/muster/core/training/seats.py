"""The worker that has a rank, for orders that need a running rank."""

from __future__ import annotations

from muster.errors import Conflict, NotFound, UDTerminalState
from muster.types.training import RankStatus, Training

_OVER = ("succeeded", "failed", "lost")


def seat_of(training: Training, rank: int) -> RankStatus:
    """Return the rank's status. Raise the error that says why no process has that rank now."""
    name, status = training.metadata.name, training.status
    if training.is_terminal:
        told, hint = f"{name} has ended: {status.phase}", f"muster logs {name} --rank {rank} shows what it printed"
        raise UDTerminalState(told, phase=status.phase, hint=hint)
    if not status.ranks:
        raise Conflict(f"{name} is {status.phase}: none of its ranks runs yet", hint=f"muster explain {name}")
    seat = next((one for one in status.ranks if one.rank == rank), None)
    if seat is None:
        last = max(one.rank for one in status.ranks)
        there = "its only rank is 0" if last == 0 else f"its ranks are 0 to {last}"
        raise NotFound(f"{name} has no rank {rank}: {there}", hint=f"muster describe {name}")
    if seat.phase in _OVER:
        raise Conflict(f"rank {rank} of {name} does not run now: {seat.phase}", hint=f"muster describe {name}")
    return seat

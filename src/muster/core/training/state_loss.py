"""Finished steps that a round begins without, because no copy of them survived.

The stored status is compared with the round that is out, so that a loss is also reported where the control plane was
lost with the workers. A round that goes on from memory is none: what it repeats is reported with the heal.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from muster.types.records import record, replace
from muster.types.state import KeptState
from muster.types.training import Status
from muster.types.world import Round


@record()
class StateLoss:
    steps: int
    text: str
    data: Mapping[str, Any]


def found(old: Status, current: Round | None) -> StateLoss | None:
    """Return the loss that the first look at a new round shows; None if it has lost nothing."""
    known = old.kept_state
    if known is None or current is None or old.round is None or current.number == old.round:
        return None
    if current.resume is not None and current.resume.sources:
        return None
    begin = _begin(known, current)
    steps = _reached(known, old) - begin
    if steps <= 0:
        return None
    seated = {seat.name for seat in current.seats}
    workers = {rank.worker for rank in old.ranks}
    lost = len(workers - seated)
    copies = "no copy" if lost == len(workers) else "no whole copy"
    where = "goes on from step {} on disk" if begin else "begins at step {}. `durable=` keeps steps on disk"
    tells = f"{copies} of the state survived{' in memory' if begin else ''} ({lost} of {len(workers)} workers lost)"
    text = f"{tells}; {steps} {'step is' if steps == 1 else 'steps are'} lost; {where.format(begin)}"
    return StateLoss(steps, text, {"steps": steps, "step": begin, "workers": lost, "of": len(workers)})


def followed(state: KeptState, old: Status, current: Round | None) -> KeptState:
    """Return the state with what the round that is out lost, and with how far its ranks are.

    New workers do not know which step is on disk before one of their ranks tells them: what was known before counts.
    """
    known = old.kept_state
    if known is not None and state.durable_step is None:
        state = replace(state, durable_step=known.durable_step)
    if known is not None and current is not None and current.number != old.round:
        loss = found(old, current)
        lost, steps = ("", None) if loss is None else (loss.text, loss.steps)
        return replace(state, reached=_begin(known, current), lost=lost, lost_steps=steps)
    marks = [mark.step for mark in current.progress.values()] if current is not None else []
    before = [known.reached] if known is not None and known.reached is not None else []
    newest = [state.newest_step] if state.newest_step is not None else []
    reached = max([*marks, *before, *newest], default=None)
    lost, steps = ("", None) if known is None else (known.lost, known.lost_steps)
    return replace(state, reached=reached, lost=lost, lost_steps=steps)


def _begin(known: KeptState, current: Round) -> int:
    """Return the step at which the round begins. Without orders its ranks look on disk themselves."""
    return current.resume.step if current.resume is not None else known.durable_step or 0


def _reached(known: KeptState, old: Status) -> int:
    return max([known.reached or 0, *(rank.step for rank in old.ranks if rank.step is not None)])

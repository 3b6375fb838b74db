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
    is_certain = current.resume is not None or not begin  # otherwise the ranks may find a folder without steps
    steps = _reached(known, old) - begin
    if steps <= 0:
        return None
    seated = {seat.name for seat in current.seats}
    workers = {rank.worker for rank in old.ranks}
    lost = len(workers - seated)
    copies = "no copy" if lost == len(workers) else "no whole copy"
    where = f"goes on from step {begin} on disk" if begin else "begins at step 0. `durable=` keeps steps on disk"
    if not is_certain:
        where = f"step {begin} was the newest on disk"
    qualifier = "" if is_certain else "at least "
    tells = f"{copies} of the state survived{' in memory' if begin else ''} ({lost} of {len(workers)} workers lost)"
    text = f"{tells}; {qualifier}{steps} {'step is' if steps == 1 else 'steps are'} lost; {where}"
    data = {"steps": steps, "workers": lost, "of": len(workers)}
    return StateLoss(steps, text, data | ({"step": begin} if is_certain else {}))


def followed(state: KeptState, old: Status, current: Round | None) -> KeptState:
    """Return the state with what the round that is out lost, and with how far its ranks are.

    The step on disk that was known before counts until a round begins. Then its workers look for the step themselves,
    and it is unknown until one of them reports it: the folder may be gone.
    """
    known = old.kept_state
    is_new = current is not None and current.number != old.round
    is_unknown = is_new and current is not None and current.resume is None
    if known is not None and state.durable_step is None and not is_unknown:
        state = replace(state, durable_step=known.durable_step)
    if known is not None and current is not None and is_new:
        loss = found(old, current)
        lost, steps = ("", None) if loss is None else (loss.text, loss.steps)
        begin = None if is_unknown and known.durable_step else _begin(known, current)
        return replace(state, reached=begin, lost=lost, lost_steps=steps)
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

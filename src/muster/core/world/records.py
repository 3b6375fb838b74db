"""What must be known of a run so that another coordinator can go on with it, and how is that kept?

`core.world.transitions.restored` makes a run of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from muster.core.world.run import Run
from muster.types import codec
from muster.types.frames import RunRecord
from muster.types.world import RankEnd, Round, RunId


def record(run_id: RunId, epoch: int, run: Run) -> RunRecord:
    """All that another coordinator needs to go on with this run."""
    current = run.round
    kept = RunRecord(
        run_id=run_id,
        epoch=epoch,
        settings=run.settings,
        target=run.target,
        restarts_used=run.restarts_used,
        best_step=run.best_step,
        stale_rounds=run.stale_rounds,
        outcome=run.outcome,
        gate=replace(run.gate, since=0.0) if run.gate else None,
        proven=run.proven,
        taken_back=run.taken_back,
        hopeless=run.hopeless,
        lent=run.lent,
        incarnations=run.incarnations,
        launches=run.launches,
        earlier=run.earlier,
    )
    if current is None:
        return kept
    return replace(
        kept,
        round=current.number,
        seats=current.seats,
        store=(current.store_addr, current.store_port),
        why=current.why,
        resume=current.resume,
        exits=tuple(_settled_exits(run, current)),
        finished=tuple(sorted(current.finished)),
    )


def _settled_exits(run: Run, current: Round) -> list[RankEnd]:
    """Ends that stand whatever comes: all of them once there is an outcome, before it those that succeeded."""
    return [end for end in current.exits.values() if run.outcome is not None or end.exit_code == 0]


def write(record: RunRecord) -> dict[str, Any]:
    """As it is kept in a file or a store, as coordinators of every version have kept it."""
    return codec.to_wire(record, names=codec.plain)


def read(kept: Mapping[str, Any]) -> RunRecord:
    """`codec.Invalid` says why it cannot be used."""
    told = {key: value for key, value in kept.items() if value is not None}
    return codec.from_wire(RunRecord, told, strict=False, names=codec.plain)

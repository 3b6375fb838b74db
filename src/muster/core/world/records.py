"""What must be known of a run so that another coordinator can go on with it, and how is that kept?

`core.world.transitions.restored` makes a run of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from muster.core.world import pace
from muster.core.world.run import Run
from muster.types import codec
from muster.types.frames import RunRecord
from muster.types.world import RankEnd, Round, RunId


def record(run_id: RunId, epoch: int, run: Run, clock: str = "") -> RunRecord:
    """Return all that another coordinator needs to go on with this run. `clock` names the clock of the run's times."""
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
        clock=clock,
        durable_step=run.durable_step,
        healing=run.healing,
        pace=pace.recordable(run.pace),
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
        since=current.since,
        ran_at=current.ran_at,
    )


def on_clock(record: RunRecord, clock: str, now: float) -> RunRecord:
    """Return the record with the times that are true on this clock. The other times become unknown.

    The clock of a machine counts from its boot, so it survives the process, but not the machine.
    """
    is_same = bool(clock) and record.clock == clock

    def valid(moment: float | None) -> float | None:
        return moment if is_same and moment is not None and moment <= now else None

    healing = record.healing
    if healing is not None:
        healing = replace(healing, since=valid(healing.since))
    return replace(record, clock=clock, since=valid(record.since), ran_at=valid(record.ran_at), healing=healing)


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

"""What must be known of a run so that another coordinator can go on with it?

The record is kept before it is told, and every agent has it too. `core.world.transitions.restored` makes a run of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from muster.core.world.gates import Gate
from muster.core.world.run import Run
from muster.types.world import MemberId, RankExit, Round, RunId


def record(run_id: RunId, epoch: int, run: Run) -> dict[str, Any]:
    """All that another coordinator needs to go on with this run."""
    round_part = run.round.to_wire() if run.round else {"round": -1}
    return {
        **round_part,
        "run_id": run_id,
        "epoch": epoch,
        "settings": run.settings.to_wire(),
        "target": run.target,
        "restarts_used": run.restarts_used,
        "best_step": run.best_step,
        "stale_rounds": run.stale_rounds,
        "outcome": run.outcome.to_wire() if run.outcome else None,
        "exits": [end.to_wire() for end in _settled_exits(run)],
        "finished": sorted(run.round.finished) if run.round else [],
        "gate": run.gate.to_wire() if run.gate else None,
    }


def _settled_exits(run: Run) -> list[RankExit]:
    """Ends that stand whatever comes: all of them once there is an outcome, before it those that succeeded."""
    if run.round is None:
        return []
    return [end for end in run.round.exits.values() if run.outcome is not None or end.exit_code == 0]


def round_of(record: Mapping[str, Any]) -> Round | None:
    """The round that a record shows, with what was known of its ranks' ends."""
    if not record.get("seats"):
        return None
    ends = [RankExit.from_wire(end) for end in record.get("exits") or ()]
    finished = frozenset(MemberId(member_id) for member_id in record.get("finished") or ())
    return replace(Round.from_wire(record), exits={end.rank: end for end in ends}, finished=finished)


def gate_of(record: Mapping[str, Any]) -> Gate | None:
    """What was known of that round's mesh when it was released, or has become known since."""
    return Gate.from_wire(told) if (told := record.get("gate")) else None

"""What must be known of a run so that another coordinator can go on with it?

The record is kept before it is told, and every agent has it too. `core.register.restored` makes a roll of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from muster.core.gates import Gate
from muster.core.roll import Roll
from muster.types.world import MemberId, RankExit, Round, RunId


def record(run_id: RunId, epoch: int, roll: Roll) -> dict[str, Any]:
    """All that another coordinator needs to go on with this run."""
    round_part = roll.round.to_wire() if roll.round else {"round": -1}
    return {
        **round_part,
        "run_id": run_id,
        "epoch": epoch,
        "settings": roll.settings.to_wire(),
        "target": roll.target,
        "restarts_used": roll.restarts_used,
        "best_step": roll.best_step,
        "stale_rounds": roll.stale_rounds,
        "outcome": roll.outcome.to_wire() if roll.outcome else None,
        "exits": [end.to_wire() for end in _settled_exits(roll)],
        "finished": sorted(roll.round.finished) if roll.round else [],
        "gate": roll.gate.to_wire() if roll.gate else None,
    }


def _settled_exits(roll: Roll) -> list[RankExit]:
    """Ends that stand whatever comes: all of them once there is an outcome, before it those that succeeded."""
    if roll.round is None:
        return []
    return [end for end in roll.round.exits.values() if roll.outcome is not None or end.exit_code == 0]


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

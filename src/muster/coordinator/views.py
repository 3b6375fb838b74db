"""What does a user see of a run?

The run as it stands; its story is added by the desk, which keeps it.
"""

from __future__ import annotations

from typing import Any

from muster.core.roll import Roll
from muster.core.seating import natural
from muster.types.world import Member, Role, RunId


def view(run_id: RunId, epoch: int, roll: Roll, reason: str, now: float) -> dict[str, Any]:
    """What `muster world show` prints above the story."""
    current = roll.round
    return {
        "run_id": run_id,
        "epoch": epoch,
        "state": _state(roll),
        "reason": reason,
        "round": current.number if current else None,
        "world": current.world_size if roll.running and current else 0,
        "min": roll.settings.min,
        "target": roll.target,
        "max": roll.settings.max,
        "spares": sum(member.role is Role.SPARE for member in roll.members.values()),
        "restarts_used": roll.restarts_used,
        "max_restarts": roll.settings.max_restarts,
        "members": [_member_view(member, now) for member in _in_order(roll)],
        "steps": {str(rank): mark.step for rank, mark in sorted(current.progress.items())} if current else {},
        "outcome": roll.outcome.to_wire() if roll.outcome else None,
        "mesh": gate.to_wire() if (gate := roll.coming or roll.gate) else None,
    }


def _state(roll: Roll) -> str:
    if roll.outcome is not None:
        return str(roll.outcome.state)
    if roll.recovery_until is not None:
        return "recovering"
    return "training" if roll.running else "forming"


def _in_order(roll: Roll) -> list[Member]:
    return sorted(
        roll.members.values(), key=lambda member: (member.rank is None, member.rank or 0, natural(member.name))
    )


def _member_view(member: Member, now: float) -> dict[str, Any]:
    shown = ("name", "member_id", "role", "rank", "procs", "addr", "host", "pid", "domain", "infra_rank", "note")
    view = {name: getattr(member, name) for name in (*shown, "paths")}
    return view | {"ranks_state": str(member.ranks_state), "lease_s": round(member.lease_until - now, 3)}

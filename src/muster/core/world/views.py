"""What does a user see of a run?

The run as it stands; its story is added by the protocol, which keeps it.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from muster.core.world import safe_state
from muster.core.world.run import Run
from muster.core.world.seating import natural
from muster.types import codec
from muster.types.world import Member, MemberId, Role, RunId, RunOutcome


def view(
    run_id: RunId, epoch: int, run: Run, reason: str, now: float, lifelines: Collection[MemberId] = ()
) -> dict[str, Any]:
    """What `muster world show` prints above the story."""
    current = run.round
    return {
        "run_id": run_id,
        "epoch": epoch,
        "state": _state(run),
        "reason": reason,
        "round": current.number if current else None,
        "world": current.world_size if run.running and current else 0,
        "min": run.settings.min,
        "target": run.target,
        "taken_back": _plain(run.taken_back) if run.taken_back is not None else None,
        "max": run.settings.max,
        "spares": sum(member.role is Role.SPARE and member.name not in run.lent for member in run.members.values()),
        "restarts_used": run.restarts_used,
        "max_restarts": run.settings.max_restarts,
        "lease_s": run.settings.lease_s,
        "false_alarms": run.false_alarms,
        "members": [
            _member_view(member, now, member.member_id in lifelines) | _lent(run, member) | _holds(run, member)
            for member in _in_order(run)
        ],
        "steps": {str(rank): mark.step for rank, mark in sorted(current.progress.items())} if current else {},
        "outcome": _outcome_view(run.outcome) if run.outcome else None,
        "mesh": _plain(replace(gate, since=0.0)) if (gate := run.coming or run.gate) else None,
        **_state_view(run, now),
    }


def _state_view(run: Run, now: float) -> dict[str, Any]:
    """Of a run that keeps state; others look as if there were no such thing."""
    known = safe_state.kept(run, now)
    return {} if known is None else {"kept_state": _plain(known.state) | {"age_s": known.age_s}}


def _lent(run: Run, member: Member) -> dict[str, Any]:
    """Of one whose GPUs are with somebody else: who has them. It has a rank until its round is called back."""
    if (why := run.lent.get(member.name)) is None:
        return {}
    note = f"{why}; {member.note}" if member.note else why
    return {"note": note} | ({"role": "lent"} if member.role is Role.SPARE else {})


def _holds(run: Run, member: Member) -> dict[str, Any]:
    known = run.holdings.get(member.member_id)
    if known is None:
        return {}
    newest = max((one.step for one in known.held), default=None)
    ranks = len({one.rank for one in known.held})
    return {"holds": {"step": newest, "ranks": ranks, "bytes": known.taken, "limit": known.limit}}


def _outcome_view(outcome: RunOutcome) -> dict[str, Any]:
    first = outcome.first_failure
    shown = {"round": outcome.round, **_plain(outcome)}
    return shown | {"first_failure": {**_plain(first), "reason": first.reason} if first is not None else None}


def _plain(record: Any) -> dict[str, Any]:
    return codec.to_wire(record, names=codec.plain)


def _state(run: Run) -> str:
    if run.outcome is not None:
        return str(run.outcome.state)
    if run.recovery_until is not None:
        return "recovering"
    return "training" if run.running else "forming"


def _in_order(run: Run) -> list[Member]:
    return sorted(
        run.members.values(), key=lambda member: (member.rank is None, member.rank or 0, natural(member.name))
    )


def _member_view(member: Member, now: float, lifeline: bool) -> dict[str, Any]:
    shown = ("name", "member_id", "role", "rank", "procs", "addr", "host", "pid", "domain", "infra_rank", "note")
    view = {name: getattr(member, name) for name in (*shown, "paths")}
    view |= {"ranks_state": str(member.ranks_state), "lease_s": round(member.lease_until - now, 3)}
    return view | {"lifeline": lifeline}  # if all of it is killed, that is known at once

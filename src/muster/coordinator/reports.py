"""What does a frame from a member say?

A field of a hello that has the wrong kind or is too long counts as not said. What a report does to the roll is
`core.register`'s business.
"""

from __future__ import annotations

from typing import Any

from muster.coordinator.wire import Frame
from muster.types.world import Member, MemberId, RankExit

MAX_TEXT = 256  # of a name, an address, a domain

_MEMBER_FIELDS = {
    "name": str,
    "addr": str,
    "procs": int,
    "infra_rank": int,
    "domain": str,
    "version": str,
    "store_port": int,
    "host": str,
    "pid": int,
    "launcher": str,
    "checks_health": bool,
    "unfit": str,
}


def member(hello: Frame) -> Member | None:
    """The member that a hello describes, or None if it does not say enough."""
    data = hello.get("member")
    if not isinstance(data, dict) or not data.get("member_id") or not data.get("name"):
        return None
    fields: dict[str, Any] = {}
    for name, kind in _MEMBER_FIELDS.items():
        value = data.get(name)
        if isinstance(value, kind) and not (isinstance(value, str) and len(value) > MAX_TEXT):
            fields[name] = value
    if "name" not in fields or fields.get("procs", 1) < 1:
        return None
    return Member(member_id=MemberId(str(data["member_id"])), **fields)


def exits(data: object, now: float) -> list[tuple[RankExit, float]]:
    """Exits as told, with the time on our clock at which each happened (they travel with their age)."""
    ends = []
    for item in data if isinstance(data, list) else []:
        ends.append((RankExit.from_wire(item), now - float(item.get("age_s") or 0.0)))
    return ends


def integer(frame: Frame, key: str) -> int:
    """A round, an epoch, a port or a target that a frame should carry; where it does not, -1, which is none of them."""
    value = frame.get(key)
    return value if isinstance(value, int) else -1

"""What does a frame from a member say?

A field of a hello that has the wrong kind or is too long counts as not said. What a report does to the run is
`core.world.transitions`'s business.
"""

from __future__ import annotations

import math
from typing import Any

from muster.types.world import Member, MemberId, Path, RankExit, Reach
from muster.world.wire import Frame

MAX_TEXT = 256  # of a name, an address, a domain
MAX_PATHS = 4

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
    return Member(member_id=MemberId(str(data["member_id"])), paths=paths(data.get("paths")), **fields)


def paths(data: object) -> tuple[Path, ...]:
    """Where a member can be probed; what is no host and port was not said."""
    found = []
    for item in data if isinstance(data, list) else []:
        host, port = item if isinstance(item, list) and len(item) == 2 else ("", 0)
        if isinstance(host, str) and 0 < len(host) <= MAX_TEXT and isinstance(port, int) and 0 < port < 65536:
            found.append((host, port))
    return tuple(found[:MAX_PATHS])


def reach(data: object) -> Reach:
    """What a member found at its peers: `[member, seconds or null, why not]` each."""
    is_open: dict[MemberId, float] = {}
    shut: dict[MemberId, str] = {}
    for member_id, rtt, why in data if isinstance(data, list) else []:
        if isinstance(rtt, int | float) and 0 <= rtt < math.inf:
            is_open[MemberId(str(member_id))] = float(rtt)
        else:
            shut[MemberId(str(member_id))] = str(why)[:MAX_TEXT]
    return Reach(is_open, shut)


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

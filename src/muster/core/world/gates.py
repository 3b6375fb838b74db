"""May the ranks of a round start, as far as the network between their workers is concerned?

    Converging ──every way is open──► Ready
        └──the timeout has passed──► Degraded ──every way is open──► Ready

A way is open when the member at its start has reached the one at its end; a pair needs both. A round that is out keeps
its gate: what closes later is asked about again for the next one. Who probes whom, and when, is not decided here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from muster.types import plural
from muster.types.world import Gate, GateState, Member, MemberId, Pair, Reach, Seat

MOST_NAMED = 16  # pairs that a gate names
NOT_TRIED = "no answer yet"


@dataclass(frozen=True)
class GateVerdict:
    """A gate, why it is as it is, and when to look again if nobody reports before."""

    gate: Gate
    reason: str
    look_at: float | None = None


def judge(
    people: Sequence[Member | Seat],
    reach: Mapping[MemberId, Reach],
    before: Gate | None,
    timeout_s: float,
    now: float,
) -> GateVerdict:
    """The gate of a round with those members, given the one that was asked about before, if any.

    The patience counts from when ranks first had to wait: it does not begin anew when the members change.
    """
    pairs, more = _not_open(people, reach)
    if not pairs:
        gate = Gate(GateState.READY, len(people), before.since if before else now, slowest_s=_slowest(people, reach))
        # A slower answer alone is no news.
        if before is not None and replace(before, slowest_s=gate.slowest_s) == gate:
            gate = before
        return GateVerdict(gate, f"all {plural.workers(len(people))} reach each other")
    since = now if before is None or before.state is GateState.READY else before.since
    until = since + timeout_s
    if now < until:
        gate = Gate(GateState.CONVERGING, len(people), since, pairs, more)
        return GateVerdict(gate, f"the mesh converges: {gate.named}; ranks start anyway after {timeout_s:g} s", until)
    gate = Gate(GateState.DEGRADED, len(people), since, pairs, more)
    return GateVerdict(gate, f"the mesh is degraded after {timeout_s:g} s: {gate.named}")


def healed(gate: Gate, people: Sequence[Member | Seat], reach: Mapping[MemberId, Reach]) -> Gate | None:
    """The gate of a round that is out, if it opened degraded and every way is open now."""
    if gate.state is not GateState.DEGRADED or _not_open(people, reach)[0]:
        return None
    return Gate(GateState.READY, gate.size, gate.since, slowest_s=_slowest(people, reach))


def left_out(
    core: Sequence[Member | Seat], newcomers: Sequence[Member], reach: Mapping[MemberId, Reach]
) -> frozenset[MemberId]:
    """The newcomers without whom the core could grow and its mesh be no worse. First come, first served."""
    circle = [one.member_id for one in core]
    unknown: Mapping[MemberId, float] = {}
    ways = {member_id: found.open for member_id, found in reach.items()}
    left = set()
    for one in newcomers:
        mine = ways.get(one.member_id, unknown)
        if all(other in mine and one.member_id in ways.get(other, unknown) for other in circle):
            circle.append(one.member_id)
        else:
            left.add(one.member_id)
    return frozenset(left)


def _not_open(people: Sequence[Member | Seat], reach: Mapping[MemberId, Reach]) -> tuple[tuple[Pair, ...], bool]:
    """The first pairs that do not reach each other both ways, and whether there are more."""
    ids = {one.member_id for one in people}
    place = {one.member_id: index for index, one in enumerate(people)}
    unknown = Reach()
    pairs: list[Pair] = []
    for one in people:
        mine = reach.get(one.member_id, unknown)
        for other in sorted(ids - mine.open.keys() - {one.member_id}, key=place.__getitem__):
            both = one.member_id not in reach.get(other, unknown).open
            if both and place[other] < place[one.member_id]:
                continue  # named already
            if len(pairs) == MOST_NAMED:
                return tuple(pairs), True  # of a large world that has just begun there are too many to look at
            pairs.append(Pair(one.name, people[place[other]].name, mine.shut.get(other, NOT_TRIED), both))
    return tuple(pairs), False


def _slowest(people: Sequence[Member | Seat], reach: Mapping[MemberId, Reach]) -> float:
    ids = {one.member_id for one in people}
    seen = (rtt for i in ids if i in reach for other, rtt in reach[i].open.items() if other in ids)
    return max(seen, default=0.0)

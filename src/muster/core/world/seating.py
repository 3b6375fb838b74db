"""Who sits where: given members and the places of the last round, the order of the next world.

Seats come in blocks. Without segments a block is one rank; with `segment=S` it is S consecutive ranks
held by members of one domain. Whether it is *time* to form is `core.world.forming`'s question, not asked here.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from muster.types.world import Member, Seat

Place = tuple[Seat, Member | None]  # a seat of the last round, and who still holds it
Block = tuple[Member | None, ...]


@dataclass(frozen=True)
class Seating:
    """`order[i]` gets worker rank i. `vacant` places of the last round found nobody and were closed."""

    order: tuple[Member, ...]
    vacant: int = 0

    @property
    def size(self) -> int:
        return len(self.order)


@functools.lru_cache(maxsize=65536)
def natural(name: str) -> tuple[tuple[int, int, str], ...]:
    """Sort key that puts `w2` before `w10`."""
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in re.split(r"(\d+)", name) if part)


def roll_order(members: Iterable[Member]) -> list[Member]:
    """By infra rank where all have one, else by name in natural order."""
    people = list(members)
    if people and all(member.infra_rank is not None for member in people):
        return sorted(people, key=lambda member: member.infra_rank or 0)
    return sorted(people, key=lambda member: (natural(member.name), member.name))


def first(members: Iterable[Member], target: int, segment: int | None) -> Seating:
    """The first world: nobody has a rank to keep."""
    people = roll_order(members)
    if segment is None:
        return Seating(tuple(people[:target]))
    order: list[Member] = []
    for group in _by_domain(people):
        whole = len(group) // segment * segment
        order += group[: min(whole, target - len(order))]
    return Seating(tuple(order))


def again(places: Sequence[Place], spares: Iterable[Member], target: int, segment: int | None) -> Seating:
    """The next world: survivors keep their places, spares fill the gaps, then the world grows or shrinks.

    `places` are the seats of the last round with the member that still holds each, or None.
    """
    size = segment or 1
    here = {member.member_id: member for member in spares}
    # Who was lost and is back before the world formed without it has a place already: its own.
    held: list[Place] = [(seat, member or here.pop(seat.member_id, None)) for seat, member in places]
    free = list(here.values())
    parts = _fit_to(target // size, [held[start : start + size] for start in range(0, len(held), size)])
    blocks = [_mend(tuple(member for _, member in part), part[0][0].domain, free, segment) for part in parts]
    for index, block in enumerate(blocks):
        if None in block:
            blocks[index] = _fresh(free, segment) or block
    while len(blocks) < target // size and (grown := _fresh(free, segment)):
        blocks.append(grown)
    order = [member for block in blocks if None not in block for member in block if member is not None]
    return Seating(tuple(order), vacant=size * sum(None in block for block in blocks))


def _fit_to(want: int, parts: Sequence[Sequence[Place]]) -> list[Sequence[Place]]:
    """When there are more blocks than wanted, those with gaps go first, then the highest ranks."""
    broken = [index for index, part in enumerate(parts) if any(member is None for _, member in part)]
    whole = sorted(set(range(len(parts))).difference(broken))
    dropped = set((broken[::-1] + whole[::-1])[: max(0, len(parts) - want)])
    return [part for index, part in enumerate(parts) if index not in dropped]


def _mend(block: Block, home: str | None, free: list[Member], segment: int | None) -> Block:
    """Fill the gaps of one block. A segment that its own domain cannot mend gives its members back to `free`."""
    gaps = block.count(None)
    if not gaps:
        return block
    if segment is None:
        pick = min(free, key=lambda member: (member.domain != home, *_eagerness(member)), default=None)
        if pick is None:
            return block
        free.remove(pick)
        return (pick,)
    local = sorted((member for member in free if member.domain == home), key=_eagerness)
    if len(local) < gaps:
        free += [member for member in block if member is not None]
        return (None,) * len(block)
    for member in local[:gaps]:
        free.remove(member)
    picks = iter(local)
    return tuple(next(picks) if member is None else member for member in block)


def _fresh(free: list[Member], segment: int | None) -> Block | None:
    """A whole new block out of `free`, or None."""
    if segment is None:
        pick = min(free, key=_eagerness, default=None)
        if pick is None:
            return None
        free.remove(pick)
        return (pick,)
    for group in _by_domain(roll_order(free)):
        if len(group) >= segment:
            chosen = tuple(group[:segment])
            for member in chosen:
                free.remove(member)
            return chosen
    return None


def _eagerness(member: Member) -> tuple[float, float, str]:
    infra = math.inf if member.infra_rank is None else member.infra_rank
    return (infra, member.joined_at, member.member_id)


def _by_domain(ordered: Iterable[Member]) -> list[list[Member]]:
    """Groups in the order in which each domain first appears, which is that of its lowest infra rank."""
    groups: dict[str | None, list[Member]] = {}
    for member in ordered:
        groups.setdefault(member.domain, []).append(member)
    return list(groups.values())

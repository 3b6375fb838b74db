"""Who keeps a copy of whose state?

Each worker's goes to one other, in another failure domain where there is one: the same distance in the ring of all
for everybody, so that each keeps as many as it gives. Spares have copies of all, as far as they have room.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from muster.core.world import resuming
from muster.core.world.run import Run
from muster.types.records import record
from muster.types.world import MemberId, Path, Role, Seat

FEW = 64  # workers, for whom every distance is tried


@record()
class Copies:
    """What a worker does about copies of its state."""

    targets: tuple[tuple[MemberId, Path], ...] = ()
    buddy: MemberId | None = None
    safe: tuple[int, int] | None = None  # round and step that no loss of one worker costs
    every: int = 1
    stride: int = 1
    write_at: int | None = None


def orders(run: Run) -> Mapping[MemberId, Copies]:
    """For everybody, as soon as anybody keeps state; empty before."""
    if not run.holdings or run.round is None:
        return {}
    key = resuming.safe(run)
    safe = (key[1], key[0]) if key is not None else None
    holdings = run.holdings.values()
    every = max(holding.every for holding in holdings)
    stride = max(every, *(holding.stride for holding in holdings))
    write_at = max((holding.write_at for holding in holdings if holding.write_at is not None), default=None)
    paths = {member_id: holding.path for member_id, holding in run.holdings.items() if holding.path is not None}
    spares = [member.member_id for member in run.members.values() if member.role is Role.SPARE]
    chosen = choose([seat for seat in run.round.seats if seat.member_id in run.members])
    found: dict[MemberId, Copies] = {}
    for member_id in run.members:
        mine = [chosen[member_id]] if member_id in chosen else []
        if run.round.seat_of(member_id) is not None:
            mine += spares
        targets = tuple((one, paths[one]) for one in mine if one in paths)
        found[member_id] = Copies(targets, chosen.get(member_id), safe, every, stride, write_at)
    return found


def choose(seats: Sequence[Seat]) -> Mapping[MemberId, MemberId]:
    """Whose memory holds a copy of each worker's state. Empty for a world of one."""
    if len(seats) < 2:
        return {}
    ring = _ring(seats)
    count = len(ring)
    largest = max(Counter(map(_domain, seats)).values())
    distances = range(1, count) if count <= FEW else sorted({1, largest, count - largest} - {0, count})
    best = max(distances, key=lambda distance: (_apart(ring, distance), -distance))
    return {seat.member_id: ring[(index + best) % count].member_id for index, seat in enumerate(ring)}


def _apart(ring: Sequence[Seat], distance: int) -> int:
    """How many have their copy in another domain, if all give it that far on. What has no domain is one of its own."""
    return sum(_domain(seat) != _domain(ring[(index + distance) % len(ring)]) for index, seat in enumerate(ring))


def _domain(seat: Seat) -> str:
    return f"in {seat.domain}" if seat.domain is not None else f"of {seat.member_id}"


def _ring(seats: Sequence[Seat]) -> list[Seat]:
    """Domain after domain, the largest first, so that a large enough distance leads out of each of them."""
    groups: dict[str, list[Seat]] = {}
    for seat in sorted(seats, key=lambda seat: seat.rank):
        groups.setdefault(_domain(seat), []).append(seat)
    return [seat for group in sorted(groups.values(), key=len, reverse=True) for seat in group]

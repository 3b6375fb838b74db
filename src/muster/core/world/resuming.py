"""From which step does the next round go on, and who has the state of that step?

A step counts if every rank of the world that committed it is held by somebody who is here. A round that started from
memory and failed before it got on is not repeated: the next one starts from an older step, then from disk.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence

from muster.core.world.run import Run
from muster.types.records import replace
from muster.types.state import EXIT_UNUSABLE, Held, Holding, Resume, Source, Tier
from muster.types.world import MemberId, Seat

Key = tuple[int, int, int]  # step, round, ranks: of all that belongs together
Holders = Mapping[int, Sequence[MemberId]]  # of each rank
GIVERS = 2  # are named for each rank: the second for when the first does not give it
_SHOWN = 8


def complete(holdings: Mapping[MemberId, Holding]) -> dict[Key, dict[int, list[MemberId]]]:
    """Steps that can be had as a whole, newest first, and who has each of their ranks."""
    found: dict[Key, dict[int, list[MemberId]]] = defaultdict(dict)
    for member_id, holding in holdings.items():
        for one in holding.held:
            if one.rank < one.ranks:
                found[_key(one)].setdefault(one.rank, []).append(member_id)
    whole = {key: ranks for key, ranks in found.items() if len(ranks) == key[2]}
    return dict(sorted(whole.items(), reverse=True))


def _key(one: Held) -> Key:
    return one.step, one.round, one.ranks


def living(run: Run) -> Mapping[MemberId, Holding]:
    """All that is held, but for what was given up: a round that went on from an older step, and got on, is what
    counts, whoever comes back later with newer steps of rounds before."""
    current = run.round
    if current is None or not any(key[1] == current.number for key in complete(run.holdings)):
        return run.holdings
    begin = current.resume.step if current.resume is not None else 0

    def counts(one: Held) -> bool:
        return one.round >= current.number or one.step <= begin

    return {
        member_id: holding
        if all(map(counts, holding.held))
        else replace(holding, held=tuple(one for one in holding.held if counts(one)))
        for member_id, holding in run.holdings.items()
    }


def safe(run: Run) -> Key | None:
    """The newest step that no loss of one worker costs; where there is none, the newest that is whole."""
    whole = complete(living(run))
    twice = (key for key, ranks in whole.items() if all(len(set(ids)) > 1 for ids in ranks.values()))
    return next(twice, next(iter(whole), None))


def unusable(run: Run) -> bool:
    """Whether the last round ended because a rank could not use what it was given: nobody's restart is charged.

    Each such round bars its step, and the same step is free only once: so this comes to an end.
    """
    last = run.round
    if last is None or last.resume is None or not last.resume.sources or last.first_failed_rank is None:
        return False
    tried = run.barred is not None and last.resume.step >= run.barred
    return not tried and last.exits[last.first_failed_rank].exit_code == EXIT_UNUSABLE


def barred(run: Run, charged: bool) -> int | None:
    """From this step on nothing in memory is gone back to: rounds that did failed before they got on."""
    last = run.round
    if last is None or last.resume is None:
        return None
    if any(key[0] > last.resume.step and key[1] == last.number for key in complete(run.holdings)):
        return None
    if (charged or unusable(run)) and last.resume.sources:
        return min(last.resume.step, run.barred if run.barred is not None else last.resume.step)
    return run.barred


def choose(holdings: Mapping[MemberId, Holding], seats: Sequence[Seat], bar: int | None = None) -> Resume | None:
    """Where a round with these seats goes on, or None if there is nothing to go on from. `bar`: see `barred`."""
    whole = complete(holdings)
    on_disk = max((one.durable for one in holdings.values() if one.durable is not None), default=None)
    usable = [key for key in whole if on_disk is None or key[0] >= on_disk]
    allowed = [key for key in usable if bar is None or key[0] < bar]
    after = f", because rounds from step {bar} on failed at once" if bar is not None else ""
    if not allowed and on_disk is not None:
        return Resume(on_disk, why=f"from step {on_disk} on disk{after}{_lost(holdings, on_disk)}")
    if not allowed and usable:
        allowed, after = usable[:1], ", again: all that is in memory was tried, and there is none on disk"
    if not allowed:
        return None
    step, number, ranks = allowed[0]
    sources = _sources(whole[allowed[0]], seats, holdings, allowed[0])
    tiers = Counter(source.tier for source in {source.rank: source for source in reversed(sources)}.values())
    where = ", ".join(f"{tiers[tier]} {tier}" for tier in Tier if tiers[tier])
    lost = "" if after else _lost(holdings, step)
    return Resume(step, number, ranks, sources, f"from step {step} in memory ({where}){after}{lost}")


def _sources(
    holders: Holders, seats: Sequence[Seat], holdings: Mapping[MemberId, Holding], key: Key
) -> tuple[Source, ...]:
    """For each rank who has it: the worker that will run it if it does, then others in turn, to share the work."""
    owner: dict[int, MemberId] = {}
    first = 0
    for seat in seats:
        owner |= dict.fromkeys(range(first, first + seat.procs), seat.member_id)
        first += seat.procs
    found = []
    for rank, ids in sorted(holders.items()):
        turn = rank % len(ids)
        order = sorted((*ids[turn:], *ids[:turn]), key=lambda one: one != owner.get(rank))
        for member_id in order[:GIVERS]:
            holding = holdings[member_id]
            tier = Tier.OWN if member_id == owner.get(rank) else _tier(holding, rank, key)
            found.append(Source(rank, member_id, holding.path, tier))
    return tuple(found)


def _tier(holding: Holding, rank: int, key: Key) -> Tier:
    """Whose memory it is in: that of one who has the same anyhow, or of one who keeps it for us."""
    one = next(one for one in holding.held if one.rank == rank and _key(one) == key)
    return Tier.REPLICA if 2 * one.extra < one.bytes else Tier.BUDDY


def _lost(holdings: Mapping[MemberId, Holding], step: int) -> str:
    """What is newer than that, and not whole any more."""
    torn: dict[Key, set[int]] = defaultdict(set)
    for holding in holdings.values():
        for one in holding.held:
            if one.step > step:
                torn[_key(one)].add(one.rank)
    if not torn:
        return ""
    (newest, _, ranks), have = max(torn.items())
    missing = [rank for rank in range(ranks) if rank not in have]
    if not missing:
        return ""
    shown = ", ".join(map(str, missing[:_SHOWN])) + (" and others" if len(missing) > _SHOWN else "")
    return f"; step {newest} is lost with rank {shown}"

"""Who has a voice, and how many voices are enough?

The coordinator is an elector itself, the first of its group. A majority is enough; of an even number also a half with
the first in it, so that a coordinator with one worker elsewhere can do without that one, and never the other way round.
While one group follows another both have to agree: any two that are enough then have somebody in common. A group that
is never enough without its leader agrees as soon as the leader does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable

from muster.types.world import Elector, Electorate, Group, MemberId

Groups = tuple[Group, ...]

MOST = 7  # more are asked more often than they help
MACHINES = 3  # of which one can be lost


def is_enough(groups: Groups, voices: Container[MemberId]) -> bool:
    return all(_is_enough(group, voices) for group in groups)


def _is_enough(group: Group, voices: Container[MemberId]) -> bool:
    count = sum(elector.member_id in voices for elector in group)
    return 2 * count > len(group) or (2 * count == len(group) and group[0].member_id in voices)


def everyone(groups: Groups) -> Group:
    """Each once."""
    return tuple({elector.member_id: elector for group in groups for elector in group}.values())


def can_succeed(run: Electorate) -> bool:
    """Whether the others could find a successor if its leader were lost."""
    return run.leader is not None and can_do_without(run.groups, run.leader)


def can_do_without(groups: Groups, leader: Elector) -> bool:
    return bool(groups) and is_enough(groups, {one.member_id for one in everyone(groups)} - {leader.member_id})


def wanted(first: Elector, host: str, able: Iterable[tuple[Elector, str]], before: Group) -> Group:
    """The leader, on its host, then those who are able: of each machine one before two of any, old ones first.

    From three machines on it is one of each, so that none of them has so many voices that the others cannot do without.
    """
    left = list(able)
    hosts, kept = Counter([host]), {elector.member_id for elector in before}
    chosen = [first]
    while left and len(chosen) < MOST:
        best = min(left, key=lambda one: (hosts[one[1]], one[0].member_id not in kept))
        if hosts[best[1]] and len(hosts) >= MACHINES:
            break
        left = [one for one in left if one is not best]
        hosts[best[1]] += 1
        chosen.append(best[0])
    order = {elector.member_id: index for index, elector in enumerate(before)}
    return (first, *sorted(chosen[1:], key=lambda one: order.get(one.member_id, len(order))))


def missing(groups: Groups, voices: Container[MemberId]) -> str:
    """Return why these voices are not enough. During a change, count only groups that lack voices."""
    lacking = everyone(tuple(group for group in groups if not _is_enough(group, voices)) or groups)
    silent = [elector.name for elector in lacking if elector.member_id not in voices]
    count = len(lacking)
    return f"{count - len(silent)} of {count} electors answer, {', '.join(silent)} not"

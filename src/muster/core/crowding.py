"""Who has to go when too many are there? Those of whom nothing is known, those who want nothing, then the greediest.

And who may ask for more? Whoever leaves room for others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, TypeVar

T = TypeVar("T")


class Present(Protocol):
    """A connection, as far as it matters here."""

    address: str
    token: str  # whose it is; empty: a stranger's
    asking: bool  # a request of its is being answered
    since: float  # when it came, asked, or was answered


P = TypeVar("P", bound=Present)


def who_goes(present: Sequence[P]) -> P:
    """One of those present, who came in this order. Nobody loses an answer while a stranger or an idle one is there."""
    if strangers := [one for one in present if not one.token]:
        return eldest_of_greediest((one, one.address) for one in strangers)
    if idle := [one for one in present if not one.asking]:
        return min(idle, key=lambda one: one.since)
    return eldest_of_greediest((one, one.token) for one in sorted(present, key=lambda one: one.since))


def is_greediest(whose: str, present: Iterable[str]) -> bool:
    """Nobody of those present has more there, and others have something, too."""
    counts = Counter(present)
    return len(counts.keys() - {whose}) > 0 and counts[whose] >= max(counts.values())


def eldest_of_greediest(present: Iterable[tuple[T, str]]) -> T:
    """The first of those who belong to whoever has the most there."""
    listed = list(present)
    counts = Counter(whose for _, whose in listed)
    greediest = max(counts.values())
    return next(one for one, whose in listed if counts[whose] == greediest)


def has_room(open_requests: Mapping[str, int], whose: str, most: int) -> bool:
    """Whether one more request of that token may be answered at the same time as those, of which `most` can be.

    One token has at most a quarter, and all together three quarters: the rest is for admins, who are not counted here.
    When it is full, a token that has less than its part still gets it; whoever has more has to wait.
    """
    own = open_requests.get(whose, 0)
    if own >= max(most // 4, 1):
        return False
    everybodys = most - most // 4
    part = everybodys // len({*open_requests, whose})
    return sum(open_requests.values()) < everybodys or own < max(part, 1)

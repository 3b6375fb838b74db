"""Who has to go when too many are there? Those of whom nothing is known, those who want nothing, then the greediest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
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

"""When were a worker's GPUs somebody else's? Spans, from the marks of a journal: twice, late or in any order.

A mark says that they were lent, or that they were back, at a time; the same time is the same mark. What was lent while
it was lent, or came back without having been lent, changes nothing, unless a mark that comes late makes it matter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta

Span = tuple[datetime, datetime | None]  # without an end it lasts until the worker's
MOST = 512  # spans that are kept of one worker whose entries go


@dataclass
class Marks:
    lent: set[datetime] = field(default_factory=set)
    back: set[datetime] = field(default_factory=set)

    def add(self, told: Iterable[Span]) -> None:
        """What was made of older marks."""
        for start, end in told:
            self.lent.add(start)
            if end is not None:
                self.back.add(end)


def spans(marks: Marks) -> list[Span]:
    """Apart, and in order. Lent and back at the same time was lent for no time."""
    found: list[Span] = []
    since: datetime | None = None
    for at, is_back in sorted([(at, False) for at in marks.lent] + [(at, True) for at in marks.back]):
        if not is_back:
            since = at if since is None else since
        elif since is not None:
            found.append((since, at))
            since = None
    return found if since is None else [*found, (since, None)]


def kept(marks: Marks) -> tuple[Span, ...]:
    """All that the marks tell, as spans. Of very many the oldest become one of the same length."""
    found = spans(marks)
    starts, ends = {start for start, _ in found}, {end for _, end in found}
    # Marks that change nothing yet. To have been lent for no time and back tells no more than that it was back.
    idle: list[Span] = [(at, None) for at in marks.lent - starts] + [(at, at) for at in marks.back - ends]
    if len(found) + len(idle) <= MOST:
        return (*found, *sorted(idle, key=lambda span: span[0]))
    if len(found) <= MOST:
        return tuple(found)
    old = [(start, end) for start, end in found[: 1 - MOST] if end is not None]
    length = sum((end - start for start, end in old), timedelta())
    return ((old[-1][1] - length, old[-1][1]), *found[1 - MOST :])


def within(found: Sequence[Span], since: datetime, until: datetime | None) -> tuple[Span, ...]:
    """Those of a worker that was there from `since` to `until`."""
    cut = [
        (max(start, since), until if end is None else (end if until is None else min(end, until)))
        for start, end in found
    ]
    return tuple((start, end) for start, end in cut if end is None or start < end)


def seconds(found: Iterable[Span], begin: datetime, end: datetime) -> float:
    """How much of the time between these two they take."""
    parts = ((min(end, end if until is None else until) - max(begin, start)) for start, until in found)
    return sum(max(0.0, part.total_seconds()) for part in parts)

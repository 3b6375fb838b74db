"""In which order are lines of several streams shown? That of time; what was written at one time, in order of streams.

Lines of one stream keep their order, whatever their times are.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from typing import Protocol


class Source(Protocol):
    def due(self) -> int | None:
        """When what comes next was written, never earlier than what came before; None if nothing comes."""

    def take(self) -> bytes:
        """What was written then: whole lines, or nothing if it turns out to have been written later."""


def in_order(sources: Sequence[Source], until: int | None = None) -> Iterator[bytes]:
    """What all of them have; or only what was written until then."""
    heap = [(due, at) for at, source in enumerate(sources) if (due := source.due()) is not None]
    heapq.heapify(heap)
    while heap and (until is None or heap[0][0] <= until):
        at = heap[0][1]
        yield sources[at].take()
        due = sources[at].due()
        if due is None:
            heapq.heappop(heap)
        else:
            heapq.heapreplace(heap, (due, at))

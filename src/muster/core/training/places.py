"""Which of its training's places is whose, where places have no name?

In a cluster the platform gives each worker its devices. A pool then counts GPUs: its numbers say who has how many, and
any worker of a training may have any of its places. A worker keeps the one that it was given.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping


def assigned(
    known: Mapping[str, int],
    workers: Iterable[str],
    held: Collection[int],
    leaving: Collection[int],
    lent: Collection[str],
) -> dict[str, int]:
    """Worker → mask. `held` and `leaving` are the training's masks, `lent` those workers that are on their way out.

    Somebody for whom there is no place has none in the answer.
    """
    names = list(workers)
    there = {*held, *leaving}
    found = {name: known[name] for name in names if known.get(name) in there}
    free = there.difference(found.values())
    for name in names:
        if name in found or not free:
            continue
        first = leaving if name in lent else held
        mask = min(free.intersection(first) or free)
        found[name] = mask
        free.discard(mask)
    return found

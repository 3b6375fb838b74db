"""Can there be output of that rank, of that round? A question for what was never there gets an answer that says so."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from muster.types.training import Training


def why_none(training: Training, rank: int | None, round: int | None) -> str | None:
    """Why nothing was found of that rank in that round; None: it is there and has written nothing."""
    newest = training.status.round
    if round is not None and (newest is None or round > newest):
        told = "no round has begun" if newest is None else f"the newest is {newest}"
        return f"training {training.metadata.name!r} has no round {round}: {told}"
    ranks = known_ranks(training)
    if rank is None or rank in ranks:
        return None
    told = f"its last round has {shown(ranks)}" if ranks else "no rank has started"
    return f"training {training.metadata.name!r} has no output of rank {rank}: {told}"


def why_never(training: Training, rank: int | None) -> str | None:
    """Why nothing will ever come of that rank, however long somebody waits."""
    most = training.spec.world_size.max * training.spec.procs_per_worker
    if rank is None or rank < most or rank in known_ranks(training):
        return None
    return f"training {training.metadata.name!r} can have {_named([(0, most - 1)])}, and never rank {rank}"


def known_ranks(training: Training) -> frozenset[int]:
    status = training.status
    return frozenset(one.rank for one in status.ranks) | {one.rank for one in status.rank_exits or ()}


def shown(ranks: Iterable[int]) -> str:
    """`rank 0`, `ranks 0 to 3`, `ranks 0, 2, 5 to 7`."""
    every = sorted(set(ranks))
    begins = [every[0], *(after for before, after in pairwise(every) if after != before + 1)]
    ends = [*(before for before, after in pairwise(every) if after != before + 1), every[-1]]
    return _named(list(zip(begins, ends, strict=True)))


def _named(runs: Sequence[tuple[int, int]]) -> str:
    """First and last of each; how many are between them does not matter."""
    words = [str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a} to {b}" for a, b in runs]
    many = len(runs) > 1 or runs[0][0] != runs[0][1]
    return f"rank{'s' if many else ''} {', '.join(words)}"

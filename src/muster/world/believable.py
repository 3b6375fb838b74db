"""Of what members say of themselves, how much can be true?"""

from __future__ import annotations

from dataclasses import replace

from muster.types.frames import MAX_TEXT
from muster.types.state import MOST_HELD, Holding
from muster.types.world import Path

MAX_PATHS = 4
MOST_BYTES = 1 << 50  # of one worker
LEAST_S, MOST_S = 1e-9, 1e6  # for a step or a copy; what is beyond was not measured
MOST_EVERY = 1 << 20  # steps between two copies


def usable(paths: tuple[Path, ...]) -> tuple[Path, ...]:
    """Where a member can be probed; what is no host and port was not said."""
    return tuple((host, port) for host, port in paths[:MAX_PATHS] if 0 < len(host) <= MAX_TEXT and 0 < port < 65536)


def believable(holding: Holding) -> Holding:
    """Of what a worker says of its memory, as much as one can have."""
    path = usable((holding.path,)) if holding.path is not None else ()
    return replace(
        holding,
        held=tuple(one for one in holding.held[:MOST_HELD] if one.rank < one.ranks),
        path=path[0] if path else None,
        durable=holding.durable if holding.durable is None or holding.durable >= 0 else None,
        every=min(max(holding.every, 1), MOST_EVERY),
        stride=min(max(holding.stride, 1), MOST_EVERY),
        refused=holding.refused[:MAX_TEXT],
        damage=holding.damage[:MAX_TEXT],
        commit_s=_duration(holding.commit_s),
        step_s=_duration(holding.step_s),
        taken=min(max(holding.taken, 0), MOST_BYTES),
        limit=min(max(holding.limit, 0), MOST_BYTES),
    )


def _duration(seconds: float) -> float:
    return seconds if LEAST_S <= seconds <= MOST_S else 0.0

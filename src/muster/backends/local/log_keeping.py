"""Who keeps logs small whose workers are gone? A look every few seconds.

Agents do it for their own ranks, more often. What is kept of each rank is the newest of all its rounds, on whichever
workers they were.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from pathlib import Path

from muster.backends.local import log_files
from muster.types.training import Uid

log = logging.getLogger("muster.local")

LOOK_S, RESTS = 10.0, 20  # how often they are looked at, and how much longer than a look the pause is


async def keep_small(
    home: Path, known: Iterable[Uid], growing: Callable[[], set[Uid]], limit: Callable[[Uid], int]
) -> None:
    """For ever, or until that turns out to be impossible here; `limit` is 0 where everything is kept."""
    loop, grew = asyncio.get_running_loop(), set(known)
    while True:
        began, grow = loop.time(), growing()
        for uid in grew | grow:  # what has just ended once more
            try:
                if keep := limit(uid):
                    await asyncio.to_thread(log_files.cut, home / "logs" / uid, keep)
            except OSError as error:
                log.warning("logs under %s cannot be kept small: %s", home, error.strerror)
                return
        grew = grow
        await asyncio.sleep(max(LOOK_S, (loop.time() - began) * RESTS))

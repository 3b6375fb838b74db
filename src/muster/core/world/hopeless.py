"""Can this program work at all, or would every restart end as the last two rounds did?

A file that does not compile, a module that is not there and a command line that is not understood stay so. Where a
round ends with that before its first step, as the round before did and with the same line, another is of no use. One
worker alone may lack what the others have: while a spare can take its place, that is tried first.
"""

from __future__ import annotations

import re

from muster.core.world import last_words, sizes
from muster.core.world.run import Run
from muster.types.world import RankEnd, Role, Round

_CANNOT = re.compile(r"(SyntaxError|IndentationError|TabError|ImportError|ModuleNotFoundError)(:|$)")
_USAGE = 2  # what argparse, click and most shells' commands answer to words that they do not understand
_NOT_RUN = (126, 127)  # what a shell, and a worker, answers when there is no such program


def line_of(run: Run, closed: Round, first: RankEnd | None) -> str:
    """What the first rank to fail said, if no restart would change it; empty if one might."""
    if first is None or first.hung or first.signal is not None:
        return ""
    if closed.progress or run.best_step is not None or sizes.works(run, closed):
        return ""
    words = last_words.of(first)
    if not _CANNOT.match(words) and first.exit_code not in (_USAGE, *_NOT_RUN):
        return ""
    return words


def again(run: Run, closed: Round, first: RankEnd | None) -> bool:
    """Whether it did so before, and nobody else could be asked."""
    line = line_of(run, closed, first)
    if not line or line != run.hopeless or first is None:
        return False
    spares = any(member.role is Role.SPARE and member.name not in run.lent for member in run.members.values())
    return not (spares and first.worker == run.blamed)

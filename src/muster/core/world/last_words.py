"""What does a failed rank's own output say is wrong, on one line?

Of a Python program that is the line that ends its last traceback, also where libraries print more after it, and where
torch writes the rank in front. Of any other it is the last line with a word in it. A rank writes what it likes: the
line is bounded, and nothing in it is believed to be more than text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from muster.types.world import RankEnd

LONGEST = 300
_RANK = re.compile(r"\[rank\d+\]: ?")  # torch's hook for exceptions writes it in front of every line
_FRAME = re.compile(r'\s+File "')
_UNREADABLE = re.compile(r"(?:Syntax|Indentation|Tab)Error\b")  # of which the traceback alone says where
_PLACE = re.compile(r'\s+File "(?:[^"]*[/\\])?([^"/\\]+)", line (\d+)$')


def line(lines: Sequence[str]) -> str:
    """The line that says it; empty if there is none."""
    told = [_RANK.sub("", one, count=1) if one.startswith("[rank") else one for one in lines]
    frames = [place for place, one in enumerate(told) if _FRAME.match(one)]
    after = told[frames[-1] :] if frames else []
    ended = next((one for one in after if one.strip() and not one[0].isspace()), "")
    last = ended or next((one for one in reversed(told) if any(map(str.isalnum, one))), "")
    if _UNREADABLE.match(ended) and (place := _PLACE.match(after[0])):
        last = f"{ended[: LONGEST // 2]} ({place[1]}, line {place[2]})"
    return " ".join(last.split())[:LONGEST]


def of(end: RankEnd) -> str:
    return line(end.stderr_tail)


def told(end: RankEnd, when: str = "") -> str:
    """How a rank ended: what it said of it first, if it ended by itself; `when` stands beside the bare reason.

    One that was killed did not know of it: its last line may have nothing to do with that.
    """
    words = "" if end.hung else of(end)
    where = f" at {end.stack}" if end.stack else ""
    known = f"; {end.memory}" if end.memory else ""
    bare = f"{end.reason}{where}{when}{known}"
    if not words:
        return bare
    return f"{bare}; its last line: {words}" if end.signal else f"{words} ({bare})"

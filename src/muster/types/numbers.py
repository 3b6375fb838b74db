"""Which numbers of a training are kept? Users' processes log them, so their names and their count are bounded."""

from __future__ import annotations

MAX_NAMES = 64
LONGEST = 64  # characters of a name
MAX_POINTS = 512  # in one message
LARGEST = 1 << 53  # of steps and counts: what JSON carries exactly
DERIVED = ("step", "steps_per_second", "world_size")  # curves of every training, which nobody has to log


def is_name(text: str) -> bool:
    """Whether numbers of that name are kept. What can be printed has no half of a character in it."""
    return 0 < len(text) <= LONGEST and text.isprintable() and text not in DERIVED

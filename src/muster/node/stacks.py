"""Reads the stacks that faulthandler left in a rank's log: where did it stand, and was it waiting for others?"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_FRAME = re.compile(r'\s*File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)')
_TORCH = re.compile(r"[/\\]torch[/\\]")


@dataclass(frozen=True)
class Stand:
    frame: str = ""
    waiting: bool = False


def read(lines: Iterable[str]) -> Stand:
    """Innermost frame of the thread that took the signal (the main one), and whether it lies inside torch."""
    current = False
    frames: list[re.Match[str]] = []
    for line in lines:
        if line.startswith(("Current thread", "Thread 0x")):
            if line.startswith("Current thread"):
                frames = []
            current = line.startswith("Current thread")
        elif current and (match := _FRAME.match(line)):
            frames.append(match)
    if not frames:
        return Stand()
    waiting = bool(_TORCH.search(frames[0]["file"]))
    told = next((frame for frame in frames if not _TORCH.search(frame["file"])), frames[0])
    return Stand(f"{told['file']}:{told['line']} in {told['function']}", waiting)

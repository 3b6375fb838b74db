"""Reads the stacks that faulthandler left in a rank's log: where did it stand, and was it waiting for others?"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_FRAME = re.compile(r'\s*File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)')
_HEAD = re.compile(r"Thread 0x|(?P<current>Current thread 0x|Stack \(most recent)")
_TORCH = re.compile(r"[/\\]torch[/\\](?:_|autograd|cuda|distributed|nn|utils)")  # not any folder of that name


@dataclass(frozen=True)
class Stand:
    frame: str = ""
    waiting: bool = False


def read(lines: Iterable[str]) -> Stand:
    """Innermost frame of the thread that took the signal (the main one), and whether it lies inside torch."""
    current = False
    frames: list[re.Match[str]] = []
    for line in lines:
        if head := _HEAD.match(line):
            current = head["current"] is not None
            frames = [] if current else frames
        elif current and (match := _FRAME.match(line)):
            frames.append(match)
    if not frames:
        return Stand()
    waiting = bool(_TORCH.search(frames[0]["file"]))
    told = next((frame for frame in frames if not _TORCH.search(frame["file"])), frames[0])
    return Stand(f"{told['file']}:{told['line']} in {told['function']}", waiting)

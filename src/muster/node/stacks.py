"""Reads the stacks that faulthandler left in a rank's log: where did it stand, and was it waiting for others?

And what did the program itself say before it crashed?
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_FRAME = re.compile(r'\s*File "(?P<file>.+)", line (?P<line>\d+) in (?P<function>.+)')
_HEAD = re.compile(r"Thread 0x|(?P<current>Current thread 0x|Stack \(most recent)")
_DUMP = re.compile(r"Fatal Python error: ")
# What faulthandler names is the signal, which is known; the interpreter's own fatal errors say more.
_CRASH = re.compile(r"Fatal Python error: (Segmentation fault|Aborted|Bus error|Illegal instruction|Floating)")
_OF_DUMP = re.compile(
    r"\s*$|  File \"|  Binary file \"|  \.\.\.|  <|Extension modules: |Python runtime state: |<Cannot show all threads"
    r"|(Current t|T)hread(?:'s C stack trace| 0x)|Stack \(most recent"
)
_TORCH = re.compile(r"[/\\]torch[/\\](?:_|autograd|cuda|distributed|nn|utils)")  # not any folder of that name


@dataclass(frozen=True)
class Stand:
    frame: str = ""
    waiting: bool = False


def words(lines: Iterable[str]) -> list[str]:
    """The lines without what faulthandler wrote when the program crashed."""
    kept: list[str] = []
    dumping = False
    for line in lines:
        if _DUMP.match(line):
            dumping = True
            kept += [] if _CRASH.match(line) else [line]
        elif not dumping or not _OF_DUMP.match(line):
            dumping = False
            kept.append(line)
    return kept


def read(lines: Iterable[str]) -> Stand:
    """Innermost frame of the main thread, and whether it lies inside torch.

    That is the thread which took the signal; if that was none of Python's, it is the one listed last.
    """
    frames: list[re.Match[str]] = []
    reading = settled = False
    for line in lines:
        if _DUMP.match(line):
            frames, settled = [], False
        elif head := _HEAD.match(line):
            current = head["current"] is not None
            reading = current or not settled
            settled = settled or current
            frames = [] if reading else frames
        elif reading and (match := _FRAME.match(line)):
            frames.append(match)
    if not frames:
        return Stand()
    waiting = bool(_TORCH.search(frames[0]["file"]))
    told = next((frame for frame in frames if not _TORCH.search(frame["file"])), frames[0])
    return Stand(f"{told['file']}:{told['line']} in {told['function']}", waiting)

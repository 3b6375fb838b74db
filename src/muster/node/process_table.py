"""What does the kernel say of a process: who has started it, what has it done so far, whom has it started?

Whatever is asked for may have ended meanwhile: then there is no answer.
"""

from __future__ import annotations

import os
from typing import NamedTuple

TICKS = os.sysconf("SC_CLK_TCK")  # of a core, in a second


class Process(NamedTuple):
    parent: int
    began: int  # since the machine's boot: whoever has that pid later is another one
    ticks: int  # of a core, so far


def everybody(proc: str = "/proc") -> dict[int, Process]:
    found = {}
    try:
        pids = [entry for entry in os.listdir(proc) if entry.isdigit()]
    except OSError:
        return {}
    for entry in pids:
        if (process := find(int(entry), proc)) is not None:
            found[int(entry)] = process
    return found


def find(pid: int, proc: str = "/proc") -> Process | None:
    try:
        with open(f"{proc}/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        return Process(int(fields[1]), int(fields[19]), int(fields[11]) + int(fields[12]))
    except (OSError, ValueError, IndexError):
        return None


def started_by(pid: int, proc: str = "/proc") -> list[int] | None:
    """Children of its first thread; None where the kernel does not say."""
    try:
        with open(f"{proc}/{pid}/task/{pid}/children", "rb") as file:
            return [int(child) for child in file.read().split()]
    except (OSError, ValueError):
        return None


def command(pid: int, proc: str = "/proc") -> list[bytes]:
    """What it was started with, word by word."""
    try:
        with open(f"{proc}/{pid}/cmdline", "rb") as file:
            return file.read(1 << 16).rstrip(b"\0").split(b"\0")
    except OSError:
        return []

"""The processes of a worker on this machine, and their end by SIGKILL.

A rank's note names its process. Ranks write these notes themselves, so a process counts only if it descends from the
worker's own agent and began when the note says.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections import defaultdict
from pathlib import Path

from muster import files
from muster.backends.local import processes

_NOTES = "MUSTER_WHEREABOUTS"  # names the folder of the notes; see node.whereabouts
_NOTE_BYTES = 1 << 17


def kill(agent: int, rank: int | None) -> int:
    """Send SIGKILL to the process of a rank, or to all processes of the worker at once; return how many there were."""
    tree = _tree(agent)
    chosen = tree if rank is None else [pid for pid in tree if pid == _process_of(rank, tree)]
    handles = []
    for pid in chosen:
        with contextlib.suppress(ProcessLookupError):
            handles.append(processes.ProcessHandle(pid, None))
    for handle in handles:
        handle.signal(signal.SIGKILL)
        handle.close()
    return len(handles)


def _tree(agent: int) -> list[int]:
    """Return an agent and all processes below it."""
    children = defaultdict(list)
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = Path("/proc", name, "stat").read_bytes().rpartition(b")")[2].split()
                children[int(fields[1])].append(int(name))
    tree = [agent]
    for pid in tree:
        tree += children[pid]
    return tree


def _process_of(rank: int, tree: list[int]) -> int | None:
    """Return the process of a rank in the latest round that the notes know."""
    latest: tuple[int, int] | None = None
    for folder in {folder for pid in tree if (folder := processes.environment(pid).get(_NOTES))}:
        for path in Path(folder).glob(f"whereabouts-*-{rank}"):
            with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
                note = json.loads(files.read_private(path, _NOTE_BYTES))
                pid, number = int(note["pid"]), int(path.name.split("-")[1])
                is_alive = pid in tree and note["started"] == processes.start_ticks(pid)
                if is_alive and (latest is None or number > latest[0]):
                    latest = (number, pid)
    return None if latest is None else latest[1]

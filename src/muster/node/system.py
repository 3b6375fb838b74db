"""The few Linux calls that the standard library lacks: who dies with whom, who inherits orphans, who is whose child."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int) -> None:
    """Be killed when `parent` dies, also if it is dead already."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def adopt_orphans() -> None:
    """Descendants whose parent dies become children of this process, so that none can slip away."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children() -> list[int]:
    """Direct children of this process, zombies not counted."""
    me = os.getpid()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == me and state != b"Z":
            found.append(int(entry))
    return found


def reap() -> list[tuple[int, int]]:
    """Everything that has ended, as (pid, status); a negative status is a signal."""
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append((pid, os.waitstatus_to_exitcode(status)))


def kill_children(spare: set[int]) -> bool:
    """Kill direct children but `spare`; True when there are none left. Their orphans are next, so ask again."""
    reap()
    targets = [pid for pid in children() if pid not in spare]
    for pid in targets:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return not targets


def show_as(argv: list[str]) -> None:
    """Make `ps` show this command line, as far as the room given at start allows."""
    try:
        with open("/proc/self/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        start, end = int(fields[45]), int(fields[46])
    except (OSError, ValueError, IndexError):
        return
    room = end - start
    if sys.platform != "linux" or room <= 1:
        return
    text = b"\0".join(os.fsencode(part) for part in argv)[: room - 1]
    ctypes.memmove(start, text + b"\0" * (room - len(text)), room)

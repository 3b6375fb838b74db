"""The few Linux calls that the standard library lacks: who dies with whom, who inherits orphans, who is whose child."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import signal
import struct
import sys
import threading
from collections.abc import Collection, Iterator

_PR_SET_PDEATHSIG = 1
_PR_SET_MM = 35
_PR_SET_MM_MAP = 14
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)

# Batch systems send these to every process of a job at once. They are meant for the agent and for ranks.
ASK_TO_END = frozenset({signal.SIGTERM, signal.SIGINT})


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Get that signal when `parent` dies, also if it is dead already."""
    _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


@contextlib.contextmanager
def deaf_children() -> Iterator[None]:
    """What is started meanwhile hears no signal that asks it to end, from its first moment until it unblocks them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ASK_TO_END)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def signal_main_thread(pid: int, number: int) -> None:
    """A signal that no other thread of that process may take."""
    if _libc.tgkill(pid, pid, number) != 0:
        raise OSError(ctypes.get_errno(), "tgkill")


def map_shared(path: str, size: int) -> memoryview:
    """A file's memory, shared with whoever reads it. Unlike `mmap` this keeps no descriptor open."""
    opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        _libc.mmap.restype = ctypes.c_void_p
        flags = mmap.PROT_READ | mmap.PROT_WRITE
        start = _libc.mmap(None, ctypes.c_size_t(size), flags, mmap.MAP_SHARED, opened, ctypes.c_long(0))
    finally:
        os.close(opened)
    if start in (None, ctypes.c_void_p(-1).value):
        raise OSError(ctypes.get_errno(), "mmap")
    return memoryview((ctypes.c_char * size).from_address(start)).cast("B")


def adopt_orphans() -> None:
    """Descendants whose parent dies become children of this process, so that none can slip away."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


@contextlib.contextmanager
def orphans_go_to_init() -> Iterator[None]:
    """Undo `adopt_orphans` for a moment, so that a process which is to outlive us is not ended as one of ours."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
    try:
        yield
    finally:
        adopt_orphans()


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


def runs(pid: int) -> bool:
    """Neither gone nor stopped."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] not in (b"T", b"t", b"Z", b"X")
    except OSError:
        return False


def started(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if there is none, or only what is left of it."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, *known = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if state in (b"Z", b"X") else int(known[18])


def reap() -> tuple[list[tuple[int, int]], bool]:
    """Children that have ended, as (pid, status), a negative status being a signal; and whether any are left."""
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended, False
        if pid == 0:
            return ended, True
        ended.append((pid, os.waitstatus_to_exitcode(status)))


def kill_children(spare: Collection[int] = ()) -> bool:
    """Kill direct children but `spare`; True when there are none. Their orphans are next, so ask again."""
    targets = [pid for pid in children() if pid not in spare]
    for pid in targets:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return not targets


@functools.cache
def may_raise_priority() -> bool:
    """Whether what was made nicer can be taken back, tried out in a thread that ends right after."""
    allowed = []

    def try_out() -> None:
        me = threading.get_native_id()
        before = os.getpriority(os.PRIO_PROCESS, me)
        try:
            os.setpriority(os.PRIO_PROCESS, me, before + 1)
            os.setpriority(os.PRIO_PROCESS, me, before)
            allowed.append(True)
        except OSError:
            return

    thread = threading.Thread(target=try_out)
    thread.start()
    thread.join()
    return bool(allowed)


def flush() -> None:
    """Empty all output buffers, those of C libraries too, so that no fork prints what its parent left in them."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    _libc.fflush(None)


def show_as(argv: list[str]) -> None:
    """Make `ps` show this command line, as far as the room given at start allows."""
    try:
        with open("/proc/self/stat", "rb") as file:
            known = file.read().rpartition(b")")[2].split()[1:]
        fields = [0, 0, 0, 0, *map(int, known)]  # numbered as in proc(5)
        start, end = fields[48], fields[49]
    except (OSError, ValueError, IndexError):
        return
    room = end - start
    if sys.platform != "linux" or room <= 1:
        return
    text = b"".join(os.fsencode(part) + b"\0" for part in argv)
    text = text if len(text) <= room else text[: room - 1] + b"\0"
    ctypes.memmove(start, text + b"\0" * (room - len(text)), room)
    # Let the kernel know where it ends now; where that is not allowed, empty arguments follow.
    _libc.sbrk.restype = ctypes.c_void_p
    layout = struct.pack(
        "=12QIi",
        *(fields[26], fields[27], fields[45], fields[46], fields[47]),
        *(_libc.sbrk(0), fields[28], start, start + len(text), fields[50], fields[51]),
        *(0, 0, -1),  # no auxiliary vector, no other executable
    )
    _libc.prctl(_PR_SET_MM, _PR_SET_MM_MAP, layout, len(layout), 0)


def go_first(score: str = "1000") -> str:
    """Where memory runs short this process is killed before others; returns the score that it had."""
    try:
        with open("/proc/self/oom_score_adj", "r+") as file:
            before = file.read().strip()
            file.seek(0)
            file.write(score)
            return before
    except OSError:
        return ""


def oom_kills(groups_file: str = "/proc/self/cgroup", tree: str = "/sys/fs/cgroup") -> int:
    """How often the kernel has killed something in our memory group for want of memory; 0 where it cannot be told."""
    try:
        with open(groups_file) as file:
            groups = [line.strip().split(":", 2) for line in file]
    except OSError:
        return 0
    paths = {kinds: path for _, kinds, path in groups}
    if "memory" in paths:
        tree, own, name = f"{tree}/memory", paths["memory"], "memory.oom_control"
    else:
        own, name = paths.get("", ""), "memory.events"
    # A container sees the tree from its own group on, whatever that is called outside.
    return _counted(f"{tree}{own}/{name}" if os.path.isdir(f"{tree}{own}") else f"{tree}/{name}")


def _counted(path: str) -> int:
    try:
        with open(path) as file:
            return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), 0)
    except (OSError, ValueError):
        return 0

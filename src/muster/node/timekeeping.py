"""When do ranks write? A thread notes it beside their files, for whoever reads them in order of time.

Ranks know nothing of it. A file that grows wakes the thread once, and then not for a while, however much is written;
while nothing is printed, nothing is done. The time is that of the last write, as the kernel has it. It is not the
thread that copies output: a terminal that takes nothing must not hold up the time.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import select
import struct
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

from muster import files, log_times, trimming
from muster.log_times import Mark

APART_S = 0.025  # between two marks of a file
POLL_S = 0.1  # where inotify is not to be had, or has no room for another file

_libc = ctypes.CDLL(None, use_errno=True)
_IN_MODIFY, _IN_Q_OVERFLOW, _IN_ONESHOT = 0x2, 0x4000, 0x80000000
_EVENT = struct.Struct("iIII")


@dataclass(eq=False)
class _Kept:
    path: str
    since_ns: int = field(default_factory=time.time_ns)
    last: Mark = log_times.NONE
    due: bool = True  # it may have grown
    leaving: bool = False


class Timekeeper:
    def __init__(self, *, enabled: bool = True) -> None:
        self._enabled = enabled
        self._files: dict[str, _Kept] = {}
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stop = False

    def follow(self, path: str) -> None:
        if self._enabled:
            with self._lock:
                self._files[path] = _Kept(path)
            self._wake()

    def let_go(self, path: str) -> None:
        """Nobody writes it any more: note its end, then forget it."""
        with self._lock:
            if (kept := self._files.get(path)) is not None:
                kept.leaving = True
        if kept is not None:
            self._wake()

    def finish(self, timeout_s: float) -> None:
        """Note where all files end, if the disk takes it by then."""
        if self._thread is not None:
            self._stop = True
            self._wake()
            self._thread.join(timeout_s)

    def _wake(self) -> None:
        if self._thread is None:
            self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            self._thread = threading.Thread(target=self._run, name="times", daemon=True)
            self._thread.start()
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_w, b".")

    # On the thread

    def _run(self) -> None:
        growth, woken = _Growth(), select.poll()
        woken.register(self._wake_r, select.POLLIN)
        looked = -math.inf
        while True:
            stopping = self._stop
            with self._lock:
                kept = list(self._files.values())
            leaving = [one for one in kept if one.leaving]  # before they are looked at for the last time
            due = [one for one in kept if one.due or one in leaving or stopping]
            for one in due:
                one.due = not growth.watch(one)  # before it is looked at: what is written after that is told
                _look(one)
            self._forget(leaving, growth)
            if stopping:
                return
            looked = time.monotonic() if due else looked
            growth.wait(self._wake_r, polls=any(one.due for one in kept))
            woken.poll(max(0.0, looked + APART_S - time.monotonic()) * 1000)
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_r, 65536)
            growth.drain(kept)

    def _forget(self, gone: list[_Kept], growth: _Growth) -> None:
        for one in gone:
            growth.forget(one)
            with self._lock:
                if self._files.get(one.path) is one:
                    del self._files[one.path]


def _look(kept: _Kept) -> None:
    """What cannot be noted now is noted with what comes next."""
    with contextlib.suppress(OSError), files.reading(kept.path) as opened:
        found, now = os.fstat(opened), time.time_ns()
        if found.st_size == kept.last.size and kept.last.time_ns:
            return
        # A rank can set the time of its file, too. The first mark says that times are noted from here on; where this
        # thread comes late to it, on a busy machine, it is of the last write all the same.
        earliest = kept.last.time_ns or kept.since_ns
        mark = Mark(max(earliest, min(found.st_mtime_ns, now)), found.st_size)
        log_times.note(kept.path, mark, trimming.begin(opened))
        kept.last = mark


class _Growth:
    """Tells once that a file has grown. Whoever writes pays for the first write only, until it is watched again."""

    def __init__(self) -> None:
        self._fd: int = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self._watched: dict[int, _Kept] = {}

    def watch(self, kept: _Kept) -> bool:
        """False if it has to be looked at again and again."""
        if self._fd < 0:
            return False
        number: int = _libc.inotify_add_watch(self._fd, os.fsencode(kept.path), _IN_MODIFY | _IN_ONESHOT)
        if number >= 0:
            self._watched[number] = kept
        return number >= 0

    def forget(self, kept: _Kept) -> None:
        for number in [number for number, one in self._watched.items() if one is kept]:
            _libc.inotify_rm_watch(self._fd, number)
            del self._watched[number]

    def wait(self, wake: int, *, polls: bool) -> None:
        poll = select.poll()
        for fd in (wake, self._fd):
            if fd >= 0:
                poll.register(fd, select.POLLIN)
        poll.poll(POLL_S * 1000 if polls else None)

    def drain(self, kept: Iterable[_Kept]) -> None:
        """Files that were told of are due."""
        if self._fd < 0:
            return
        try:
            data = os.read(self._fd, 65536)
        except BlockingIOError:
            return
        for number, mask, _, _ in _EVENT.iter_unpack(data[: len(data) // _EVENT.size * _EVENT.size]):
            if mask & _IN_Q_OVERFLOW:
                for one in kept:
                    one.due = True
            elif (told := self._watched.pop(number, None)) is not None:
                told.due = True

"""Rank output: files that ranks write themselves, and a tagged copy on the terminal.

Ranks never wait for the agent or the terminal: they write to files, and a thread of the agent follows those files
with inotify. What a rank wrote is on disk even if the agent is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import itertools
import os
import select
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from muster import files, trimming

_libc = ctypes.CDLL(None, use_errno=True)
_IN_MODIFY = 0x2
_POLL_S = 0.1  # where inotify is not to be had
_GATHER_S = 0.1  # the agent's own lines may wait that long: they come when it is busiest
_CHUNK = 1 << 18
_PATIENCE = 64  # chunks of rank output that go before a line of the agent
_TAIL_BYTES = 8192
_TRACEBACK_BYTES = 1 << 16
_WHOLE_BYTES = 1 << 22
TAIL_LINES = 20
LOOK_S, LOOKS = 1.0, 30  # how often what running ranks print is kept small, and that of rounds before


@dataclass
class _Followed:
    path: str
    tag: bytes
    sink: int
    offset: int
    rest: bytes = b""
    closing: bool = False
    fresh: bool = True  # nothing was copied yet: what the agent said before comes before it


@dataclass
class Echo:
    """Copies growing files to standard output and error, each line with its rank in front."""

    enabled: bool = True
    _files: dict[str, _Followed] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _thread: threading.Thread | None = None
    _stop: bool = False
    _due: bool = False
    _notes: deque[bytes] = field(default_factory=lambda: deque(maxlen=1000))
    _written: int = 0
    _last_words: bytes = b""
    _dead: set[int] = field(default_factory=set)

    def say(self, text: str) -> None:
        """A line of the agent itself. Written by the thread too: a terminal that blocks must not stop the agent."""
        self._notes.append(f"{text}\n".encode(errors="replace"))
        self._wake_soon()

    def follow(self, path: str, tag: str, *, error: bool) -> None:
        if not self.enabled:
            return
        sink = 2 if error else 1
        with self._lock:
            self._files[path] = _Followed(path, tag.encode(), sink, size(path))
        self._wake_soon()

    def let_go(self, path: str) -> None:
        """The rank has ended: copy what is left, then forget the file."""
        with self._lock:
            if path in self._files:
                self._files[path].closing = True
        self._wake_soon()

    def finish(self, last_words: str, timeout_s: float) -> None:
        """Copy what is left and end with `last_words`; give up when the terminal takes nothing for that long."""
        self._last_words = f"{last_words}\n".encode(errors="replace") if last_words else b""
        self._stop = True
        self._wake()
        assert self._thread is not None
        written = -1
        while self._thread.is_alive() and written != self._written:
            written = self._written
            self._thread.join(timeout_s)

    def _wake_soon(self) -> None:
        """News that come together wake the thread once, and not while the agent has more urgent things to do."""
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_later(_GATHER_S, self._wake)

    def _wake(self) -> None:
        self._due = False
        if self._thread is None:
            self._wake_r, self._wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
            self._thread = threading.Thread(target=self._run, name="echo", daemon=True)
            self._thread.start()
        with contextlib.suppress(BlockingIOError):
            os.write(self._wake_w, b".")

    def _run(self) -> None:
        watch = _Inotify()
        poll = select.poll()
        poll.register(self._wake_r, select.POLLIN)
        if watch.fd >= 0:
            poll.register(watch.fd, select.POLLIN)
        busy = 0
        while True:
            stopping = self._stop
            with self._lock:
                files = list(self._files.values())
            for followed in files:
                watch.add(followed.path)
            if any(followed.fresh for followed in files):
                self._write_notes()
            moved = [self._copy(followed) for followed in files]
            busy = busy + 1 if any(moved) else 0
            if busy % _PATIENCE:
                continue
            self._write_notes()
            if busy:
                continue
            for followed in files:
                if followed.closing:
                    self._forget(followed)
            if stopping:
                for followed in files:
                    self._forget(followed)
                self._write_notes()
                self._write(2, self._last_words)
                return
            poll.poll(None if watch.complete else _POLL_S * 1000)
            _drain(self._wake_r)
            watch.drain()

    def _write_notes(self) -> None:
        while self._notes:
            self._write(2, self._notes.popleft())

    def _write(self, fd: int, data: bytes) -> None:
        """Past Python's own buffers: their locks would keep a blocked process from ending."""
        while data and fd not in self._dead:
            try:
                done = os.write(fd, data)
            except OSError:
                self._dead.add(fd)  # nobody reads it any more; the files have everything
                return
            self._written += done
            data = data[done:]

    def _copy(self, followed: _Followed) -> bool:
        """One chunk; True if there may be more."""
        try:
            with files.reading(followed.path) as opened:
                at, data = trimming.read(opened, _CHUNK, followed.offset)
        except OSError:
            return False
        if at > followed.offset:
            data = self._pass_over(followed, at, data)
        if not data:
            return False
        followed.offset += len(data)
        followed.fresh = False
        *lines, followed.rest = (followed.rest + data).split(b"\n")
        if len(followed.rest) > _CHUNK:
            lines, followed.rest = [*lines, followed.rest], b""
        if lines:
            self._write(followed.sink, b"".join(followed.tag + line + b"\n" for line in lines))
        return True

    def _pass_over(self, followed: _Followed, at: int, data: bytes) -> bytes:
        """The terminal is so slow that what it has not got is gone: go on with the first whole line that is left."""
        first = data.find(b"\n") + 1
        gone, followed.rest = at + first - followed.offset + len(followed.rest), b""
        followed.offset = at + first
        self._write(followed.sink, followed.tag + b"(muster: %d bytes of older output were dropped)\n" % gone)
        return data[first:]

    def _forget(self, followed: _Followed) -> None:
        if followed.rest:
            self._write(followed.sink, followed.tag + followed.rest + b"\n")
            followed.rest = b""
        with self._lock:
            if self._files.get(followed.path) is followed:
                del self._files[followed.path]


class _Inotify:
    def __init__(self) -> None:
        self.fd: int = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self.complete = self.fd >= 0  # else there are files that it cannot watch: a user's watches are limited
        self._added: set[str] = set()

    def add(self, path: str) -> None:
        if self.fd >= 0 and path not in self._added and os.path.exists(path):
            self.complete &= _libc.inotify_add_watch(self.fd, os.fsencode(path), _IN_MODIFY) >= 0
            self._added.add(path)

    def drain(self) -> None:
        if self.fd >= 0:
            _drain(self.fd)


def _drain(fd: int) -> None:
    try:
        os.read(fd, 65536)
    except BlockingIOError:
        return


def size(path: str) -> int:
    try:
        return os.path.getsize(path)
    except OSError:
        return 0


def make(path: str) -> None:
    """Have a file for a rank to write. Raises OSError if ranks of before left something else in its place."""
    with files.appending(path):
        pass


def tail(path: str, start: int) -> tuple[str, ...]:
    """The last lines that were written to a file since `start`."""
    return tuple(_end_of(path, start, _TAIL_BYTES)[-TAIL_LINES:])


def recent(path: str, start: int) -> list[str]:
    """Return the last lines written since `start`, enough for a long traceback."""
    return _end_of(path, start, _TRACEBACK_BYTES)


def last(lines: Sequence[str]) -> tuple[str, ...]:
    """So many of these as `tail` gives of a file."""
    kept: list[str] = []
    room = _TAIL_BYTES
    for line in reversed(lines[-TAIL_LINES:]):
        room -= len(line) + 1
        if room < 0:
            break
        kept.append(line)
    return tuple(reversed(kept))


def whole(path: str, start: int) -> list[str]:
    """Everything since `start`, for reading stacks; they are at the end, if there is too much of it."""
    return _end_of(path, start, _WHOLE_BYTES)


def _end_of(path: str, start: int, most: int) -> list[str]:
    try:
        with files.reading(path) as opened:
            at = max(start, os.fstat(opened).st_size - most)
            return trimming.read(opened, most, at)[1].decode(errors="replace").splitlines()
    except OSError:
        return []


async def keep_small(
    where: Path, keep: int, at_work: Callable[[], tuple[int, Sequence[int]] | None], say: Callable[[str], None]
) -> None:
    """Those of our ranks that run at every look, all others now and then: they grow no more."""
    for look in itertools.count():
        await asyncio.sleep(LOOK_S)
        try:
            if look % LOOKS == 0:
                await asyncio.to_thread(trimming.cut_rounds, where, keep)
            elif (now := at_work()) is not None:
                await asyncio.to_thread(trimming.cut_ranks, where, keep, *now)
        except OSError as error:
            say(f"what ranks print cannot be kept small in {where}: {error.strerror}")
            return

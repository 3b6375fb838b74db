"""Rank output: files that ranks write themselves, and a tagged copy on the terminal.

Ranks never wait for the agent or the terminal: they write to files, and a thread of the agent follows those files
with inotify. What a rank wrote is on disk even if the agent is killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import sys
import threading
from collections import deque
from dataclasses import dataclass, field
from typing import BinaryIO

_libc = ctypes.CDLL(None, use_errno=True)
_IN_MODIFY = 0x2
_POLL_S = 0.1  # where inotify is not to be had
_CHUNK = 1 << 16
_TAIL_BYTES = 8192
TAIL_LINES = 20


@dataclass
class _Followed:
    path: str
    tag: bytes
    sink: BinaryIO
    offset: int
    rest: bytes = b""
    closing: bool = False


@dataclass
class Echo:
    """Copies growing files to standard output and error, each line with its rank in front."""

    enabled: bool = True
    _files: dict[str, _Followed] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _thread: threading.Thread | None = None
    _stop: bool = False
    _notes: deque[bytes] = field(default_factory=lambda: deque(maxlen=1000))

    def say(self, text: str) -> None:
        """A line of the agent itself. Written by the thread too: a terminal that blocks must not stop the agent."""
        self._notes.append(f"{text}\n".encode(errors="replace"))
        self._wake()

    def follow(self, path: str, tag: str, *, error: bool) -> None:
        if not self.enabled:
            return
        sink = sys.stderr.buffer if error else sys.stdout.buffer
        with self._lock:
            self._files[path] = _Followed(path, tag.encode(), sink, size(path))
        self._wake()

    def let_go(self, path: str) -> None:
        """The rank has ended: copy what is left, then forget the file."""
        with self._lock:
            if path in self._files:
                self._files[path].closing = True
        self._wake()

    def finish(self, timeout_s: float) -> bool:
        """Copy what is left; False if the terminal did not take it in time."""
        if self._thread is None:
            return True
        self._stop = True
        self._wake()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _wake(self) -> None:
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
        try:
            while True:
                stopping = self._stop
                with self._lock:
                    files = list(self._files.values())
                for followed in files:
                    watch.add(followed.path)
                self._write_notes()
                moved = [self._copy(followed) for followed in files]
                if any(moved):
                    continue
                for followed in files:
                    if followed.closing:
                        self._forget(followed)
                if stopping:
                    for followed in files:
                        self._forget(followed)
                    return
                poll.poll(None if watch.fd >= 0 else _POLL_S * 1000)
                _drain(self._wake_r)
                watch.drain()
        except BrokenPipeError:
            return  # nobody reads the copy; the files have everything

    def _write_notes(self) -> None:
        while self._notes:
            sys.stderr.buffer.write(self._notes.popleft())
        sys.stderr.buffer.flush()

    def _copy(self, followed: _Followed) -> bool:
        """One chunk; True if there may be more."""
        try:
            with open(followed.path, "rb") as file:
                file.seek(followed.offset)
                data = file.read(_CHUNK)
        except OSError:
            return False
        if not data:
            return False
        followed.offset += len(data)
        *lines, followed.rest = (followed.rest + data).split(b"\n")
        if len(followed.rest) > _CHUNK:
            lines, followed.rest = [*lines, followed.rest], b""
        if lines:
            followed.sink.write(b"".join(followed.tag + line + b"\n" for line in lines))
            followed.sink.flush()
        return True

    def _forget(self, followed: _Followed) -> None:
        if followed.rest:
            followed.sink.write(followed.tag + followed.rest + b"\n")
            followed.sink.flush()
            followed.rest = b""
        with self._lock:
            if self._files.get(followed.path) is followed:
                del self._files[followed.path]


class _Inotify:
    def __init__(self) -> None:
        self.fd: int = _libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        self._added: set[str] = set()

    def add(self, path: str) -> None:
        if self.fd >= 0 and path not in self._added and os.path.exists(path):
            _libc.inotify_add_watch(self.fd, os.fsencode(path), _IN_MODIFY)
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


def tail(path: str, start: int) -> tuple[str, ...]:
    """The last lines that were written to a file since `start`."""
    try:
        with open(path, "rb") as file:
            file.seek(max(start, os.fstat(file.fileno()).st_size - _TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return ()
    return tuple(text.splitlines()[-TAIL_LINES:])


def whole(path: str, start: int) -> list[str]:
    """Everything since `start`, for reading stacks."""
    try:
        with open(path, "rb") as file:
            file.seek(start)
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []

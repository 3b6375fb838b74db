"""Where does the audit go? Into a file that only its owner can read, line by line, from a thread of its own.

Nobody waits for it: what does not fit into the queue, or onto the disk, is counted, and the number is written as soon
as something can be. Tokens and bodies never come here. What is worth a line is decided in `core.auditing`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from muster import files
from muster.core.auditing import Sums
from muster.types.audit import AuditEntry
from muster.types.codec import Invalid, from_wire, to_wire

log = logging.getLogger("muster.audit")

AUDIT_FILE = "audit.log"
MOST_WAITING = 10_000
_AT_ONCE = 1000
_LOOK_EVERY_S = 1.0
_TOLD_EVERY_S = 60.0
_STOP_WITHIN_S = 2.0


@dataclass(frozen=True)
class AuditSize:
    """How much of it is kept: so many files, none larger than that."""

    most_bytes: int = 10 << 20
    files: int = 5

    @classmethod
    def told(cls, env: Mapping[str, str]) -> AuditSize:
        """From the environment. Raises ValueError."""
        size = _number(env, "MUSTER_AUDIT_BYTES", cls.most_bytes, 1 << 16, 1 << 40)
        return cls(size, _number(env, "MUSTER_AUDIT_FILES", cls.files, 1, 1000))


def _number(env: Mapping[str, str], name: str, default: int, least: int, most: int) -> int:
    told = env.get(name, "").strip() or str(default)
    if not (told.isascii() and told.isdecimal() and least <= int(told[:20]) <= most):
        raise ValueError(f"{name} must be a number from {least} to {most}, not {told[:80]!r}")
    return int(told)


class Audit:
    """`echo`: to the log as well, where the file does not outlive the process."""

    def __init__(self, home: Path, size: AuditSize | None = None, *, echo: bool = False) -> None:
        self._file = _AuditFile(home / AUDIT_FILE, size or AuditSize())
        self._echo = echo
        self._waiting: queue.Queue[tuple[AuditEntry, bool] | None] = queue.Queue(MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._sums = Sums()
        self._dropped = 0  # counted by those who note
        self._lost = 0  # counted by the thread, with what it has told of the dropped
        self._told_dropped = 0
        self._told_at: float | None = None

    def note(self, entry: AuditEntry, *, routine: bool = False) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="audit", daemon=True)
            self._thread.start()
        try:
            self._waiting.put_nowait((entry, routine))
        except queue.Full:
            self._dropped += 1

    def stop(self) -> None:
        """Write what is left, unless that takes long."""
        if self._thread is not None:
            with contextlib.suppress(queue.Full):
                self._waiting.put(None, timeout=_STOP_WITHIN_S)
            self._thread.join(_STOP_WITHIN_S)

    def _run(self) -> None:
        over = False
        while not over:
            entries, over = self._next()
            self._write([*entries, *self._sums.over(time.monotonic(), datetime.now(UTC), at_once=over)])

    def _next(self) -> tuple[list[AuditEntry], bool]:
        """What has come, and whether there will be no more."""
        found: list[AuditEntry] = []
        with contextlib.suppress(queue.Empty):
            while len(found) < _AT_ONCE:
                taken = self._waiting.get(timeout=None if found else _LOOK_EVERY_S, block=not found)
                if taken is None:
                    return found, True
                entry, routine = taken
                if (kept := self._sums.take(entry, routine=routine)) is not None:
                    found.append(kept)
        return found, False

    def _write(self, entries: list[AuditEntry]) -> None:
        dropped = self._dropped
        missing = self._lost + dropped - self._told_dropped
        if not entries and not missing:
            return
        if missing:
            entries = [AuditEntry(datetime.now(UTC), "lost", more=missing), *entries]
        lines = [json.dumps(_shown(one)) for one in entries]
        if self._echo:
            for line in lines:
                log.info("%s", line)
        try:
            self._file.append("".join(f"{line}\n" for line in lines).encode())
        except OSError as error:
            self._lost += len(entries) - bool(missing)
            self._tell(error)
        else:
            self._lost, self._told_dropped = 0, dropped

    def _tell(self, error: OSError) -> None:
        now = time.monotonic()
        if self._told_at is None or now - self._told_at > _TOLD_EVERY_S:
            log.warning("the audit cannot be written (%s): lines of it will be missing", error.strerror or error)
            self._told_at = now


class _AuditFile:
    """Rotated by size: audit.log, audit.log.1 and so on, the newest first."""

    def __init__(self, path: Path, size: AuditSize) -> None:
        self._path = path
        self._size = size

    def append(self, data: bytes) -> None:
        """All of it or nothing. Raises OSError."""
        with self._opened() as file:
            before = os.fstat(file).st_size
            if before and before + len(data) > self._size.most_bytes:
                self._rotate()
            else:
                _write_whole(file, data, before)
                return
        with self._opened() as file:
            _write_whole(file, data, 0)

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
        file = os.open(self._path, flags, 0o600)
        try:
            found = os.fstat(file)
            if not files.is_plain(found) or found.st_uid != os.geteuid():
                raise OSError(errno.EPERM, "it is not a regular file of ours", str(self._path))
            if found.st_mode & 0o077:
                os.fchmod(file, 0o600)
            yield file
        finally:
            os.close(file)

    def _rotate(self) -> None:
        names = [numbered(self._path, number) for number in range(self._size.files)]
        for older, newer in zip(reversed(names), reversed(names[:-1]), strict=False):
            with contextlib.suppress(FileNotFoundError):
                os.replace(newer, older)
        if self._size.files == 1:
            os.unlink(self._path)


def _write_whole(file: int, data: bytes, before: int) -> None:
    if before and os.pread(file, 1, before - 1) != b"\n":  # the last line of one that was killed
        data = b"\n" + data
    written = os.write(file, data)
    if written < len(data):
        os.ftruncate(file, before)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def note_local(home: Path, what: str, name: str) -> None:
    """Something that was done to the files of this home, by whoever may write there. Not told is not failed."""
    entry = AuditEntry(datetime.now(UTC), "allowed", f"uid {os.getuid()}", from_="local", method=what, path=name)
    unbounded = AuditSize(1 << 62)  # rotating is for the control plane alone
    with contextlib.suppress(OSError):
        _AuditFile(home / AUDIT_FILE, unbounded).append(f"{json.dumps(_shown(entry))}\n".encode())


def numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}") if number else path


def _shown(entry: AuditEntry) -> dict[str, object]:
    return {name: value for name, value in to_wire(entry).items() if value not in ("", 0, None)}


def read_line(line: bytes) -> AuditEntry | None:
    """An entry as it was written; None if it cannot be read."""
    try:
        return from_wire(AuditEntry, json.loads(line), strict=False)
    except (ValueError, RecursionError, Invalid):
        return None

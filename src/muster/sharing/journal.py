"""What survives the scheduler's death? A file of changes, each written before it is acted upon.

Lines of JSON, each after its checksum. A death in the middle of a write leaves a torn last line, which was never
acted upon and is cut off. The file is written anew, as one record, at every start and when it has grown; the new one
takes the old one's place in one step. Nothing is forced to the disk per line: a crash of the whole machine may lose
the tail. The first line says under which boot it was written, so that this is known, and pipelines are then made to
shrink everything when they attach again.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import weakref
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from muster.errors import JournalUnusable
from muster.sharing import records
from muster.types.sharing import Pool, Shares

log = logging.getLogger("muster.sharing")

KIND = "muster-sharing"
VERSION = 1
COMPACT_AFTER = 4 << 20  # bytes since the last time that it was written anew
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PRIVATE = 0o600


@dataclass(frozen=True)
class Kept:
    """What was found: the state, on the clock of the process that wrote it, and why its requests waited."""

    shares: Shares
    at: float = 0.0
    reasons: Mapping[int, str] | None = None
    may_lack_its_end: bool = False  # the machine was started anew since, and nobody knows what it had not yet written


_JOURNALS: weakref.WeakSet[Journal] = weakref.WeakSet()


class Journal:
    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._file = -1
        self._size = 0
        self._compacted_size = 0
        self._lock = -1
        _JOURNALS.add(self)

    def open(self, empty: Shares) -> Kept:
        """Take the file, and say what it holds."""
        try:
            with self._said("cannot be used"):
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._lock = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _PRIVATE)
                _lock(self._lock, self.path)
                return self._read(empty)
        except JournalUnusable:
            self.close()
            raise

    @contextlib.contextmanager
    def _said(self, what: str) -> Iterator[None]:
        """What the file system refuses is told with the file's name."""
        try:
            yield
        except OSError as error:
            raise JournalUnusable(f"{self.path} {what}: {error.strerror or error}") from error

    def rewrite(self, shares: Shares, at: float, reasons: Mapping[int, str]) -> None:
        """The whole state as one record, in the old file's place."""
        pool = shares.pool
        head = {"kind": KIND, "version": VERSION, "gpus": pool.gpus, "gpus_per_node": pool.gpus_per_node}
        state = records.difference(Shares(pool), shares) | {"t": at, "reasons": list(reasons.items())}
        data = _line(head | {"boot": _boot_id()}) + _line(state)
        with self._said("cannot be written"):
            file = self._replaced(data)
        if self._file >= 0:
            os.close(self._file)
        self._file, self._size, self._compacted_size = file, len(data), len(data)

    def _replaced(self, data: bytes) -> int:
        draft = Path(f"{self.path}.new")
        file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, _PRIVATE)
        try:
            _write(file, data)
            os.fsync(file)
            os.replace(draft, self.path)
        except OSError:
            os.close(file)
            raise
        return file

    def append(self, before: Shares, after: Shares, at: float) -> None:
        """One change. If it cannot be written, nothing of it stays in the file."""
        if self._size - self._compacted_size > COMPACT_AFTER:
            self.rewrite(before, at, {})
        self._append(_line(records.difference(before, after) | {"t": at}))

    def note(self, shares: Shares, at: float, reasons: Mapping[int, str]) -> None:
        """Why requests wait, written once at the end: it is shown again until somebody plans anew."""
        self._append(_line(records.difference(shares, shares) | {"t": at, "reasons": list(reasons.items())}))

    def _append(self, data: bytes) -> None:
        with self._said("cannot be written"):
            try:
                _write(self._file, data)
            except OSError:
                os.ftruncate(self._file, self._size)
                raise
        self._size += len(data)

    def close(self) -> None:
        for file in (self._file, self._lock):
            if file >= 0:
                os.close(file)
        self._file = self._lock = -1

    def _read(self, empty: Shares) -> Kept:
        try:
            lines = self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return Kept(empty)
        head = _parsed(lines[0])
        if head is None or head.get("kind") != KIND:
            if lines == [b""]:
                return Kept(empty)
            raise JournalUnusable(f"{self.path} is not a journal of this scheduler")
        try:
            return self._understood(empty, head, lines[1:])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise JournalUnusable(f"{self.path} holds what no scheduler has written: {error!r}") from error

    def _understood(self, empty: Shares, head: records.Record, lines: list[bytes]) -> Kept:
        if head["version"] != VERSION:
            raise JournalUnusable(f"{self.path} has version {head['version']}; this muster knows version {VERSION}")
        pool = Pool(head["gpus"], head["gpus_per_node"])
        if pool != empty.pool:
            raise JournalUnusable(f"{self.path} is about {pool}, not about {empty.pool}")
        crashed = head.get("boot") != _boot_id()
        shares, at, reasons = empty, 0.0, {}
        for record in self._whole(lines, may_have_holes=crashed):
            shares, at = records.applied(shares, record), record["t"]
            if "reasons" in record:
                reasons = {int(seq): str(why) for seq, why in record["reasons"]}
        return Kept(shares, at, reasons, crashed)

    def _whole(self, lines: list[bytes], *, may_have_holes: bool) -> Iterator[records.Record]:
        """The lines up to a torn one. One in the middle is no torn end: what came after it was acted upon."""
        for number, line in enumerate(lines):
            record = _parsed(line)
            if record is not None:
                yield record
                continue
            if not may_have_holes and any(_parsed(later) is not None for later in lines[number:]):
                raise JournalUnusable(
                    f"{self.path}: line {number + 2} is damaged, and others follow it",
                    hint="put a copy of it back; or remove it when no pipeline runs, and all begin anew",
                )
            if any(lines[number:]):
                log.warning("%s: line %d is torn; it and what follows is left out", self.path, number + 2)
            return


def _line(record: records.Record) -> bytes:
    body = json.dumps(record, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(body), body)


def _parsed(line: bytes) -> records.Record | None:
    """None if it is torn."""
    checksum, _, body = line.partition(b" ")
    if checksum != b"%08x" % zlib.crc32(body):
        return None
    record: records.Record = json.loads(body)
    return record


def _let_go() -> None:
    """A forked child must not hold the lock of a parent that dies, nor write into its file."""
    for journal in list(_JOURNALS):
        journal.close()


os.register_at_fork(after_in_child=_let_go)


def _lock(file: int, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise JournalUnusable(f"{path} is in use by another scheduler") from None


def _boot_id() -> str:
    """Of this machine since it was last started; "" where there is none."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _write(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]

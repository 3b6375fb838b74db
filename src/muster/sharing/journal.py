"""What survives the scheduler's death? Its state, written before it is acted upon: to a file, or to a store.

A `FileJournal` holds lines of JSON, each after its checksum, and each a change of `records`. A death in the middle of
a write leaves a torn last line, which was never acted upon and is cut off. The file is written anew, as one change, at
every start and when it has grown; the new one takes the old one's place in one step. Nothing is forced to the disk per
line: a crash of the whole machine may lose the tail. The head says under which boot it was written, so that this is
known, and pipelines are then made to shrink everything when they attach again.
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
from pathlib import Path
from typing import Any, Protocol

from muster.core.sharing import records, records_of_0_1
from muster.core.sharing.records import Changes, KeptShares
from muster.errors import JournalUnusable
from muster.types.sharing import Pool, Shares

log = logging.getLogger("muster.sharing")

KIND = "muster-sharing"
VERSION = 2
COMPACT_AFTER = 4 << 20  # bytes since the last time that it was written anew
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_PRIVATE = 0o600


class Journal(Protocol):
    """Where a scheduler keeps its state. A change that it refuses is not made."""

    def open(self, empty: Shares) -> KeptShares:
        """Take it, and say what it holds. Raises JournalUnusable."""

    def rewrite(self, shares: Shares, at: float, reasons: Mapping[int, str]) -> None:
        """This and nothing else is the state."""

    def append(self, before: Shares, after: Shares, at: float, reasons: Mapping[int, str] | None = None) -> None:
        """One change; with the reasons why requests wait, at the end."""

    async def written(self) -> None:
        """Until all that was appended outlives this process: only then is anybody told, or any hook called."""

    def close(self) -> None: ...


_OPENED: weakref.WeakSet[FileJournal] = weakref.WeakSet()


class FileJournal:
    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._file = -1
        self._size = 0
        self._compacted_size = 0
        self._lock = -1
        self._boot = ""
        _OPENED.add(self)

    def open(self, empty: Shares) -> KeptShares:
        self._boot = boot_id()
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
        state = records.changes(Shares(shares.pool), shares, at, boot=self._boot, reasons=reasons)
        data = _line({"kind": KIND, "version": VERSION}) + _line(state)
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

    def append(self, before: Shares, after: Shares, at: float, reasons: Mapping[int, str] | None = None) -> None:
        """If it cannot be written, nothing of it stays in the file."""
        if self._size - self._compacted_size > COMPACT_AFTER:
            self.rewrite(before, at, {})
        data = _line(records.changes(before, after, at, boot=self._boot, reasons=reasons))
        with self._said("cannot be written"):
            try:
                _write(self._file, data)
            except OSError:
                os.ftruncate(self._file, self._size)
                raise
        self._size += len(data)

    async def written(self) -> None:
        """It is, with each line."""

    def close(self) -> None:
        for file in (self._file, self._lock):
            if file >= 0:
                os.close(file)
        self._file = self._lock = -1

    def _read(self, empty: Shares) -> KeptShares:
        try:
            lines = self.path.read_bytes().split(b"\n")
        except FileNotFoundError:
            return KeptShares(empty)
        head = _parsed(lines[0])
        if head is None or head.get("kind") != KIND:
            if lines == [b""]:
                return KeptShares(empty)
            raise JournalUnusable(f"{self.path} is not a journal of this scheduler")
        if head.get("version") == 1:
            return self._read_first_version(empty, head, lines[1:])
        if head.get("version") != VERSION:
            raise JournalUnusable(f"{self.path} has version {head.get('version')}; this muster knows {VERSION}")
        entries: Changes = {}
        for change in self._whole(lines[1:]):
            entries |= change
        there = {key: value for key, value in entries.items() if value is not None}
        return records.read(there, empty, str(self.path), boot=self._boot)

    def _read_first_version(self, empty: Shares, head: Mapping[str, Any], lines: list[bytes]) -> KeptShares:
        shares, at, reasons = empty, 0.0, {}
        try:
            pool = Pool(head["gpus"], head["gpus_per_node"])
            crashed = head.get("boot") != self._boot
            for record in self._whole(lines, crashed=crashed):
                shares, at = records_of_0_1.applied(shares, record), record["t"]
                if "reasons" in record:
                    reasons = {int(seq): str(why) for seq, why in record["reasons"]}
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise JournalUnusable(f"{self.path} holds what no scheduler has written: {error!r}") from error
        if pool != empty.pool:
            raise JournalUnusable(f"{self.path} is about {pool}, not about {empty.pool}")
        return KeptShares(shares, at, reasons, crashed)

    def _whole(self, lines: list[bytes], *, crashed: bool | None = None) -> Iterator[dict[str, Any]]:
        """The lines up to a torn one. One in the middle is no torn end: what came after it was acted upon.

        Unless the machine has crashed, which may leave holes.
        """
        for number, line in enumerate(lines):
            record = _parsed(line)
            if record is not None:
                if crashed is None:
                    crashed = record.get(records.HEAD, {}).get("boot") != self._boot
                yield record
                continue
            if not crashed and any(_parsed(later) is not None for later in lines[number:]):
                raise JournalUnusable(
                    f"{self.path}: line {number + 2} is damaged, and others follow it",
                    hint="put a copy of it back; or remove it when no pipeline runs, and all begin anew",
                )
            if any(lines[number:]):
                log.warning("%s: line %d is torn; it and what follows is left out", self.path, number + 2)
            return


def _line(record: Mapping[str, Any]) -> bytes:
    body = json.dumps(record, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(body), body)


def _parsed(line: bytes) -> dict[str, Any] | None:
    """None if it is torn."""
    checksum, _, body = line.partition(b" ")
    if checksum != b"%08x" % zlib.crc32(body):
        return None
    record: dict[str, Any] = json.loads(body)
    return record


def _let_go() -> None:
    """A forked child must not hold the lock of a parent that dies, nor write into its file."""
    for journal in list(_OPENED):
        journal.close()


os.register_at_fork(after_in_child=_let_go)


def _lock(file: int, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise JournalUnusable(f"{path} is in use by another scheduler") from None


def boot_id() -> str:
    """Of this machine since it was last started; "" where there is none."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""


def _write(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]

"""What survives the scheduler's death? A file of changes, each written before it is acted upon.

Lines of JSON, each after its checksum. A death in the middle of a write leaves a torn last line, which was never
acted upon and is cut off. The file is written anew, as one record, at every start and when it has grown; the new one
takes the old one's place in one step. Nothing is forced to the disk per line: what a crash of the whole machine may
lose is the tail, and that is resolved by shrinking when pipelines attach again.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from muster.errors import JournalUnusable
from muster.sharing import records
from muster.types.sharing import Pool, Shares

log = logging.getLogger("muster.sharing")

KIND = "muster-sharing"
VERSION = 1
COMPACT_AFTER = 4 << 20  # bytes since the last time that it was written anew
_PRIVATE = 0o600


@dataclass(frozen=True)
class Kept:
    """What was found: the state, on the clock of the process that wrote it, and why its requests waited."""

    shares: Shares
    at: float = 0.0
    reasons: Mapping[int, str] | None = None


class Journal:
    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self._file = -1
        self._size = 0
        self._compacted_size = 0
        self._lock = -1

    def open(self, empty: Shares) -> Kept:
        """Take the file, and say what it holds."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(f"{self.path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, _PRIVATE)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return self._read(empty)
        except BlockingIOError:
            self.close()
            raise JournalUnusable(f"{self.path} is in use by another scheduler") from None
        except JournalUnusable:
            self.close()
            raise

    def rewrite(self, shares: Shares, at: float, reasons: Mapping[int, str]) -> None:
        """The whole state as one record, in the old file's place."""
        pool = shares.pool
        head = {"kind": KIND, "version": VERSION, "gpus": pool.gpus, "gpus_per_node": pool.gpus_per_node}
        state = records.difference(Shares(pool), shares) | {"t": at, "reasons": list(reasons.items())}
        draft = Path(f"{self.path}.new")
        data = _line(head) + _line(state)
        file = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, _PRIVATE)
        try:
            _write(file, data)
            os.fsync(file)
            os.replace(draft, self.path)
        except OSError:
            os.close(file)
            raise
        if self._file >= 0:
            os.close(self._file)
        self._file, self._size, self._compacted_size = file, len(data), len(data)

    def append(self, before: Shares, after: Shares, at: float) -> None:
        """One change. If it cannot be written, nothing of it stays in the file."""
        if self._size - self._compacted_size > COMPACT_AFTER:
            self.rewrite(before, at, {})
        self._append(_line(records.difference(before, after) | {"t": at}))

    def note(self, shares: Shares, at: float, reasons: Mapping[int, str]) -> None:
        """Why requests wait, written once at the end: it is shown again until somebody plans anew."""
        self._append(_line(records.difference(shares, shares) | {"t": at, "reasons": list(reasons.items())}))

    def _append(self, data: bytes) -> None:
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
        if head["version"] > VERSION:
            raise JournalUnusable(f"{self.path} has version {head['version']}; this muster knows up to {VERSION}")
        pool = Pool(head["gpus"], head["gpus_per_node"])
        if pool != empty.pool:
            raise JournalUnusable(f"{self.path} is about {pool}, not about {empty.pool}")
        return self._replayed(empty, lines[1:])

    def _replayed(self, empty: Shares, lines: list[bytes]) -> Kept:
        shares, at, reasons = empty, 0.0, {}
        for number, line in enumerate(lines):
            record = _parsed(line)
            if record is None:
                if any(lines[number:]):
                    log.warning("%s: line %d is torn; it and what follows is left out", self.path, number + 2)
                break
            shares, at = records.applied(shares, record), record["t"]
            if "reasons" in record:
                reasons = {int(seq): str(why) for seq, why in record["reasons"]}
        return Kept(shares, at, reasons)


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


def _write(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]

"""What lies in the file, and how does it get there? The blocking half of the SQLite store.

Two connections to one file in WAL mode: one writes, each transaction as a whole, and one reads history and journal
without holding writers up. On a network file system, where the shared memory of a WAL is not safe, the file has a
rollback journal instead, and readers and writers wait for one another. Neither is used by two threads at once; `sqlite`
sees to that. Every row of `objects` carries a seal, a hash of the row as muster wrote it, so that an edit around the
API shows.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, get_args

from muster import errors, mounts
from muster.ports import StoreChange, Stored, Version
from muster.store import entries, room, schema
from muster.store.ledger import Entry
from muster.store.reached import Reached
from muster.store.room import Space
from muster.store.schema import Row
from muster.types import codec
from muster.types.event import Event
from muster.types.training import Key, Uid

Synchronous = Literal["OFF", "NORMAL", "FULL", "EXTRA"]
_BUSY_MS = 5000  # how long another program may hold the file before a write of ours gives up
_AT_ONCE = 500
_PAGE, _LEAST_PAGES = 4096 + 24, 100
_AT_LEAST = 100  # changes that are kept whatever happens
_NOTHING = Entry()


@dataclass(frozen=True)
class Contents:
    """What the file holds, read at start."""

    rows: Sequence[Row]
    records: Mapping[str, Mapping[str, Mapping[str, Any]]]
    version: Version
    last_event: int


@dataclass(frozen=True)
class Foreign:
    """Another program has written to the file: the rows that are not as muster left them, and all that there are."""

    rows: Sequence[Row]
    keys: frozenset[Key]
    last_event: int


class Database:
    """One file, open for this process alone."""

    def __init__(
        self, path: Path, *, synchronous: Synchronous, keep_changes: int, home: str = "", reached: Reached | None = None
    ) -> None:
        if synchronous not in get_args(Synchronous):
            raise errors.InvalidRequest(f"synchronous must be one of {', '.join(get_args(Synchronous))}")
        self.path = path
        self._synchronous = synchronous
        self._keep_changes = keep_changes
        self._seen: int | None = None  # the data_version up to which foreign writes are known
        self._reached = reached
        self._wal: os.stat_result | None = None  # once it was seen
        self._rescued = ""  # where the database was saved, if somebody took it away
        self._owned = 0  # blocks that the file has, once room is kept
        self.short = False  # there is hardly any room on the disk
        with contextlib.ExitStack() as undo, _translated(path, "opened"):
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._lock = undo.enter_context(_locked(path))
            if reached is not None:
                undo.callback(reached.close)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            undo.callback(os.close, self._file)  # not before SQLite has closed it: its locks would go with ours
            path.chmod(0o600)  # SQLite gives its side files the same mode
            self._writer = undo.enter_context(contextlib.closing(_connect(path)))
            schema.bring_up_to_date(self._writer, path, home)
            self._has_wal = not mounts.network_type(path)
            self._set_journal()
            self._set_synchronous(synchronous)
            pages = room.space(path.parent).part(room.IN_WAL) // _PAGE
            self._writer.execute(f"PRAGMA wal_autocheckpoint = {max(pages, _LEAST_PAGES)}")
            self._commits = schema.number(self._writer, schema.COMMITS)
            if reached is not None:
                reached.begin(self._commits)
            self._reader = undo.enter_context(contextlib.closing(_connect(path)))
            self._reader.execute("PRAGMA query_only = ON")
            self._undo = undo.pop_all()

    def _set_journal(self) -> None:
        wanted = "wal" if self._has_wal else "delete"
        (mode,) = self._writer.execute(f"PRAGMA journal_mode = {wanted}").fetchone()
        if mode != wanted:
            raise sqlite3.OperationalError(f"its journal mode is {mode} and cannot become {wanted}")

    def close(self) -> None:
        """Waits for nothing: what is committed is committed."""
        with contextlib.suppress(sqlite3.Error):
            self._undo.close()

    # Writing -------------------------------------------------------------------------------------

    def load(self) -> Contents:
        with _translated(self.path, "read"):
            self._seen = self._data_version()
            records: dict[str, dict[str, Mapping[str, Any]]] = {}
            for kind, key, value in self._writer.execute("SELECT kind, key, value FROM records"):
                records.setdefault(kind, {})[key] = json.loads(value)
            rows = list(schema.rows(self._writer))
            latest = self._number("SELECT max(version) FROM changes")
            floor = schema.number(self._writer, schema.FLOOR)
            version = max([latest, floor, *(row.version for row in rows)])
            return Contents(rows, records, version, self._last_event())

    def commit(self, entries: Iterable[Entry], *, durable: bool) -> Foreign | None:
        """Write all of them in one transaction; nothing is written if someone else wrote meanwhile.

        What need not be durable is handed to the operating system only: it outlives the process, not the machine.
        """
        decided = list(entries)
        try:
            with _translated(self.path, "written"):
                try:
                    return self._transact(decided, durable)
                except sqlite3.OperationalError as error:
                    if "full" not in str(error):
                        raise
                    self._begin_wal_anew()
                    return self._transact(decided, durable)
        except errors.Unavailable:
            self._seen = None  # whatever was found meanwhile is found again
            self._roll_back()
            raise

    def _roll_back(self) -> None:
        with contextlib.suppress(sqlite3.Error):
            if self._writer.in_transaction:
                self._writer.execute("ROLLBACK")

    def _begin_wal_anew(self) -> None:
        """What the WAL has goes into the file, which has room for it, so that its own can be used again."""
        self._roll_back()
        self._writer.execute("PRAGMA wal_checkpoint(PASSIVE)")
        self.keep_room()

    def _is_displaced(self) -> bool:
        """Whether what we write is not what lies there under its name: it would be lost with this process."""
        try:
            wal = os.stat(f"{self.path}-wal") if self._wal is not None else None
            moved = wal is not None and self._wal is not None and not os.path.samestat(wal, self._wal)
            return moved or not os.path.samestat(os.stat(self.path), os.fstat(self._file))
        except FileNotFoundError:
            return True

    def _displaced(self) -> errors.Unavailable:
        """Everything that was committed is still to be had from what we have open: it is saved, once."""
        if not self._rescued:
            rescued = self.path.with_name(f"{self.path.name}.rescued-{datetime.now(UTC):%Y%m%dT%H%M%S}Z")
            os.close(os.open(rescued, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            with contextlib.closing(sqlite3.connect(rescued)) as copy:
                self._writer.backup(copy)
                copy.execute("PRAGMA journal_mode = DELETE")
            self._rescued = str(rescued)
        what = (
            f"{self.path} or its -wal was removed or replaced while it is in use, all that it had is in {self._rescued}"
        )
        return errors.Unavailable(f"{what}: muster server stop, then muster server restore {self._rescued}")

    def keep_room(self) -> Space | None:
        """Let both files own blocks that nobody else can take; what is left of the disk. None if that is not known."""
        try:
            disk = room.space(self.path.parent)
            upto = os.fstat(self._file).st_size + disk.part(room.IN_DATABASE)
            room.own(self._file, upto, disk.free)
            self._owned = os.fstat(self._file).st_blocks
            if self._has_wal:
                self._keep_room_in_wal(disk)
            left = room.space(self.path.parent)
        except OSError:
            return None
        self.short = left.is_low(was_low=self.short)
        return left

    def _keep_room_in_wal(self, disk: Space) -> None:
        wal = os.open(f"{self.path}-wal", os.O_RDWR | os.O_CLOEXEC)  # SQLite has no locks on this one
        try:
            self._wal = self._wal or os.fstat(wal)
            room.own(wal, disk.part(room.IN_WAL), room.space(self.path.parent).free)
        finally:
            os.close(wal)

    def _transact(self, entries: Iterable[Entry], durable: bool) -> Foreign | None:
        if self._is_displaced():
            raise self._displaced()
        self._set_synchronous(self._synchronous if durable else "NORMAL")
        self._writer.execute("BEGIN IMMEDIATE")
        now = self._data_version()
        if now != self._seen:
            rows = list(schema.rows(self._writer))
            last_event = self._last_event()
            self._writer.execute("ROLLBACK")
            self._seen = now
            return Foreign([row for row in rows if not row.ours], frozenset(row.key for row in rows), last_event)
        latest, commits = 0, self._commits
        for entry in entries:
            self._write(entry)
            commits = self._commits + (entry != _NOTHING or commits > self._commits)
            latest = entry.change.version if entry.change is not None else latest
        if latest:
            self._trim_history(latest)
        if commits > self._commits:
            schema.put_note(self._writer, schema.COMMITS, str(commits))
        self._writer.execute("COMMIT")
        self._count(commits, durable)
        if self._owned and os.fstat(self._file).st_blocks < self._owned:
            self.keep_room()  # SQLite has emptied its WAL, and given back what the file has beyond its end
        return None

    def _trim_history(self, latest: Version) -> None:
        self._writer.execute("DELETE FROM changes WHERE version <= ?", (latest - self._keep_changes,))
        if self.short:  # old history makes room for what happens; a little at a time, for deleting needs room, too
            old = "SELECT version FROM changes WHERE version <= ? ORDER BY version LIMIT ?"
            self._writer.execute(f"DELETE FROM changes WHERE version IN ({old})", (latest - _AT_LEAST, _AT_ONCE // 5))

    def _count(self, commits: int, durable: bool) -> None:
        """Only now: whoever finds the count must find the transaction."""
        if commits > self._commits and self._reached is not None:
            self._reached.note(commits, forced=durable and self._synchronous in ("FULL", "EXTRA"))
        self._commits = commits

    def fold_events(self, uid: str, upto: int, now: datetime) -> int:
        """Make one entry of the oldest of a training; how many are gone."""
        with _translated(self.path, "written"):
            self._set_synchronous("NORMAL")
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                gone = entries.fold(self._writer, uid, upto, now)
                self._writer.execute("COMMIT")
            finally:
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")
            return gone

    def _write(self, entry: Entry) -> None:
        run = self._writer.execute
        if entry.change is not None:
            self._write_change(entry, entry.change)
        for noted in entry.events:
            event = noted.event
            assert event.at is not None  # the ledger fills it
            run(
                "INSERT INTO events (id, at, namespace, training, uid, body) VALUES (?, ?, ?, ?, ?, ?)",
                (event.id, codec.show_time(event.at), event.namespace, event.training, event.uid, noted.raw.decode()),
            )
        for kept in entry.records:
            place = (kept.record.kind, kept.record.key)
            if kept.raw is None:
                run("DELETE FROM records WHERE kind = ? AND key = ?", place)
            else:
                run("INSERT OR REPLACE INTO records (kind, key, value) VALUES (?, ?, ?)", (*place, kept.raw.decode()))

    def _write_change(self, entry: Entry, change: StoreChange) -> None:
        run, stored = self._writer.execute, change.stored
        labels = json.dumps(dict(stored.labels), sort_keys=True)
        what = (stored.key.namespace, stored.key.name, stored.uid, stored.version, stored.phase, labels)
        body = stored.raw.decode()
        run(
            "INSERT OR REPLACE INTO changes (version, type, namespace, name, uid, stored_version, phase, labels, body)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (change.version, change.type, *what, body),
        )
        if entry.training is None:
            run("DELETE FROM objects WHERE namespace = ? AND name = ?", what[:2])
            return
        training = entry.training
        row = Row(stored.key, *what[2:], stored.raw, training.generation, schema.spec_hash(training.spec), "")
        run(
            "INSERT OR REPLACE INTO objects"
            " (namespace, name, uid, version, phase, labels, body, generation, spec_hash, seal)"
            " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (*what, body, row.generation, row.spec_hash, schema.seal(row)),
        )

    def _set_synchronous(self, level: Synchronous) -> None:
        order = get_args(Synchronous)
        weaker = min(level, self._synchronous, key=order.index)
        self._writer.execute(f"PRAGMA synchronous = {weaker}")

    # Reading -------------------------------------------------------------------------------------

    def _data_version(self) -> int:
        return self._number("PRAGMA data_version")

    def _last_event(self) -> int:
        return self._number(
            "SELECT max((SELECT ifnull(max(id), 0) FROM events), (SELECT ifnull(max(seq), 0)"
            " FROM sqlite_sequence WHERE name = 'events'))"
        )

    def _number(self, query: str) -> int:
        return int(self._writer.execute(query).fetchone()[0] or 0)

    def last_written(self, row: Row) -> Stored | None:
        """The object as the history has it, for when its row is not as muster left it."""
        with _translated(self.path, "read"):
            found = self._changes(
                self._writer,
                "version = ? AND namespace = ? AND name = ? AND type <> 'DELETED'",
                (row.version, row.key.namespace, row.key.name),
            )
        return found[0].stored if found else None

    def changes(self, after: Version, upto: Version) -> list[StoreChange]:
        """The next changes, oldest first; empty if the first of them is no longer kept."""
        with _translated(self.path, "read"):
            found = self._changes(
                self._reader, "version > ? AND version <= ? ORDER BY version LIMIT ?", (after, upto, _AT_ONCE)
            )
            return found if found and found[0].version == after + 1 else []

    @staticmethod
    def _changes(connection: sqlite3.Connection, where: str, values: tuple[str | int, ...]) -> list[StoreChange]:
        found = connection.execute(
            "SELECT version, type, namespace, name, uid, stored_version, phase, labels, CAST(body AS BLOB)"
            f" FROM changes WHERE {where}",
            values,
        )
        return [
            StoreChange(
                version,
                kind,
                Stored(Key(namespace, name), Uid(uid), stored_version, phase, schema.read_labels(labels), body),
            )
            for version, kind, namespace, name, uid, stored_version, phase, labels, body in found
        ]

    def surplus(self, keep: entries.Keep) -> list[tuple[str, int]]:
        with _translated(self.path, "read"):
            return list(entries.surplus(self._reader, keep))

    def events(
        self, where: Mapping[str, str], after: int, before: int | None = None, most: int | None = None
    ) -> list[Event]:
        """Entries of the journal whose columns have these values: all between two ids, or the newest of them."""
        tests = "".join(f" AND {column} = ?" for column in where) + ("" if before is None else " AND id < ?")
        order = "ORDER BY id" if most is None else "ORDER BY id DESC LIMIT ?"
        values = [after, *where.values(), *(number for number in (before, most) if number is not None)]
        with _translated(self.path, "read"):
            rows = self._reader.execute(f"SELECT id, body FROM events WHERE id > ?{tests} {order}", values).fetchall()
        oldest_first = rows if most is None else reversed(rows)
        return [
            codec.from_wire(Event, json.loads(body) | {"id": number}, strict=False) for number, body in oldest_first
        ]


def _connect(path: Path) -> sqlite3.Connection:
    connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=_BUSY_MS / 1000)
    connection.execute("PRAGMA foreign_keys = ON")
    return connection


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[int]:
    """The right to be the one process that has this file open."""
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise errors.MusterError(
                f"{path} is in use by another control plane",
                code="store_busy",
                hint="stop that one first (muster server stop), or choose another MUSTER_HOME",
            ) from None
        yield lock
    finally:
        os.close(lock)


@contextlib.contextmanager
def _translated(path: Path, verb: str) -> Iterator[None]:
    """What SQLite and the system say about a disk, in words for whoever asked for the write."""
    try:
        yield
    except (sqlite3.Error, OSError, UnicodeError, OverflowError) as error:
        said = str(error)
        hint = "see that its disk works and that muster may write there; nothing of this was stored"
        if "full" in said:
            hint = "make room on its disk, then try again; nothing of this was stored"
        elif "locked" in said:
            hint = "another program holds it in a transaction: end that, then try again"
        elif "not a database" in said or "malformed" in said:
            hint = "the file is damaged or is not muster's: move it away, or restore a copy"
            raise errors.Unavailable(f"{path} cannot be {verb}: {said}", "store_damaged", False, hint) from error
        raise errors.Unavailable(f"{path} cannot be {verb}: {said}", hint=hint) from error

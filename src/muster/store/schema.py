"""Which tables are there? The layout of the database file, and the way from an older one to this one.

`meta` holds the version of the layout, the identity of the home, how many transactions were committed, and the version
that the store is at least at (where an older copy was put back, none may be given twice). A file from a newer muster is
refused untouched; an older one is migrated step by step, all steps in one transaction, so that a crash leaves either
the old layout or the new one. Every row of `objects` carries a seal, a hash of the row as muster wrote it, so that an
edit around the API shows.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from muster import errors
from muster.ports import Stored, Version
from muster.types import codec
from muster.types.training import Key, Spec, Training, Uid

VERSION = 2
SCHEMA, HOME, COMMITS, FLOOR = "schema", "home", "commits", "floor"  # what `meta` holds

_TABLES = (
    "CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID",
    """CREATE TABLE objects (
        namespace TEXT NOT NULL, name TEXT NOT NULL, uid TEXT NOT NULL, version INTEGER NOT NULL,
        phase TEXT NOT NULL, labels TEXT NOT NULL, spec_hash TEXT NOT NULL, body TEXT NOT NULL,
        generation INTEGER, seal TEXT, PRIMARY KEY (namespace, name))""",
    """CREATE TABLE changes (
        version INTEGER PRIMARY KEY, type TEXT NOT NULL, namespace TEXT NOT NULL, name TEXT NOT NULL,
        uid TEXT NOT NULL, stored_version INTEGER NOT NULL, phase TEXT NOT NULL, labels TEXT NOT NULL,
        body TEXT NOT NULL)""",
    """CREATE TABLE events (
        id INTEGER PRIMARY KEY AUTOINCREMENT, at TEXT NOT NULL, namespace TEXT NOT NULL, training TEXT NOT NULL,
        uid TEXT NOT NULL, body TEXT NOT NULL)""",
)
_RECORDS = (
    "CREATE TABLE records (kind TEXT NOT NULL, key TEXT NOT NULL, value TEXT NOT NULL, PRIMARY KEY (kind, key))"
    " WITHOUT ROWID",
    "CREATE INDEX events_of_training ON events (namespace, training, id)",
    "CREATE INDEX events_of_uid ON events (uid, id)",
)


@dataclass(frozen=True)
class Row:
    """A row of `objects`. The last three columns are what muster wrote beside the body."""

    key: Key
    uid: str
    version: Version
    phase: str
    labels: str
    raw: bytes
    generation: int
    spec_hash: str
    seal: str

    @property
    def ours(self) -> bool:
        return self.seal == seal(self)

    def stored(self) -> Stored:
        return Stored(self.key, Uid(self.uid), self.version, self.phase, read_labels(self.labels), self.raw)


def spec_hash(spec: Spec) -> str:
    """The same for every way to write the same spec."""
    return _hash(json.dumps(codec.to_wire(spec), sort_keys=True).encode())


def rows(connection: sqlite3.Connection) -> Iterator[Row]:
    """All objects. Another program may have left anything in a column; what is no use counts as absent."""
    found = connection.execute(
        "SELECT namespace, name, uid, version, phase, labels, CAST(body AS BLOB), generation, spec_hash, seal"
        " FROM objects"
    )
    for namespace, name, uid, version, phase, labels, body, generation, hashed, sealed in found:
        yield Row(
            Key(str(namespace), str(name)),
            str(uid),
            version if isinstance(version, int) else 0,
            str(phase),
            str(labels),
            body or b"",
            generation if isinstance(generation, int) else 0,
            str(hashed),
            str(sealed or ""),
        )


def note(connection: sqlite3.Connection, name: str) -> str:
    row = connection.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
    return str(row[0]) if row is not None else ""


def number(connection: sqlite3.Connection, name: str) -> int:
    told = note(connection, name)
    return int(told) if told.isdecimal() else 0


def put_note(connection: sqlite3.Connection, name: str, value: str) -> None:
    connection.execute("INSERT OR REPLACE INTO meta (name, value) VALUES (?, ?)", (name, value))


def read_labels(text: str) -> dict[str, str]:
    if text == "{}":
        return {}
    labels: dict[str, str] = json.loads(text)
    return labels


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=12).hexdigest()


def seal(row: Row) -> str:
    words = (*vars(row.key).values(), row.uid, row.version, row.phase, row.labels, row.generation, row.spec_hash)
    return _hash(repr(words).encode("utf-8", "replace") + row.raw)


def _add_records_and_seals(connection: sqlite3.Connection) -> None:
    """Layout 1 had neither records nor seals, and found events by reading all of them.

    A row that cannot be read stays without a seal: the store looks at it when it opens.
    """
    connection.execute("ALTER TABLE objects ADD COLUMN generation INTEGER")
    connection.execute("ALTER TABLE objects ADD COLUMN seal TEXT")
    for statement in _RECORDS:
        connection.execute(statement)
    for row in list(rows(connection)):
        try:
            generation = Training.from_wire(json.loads(row.raw)).generation
        except (ValueError, TypeError):
            continue
        sealed = seal(replace(row, generation=generation))
        connection.execute(
            "UPDATE objects SET generation = ?, seal = ? WHERE namespace = ? AND name = ?",
            (generation, sealed, row.key.namespace, row.key.name),
        )


_STEPS: Mapping[int, Callable[[sqlite3.Connection], None]] = {1: _add_records_and_seals}


def bring_up_to_date(connection: sqlite3.Connection, path: Path, home: str = "") -> None:
    """Create the tables, or migrate those that are there. `home`: whose database it is from now on."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        found = _found(connection, path)
        if found == 0:
            for statement in (*_TABLES, *_RECORDS):
                connection.execute(statement)
        for step in range(found or VERSION, VERSION):
            _STEPS[step](connection)
        if found != VERSION:
            put_note(connection, SCHEMA, str(VERSION))
        if home and note(connection, HOME) != home:
            put_note(connection, HOME, home)
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.execute("ROLLBACK")


def _found(connection: sqlite3.Connection, path: Path) -> int:
    """The layout that the file has; 0 if it is empty."""
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not tables:
        return 0
    told = note(connection, SCHEMA) if "meta" in tables else ""
    if not told.isdecimal() or not int(told):
        raise errors.MusterError(
            f"{path} is a database, but not one of muster's",
            code="store_unknown",
            hint="move it away, or choose another MUSTER_HOME",
        )
    found = int(told)
    if found > VERSION:
        raise errors.MusterError(
            f"{path} has schema version {found}; this muster knows versions up to {VERSION}",
            code="store_too_new",
            hint="install the newer muster again, or choose another MUSTER_HOME",
        )
    return found

"""What does a database file say of itself, before anybody opens it to serve it? Nothing is changed by looking.

A connection that may write would finish what a crash has left: it would fold the readable part of a damaged WAL into
the file and remove the rest. So the file is read here with one that may not.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Collection
from pathlib import Path
from urllib.parse import quote

from muster import errors
from muster.core.home import FileState, Kept
from muster.core.keeping import WORKER
from muster.store import schema

MOST_CHECKED = 32 << 20  # a larger file is believed to be whole, page by page: looking at all of them takes too long
_DELETED = '%"reason":"Deleted"%'


def look(path: Path, uids: Collection[str] = ()) -> Kept:
    """`uids` are those of trainings about which the journal is to be asked.

    Raises errors.Unavailable if it cannot be read now, which says nothing about what is in it.
    """
    try:
        if not path.stat().st_size:
            return Kept(FileState.ABSENT)
        with contextlib.closing(opened(path)) as connection:
            fault = _fault(connection, path.stat().st_size)
            return Kept(FileState.DAMAGED, fault) if fault else _read(connection, uids)
    except FileNotFoundError:
        return Kept(FileState.ABSENT)
    except (sqlite3.OperationalError, OSError) as error:
        hint = "see that its disk works, has room, and that muster may read and write there"
        raise errors.Unavailable(f"{path} cannot be read: {error}", hint=hint) from error
    except (sqlite3.DatabaseError, ValueError) as error:  # not a database, malformed, not text
        return Kept(FileState.DAMAGED, str(error))


def opened(path: Path) -> sqlite3.Connection:
    """A connection that reads only."""
    connection = sqlite3.connect(f"file:{quote(str(path))}?mode=ro", uri=True, isolation_level=None, timeout=5.0)
    try:
        connection.execute("PRAGMA query_only = ON")
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def _fault(connection: sqlite3.Connection, size: int) -> str:
    if size > MOST_CHECKED:
        return ""
    said = str(connection.execute("PRAGMA quick_check(1)").fetchone()[0])
    return "" if said == "ok" else said


def _read(connection: sqlite3.Connection, uids: Collection[str]) -> Kept:
    tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not {"meta", "objects", "events"} <= tables:  # whoever opens it says what it is
        return Kept(FileState.READABLE if tables else FileState.ABSENT)
    trainings = frozenset(str(uid) for (uid,) in connection.execute("SELECT uid FROM objects"))
    workers = "SELECT key FROM records WHERE kind = ?" if "records" in tables else "SELECT 1 WHERE 0 = ?"
    asked = [uid for uid in uids if uid not in trainings]
    return Kept(
        FileState.READABLE,
        home=schema.note(connection, schema.HOME),
        commits=schema.number(connection, schema.COMMITS),
        trainings=trainings,
        workers=frozenset(key for (key,) in connection.execute(workers, (WORKER,))),
        told=frozenset(uid for uid in asked if _tells(connection, uid)),
        deleted=frozenset(uid for uid in asked if _tells(connection, uid, _DELETED)),
    )


def _tells(connection: sqlite3.Connection, uid: str, what: str = "%") -> bool:
    query = "SELECT 1 FROM events WHERE uid = ? AND body LIKE ? LIMIT 1"
    return connection.execute(query, (uid, what)).fetchone() is not None

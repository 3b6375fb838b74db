"""Which entries of the journal have to go, and what stays of them? The oldest, and one that sums them up.

Of each training the newest are kept, and of all together so many. What is dropped is replaced in the same transaction
by one entry, which says how many there were and tells the same of usage (`core.training.metering.folded`); so one
entry stays for each training that there ever was.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime

from muster.core.training import metering
from muster.types import codec
from muster.types.event import Event

AT_ONCE = 2000  # entries that one transaction makes one of: others wait for it
_SLACK = 10  # there may be one part in so many more before any go


@dataclass(frozen=True)
class Keep:
    """How many entries; 0 for all."""

    each: int = 10_000
    all: int = 1_000_000


def surplus(connection: sqlite3.Connection, keep: Keep) -> Iterator[tuple[str, int]]:
    """Of which trainings entries have to go, and up to which one."""
    if keep.each:
        counted = "SELECT uid, count(*) FROM events WHERE uid <> '' GROUP BY uid HAVING count(*) > ?"
        for uid, count in connection.execute(counted, (keep.each + keep.each // _SLACK,)).fetchall():
            last = "SELECT id FROM events WHERE uid = ? ORDER BY id LIMIT 1 OFFSET ?"
            yield uid, connection.execute(last, (uid, count - keep.each)).fetchone()[0]
    total = connection.execute("SELECT count(*) FROM events").fetchone()[0]
    if keep.all and total > keep.all + keep.all // _SLACK:
        last = "SELECT id FROM events ORDER BY id LIMIT 1 OFFSET ?"
        upto = connection.execute(last, (total - keep.all,)).fetchone()[0]
        oldest = "SELECT uid FROM events WHERE id <= ? AND uid <> '' GROUP BY uid HAVING count(*) > 1"
        yield from ((uid, upto) for (uid,) in connection.execute(oldest, (upto,)).fetchall())


def fold(connection: sqlite3.Connection, uid: str, upto: int, now: datetime) -> int:
    """Make one entry of the oldest of a training, within the transaction that is open; how many are gone."""
    rows = connection.execute(
        "SELECT id, body FROM events WHERE uid = ? AND id <= ? ORDER BY id LIMIT ?", (uid, upto, AT_ONCE)
    ).fetchall()
    if len(rows) < 2:
        return 0
    events = [codec.from_wire(Event, json.loads(body) | {"id": number}, strict=False) for number, body in rows]
    one = metering.folded(events, now)
    body = json.dumps(codec.to_wire(one), ensure_ascii=False, separators=(",", ":"))
    connection.execute("UPDATE events SET body = ? WHERE id = ?", (body, one.id))
    connection.execute("DELETE FROM events WHERE uid = ? AND id < ?", (uid, one.id))
    return len(rows) - 1

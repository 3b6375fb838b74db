"""What the store on disk promises beyond the contract: the file outlives its process and guards itself."""

from __future__ import annotations

import asyncio
import sqlite3
import stat
import threading
from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from muster import errors
from muster.core.training import metering
from muster.ports import Filter, Record, Write
from muster.store import schema
from muster.store.database import Database, Foreign
from muster.store.entries import Keep
from muster.store.ledger import Entry
from muster.store.sqlite import SqliteStore
from muster.types.event import TRIMMED, Event
from tests.store.files import opened, sql
from tests.training_builders import BIRTH, a_rank_exit, a_status, a_training, key_of

ALL = Filter()
NOW = BIRTH + timedelta(days=30)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "home" / "store.db"


# Reopening ---------------------------------------------------------------------------------------


def test_everything_is_there_after_reopening(path: Path) -> None:
    ends = {"running": None, "never-began": (), "done": (a_rank_exit(0, 1),)}

    async def before(store: SqliteStore) -> None:
        for name, rank_exits in ends.items():
            status = a_status(rank_exits=rank_exits)
            await store.write(Write(put=a_training(name, status=status, labels={"n": name}), events=[Event(name)]))
        await store.write(Write(put=a_training("gone"), records=[Record("runs", "x", {"n": 1})]))
        await store.write(Write(delete=key_of("gone"), lazy=True))

    async def after(store: SqliteStore) -> None:
        assert store.version == 5
        for name, rank_exits in ends.items():
            found = store.get(key_of(name))
            assert found is not None and found.training.status.rank_exits == rank_exits
            assert dict(found.labels) == {"n": name}
        assert [one.key.name for one in store.page(ALL).items] == ["done", "never-began", "running"]
        assert [(event.id, event.reason) for event in await store.events()] == list(enumerate(ends, 1))
        assert store.record("runs", "x") == {"n": 1}
        written = await store.write(Write(put=a_training("next"), expect=0, events=[Event("next")]))
        assert written is not None and written.version == 6
        assert (await store.events(after=3))[0].id == 4

    opened(path, before)
    opened(path, after)


def test_a_watch_is_resumed_across_a_restart_until_its_version_is_compacted(path: Path) -> None:
    async def write_some(store: SqliteStore) -> None:
        await asyncio.gather(*(store.write(Write(put=a_training(f"t{n}"))) for n in range(15)))

    async def resume(store: SqliteStore) -> None:
        changes = store.changes(5, ALL)
        told = [await anext(changes) for _ in range(10)]
        assert [change.version for change in told] == list(range(6, 16))
        assert told[0].stored.training.metadata.resource_version == "6"
        waiting = asyncio.ensure_future(anext(changes))
        await store.write(Write(put=a_training("later")))
        assert (await waiting).stored.key.name == "later"
        with pytest.raises(errors.Compacted):
            await anext(store.changes(5, ALL))

    opened(path, write_some, keep_changes=10)
    opened(path, resume, keep_changes=10)


def test_the_file_can_be_read_by_its_owner_only(path: Path) -> None:
    async def story(store: SqliteStore) -> None:
        await store.write(Write(put=a_training()))
        modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
        assert set(modes) == {"store.db", "store.db-wal", "store.db-shm", "store.db.lock"}
        assert set(modes.values()) == {0o600}

    path.parent.mkdir()
    path.touch(mode=0o644)
    opened(path, story)


def test_a_file_cannot_be_opened_twice(path: Path) -> None:
    async def story(store: SqliteStore) -> None:
        with pytest.raises(errors.MusterError, match=r"store\.db is in use") as raised:
            SqliteStore.open(path)
        assert raised.value.code == "store_busy"
        await store.write(Write(put=a_training()))

    opened(path, story)
    opened(path, story)  # and the lock is gone with its holder


def test_closing_twice_is_closing(path: Path) -> None:
    async def story(store: SqliteStore) -> None:
        await store.close()
        with pytest.raises(errors.Unavailable):
            await store.write(Write(put=a_training()))

    opened(path, story)  # which closes it again
    opened(path, story)


# Schema ------------------------------------------------------------------------------------------

LAYOUT_1 = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE objects (namespace TEXT NOT NULL, name TEXT NOT NULL, uid TEXT NOT NULL, version INTEGER NOT NULL,
    phase TEXT NOT NULL, labels TEXT NOT NULL, spec_hash TEXT NOT NULL, body TEXT NOT NULL,
    PRIMARY KEY (namespace, name));
CREATE TABLE changes (version INTEGER PRIMARY KEY, type TEXT NOT NULL, namespace TEXT NOT NULL, name TEXT NOT NULL,
    uid TEXT NOT NULL, stored_version INTEGER NOT NULL, phase TEXT NOT NULL, labels TEXT NOT NULL, body TEXT NOT NULL);
CREATE TABLE events (id INTEGER PRIMARY KEY AUTOINCREMENT, at TEXT NOT NULL, namespace TEXT NOT NULL,
    training TEXT NOT NULL, uid TEXT NOT NULL, body TEXT NOT NULL);
INSERT INTO meta VALUES ('schema', '1');
"""


def make_layout_1(path: Path) -> None:
    """A file as the first layout had it, with what a current one holds."""

    async def fill(store: SqliteStore) -> None:
        await store.write(Write(put=a_training("a", generation=3, labels={"k": "v"}), events=[Event("Created")]))
        await store.write(Write(put=a_training("b", generation=1)))

    newer = path.with_name("newer.db")
    opened(newer, fill)
    old = sqlite3.connect(path)
    old.executescript(LAYOUT_1 + f"ATTACH '{newer}' AS newer;")
    columns = "namespace, name, uid, version, phase, labels, spec_hash, body"
    old.executescript(
        f"INSERT INTO objects SELECT {columns} FROM newer.objects;"
        "INSERT INTO changes SELECT * FROM newer.changes; INSERT INTO events SELECT * FROM newer.events;"
    )
    old.close()


def test_an_older_layout_is_migrated_with_all_that_it_holds(path: Path) -> None:
    path.parent.mkdir()
    make_layout_1(path)

    async def story(store: SqliteStore) -> None:
        assert store.version == 2, "a migration is no change of any object"
        found = store.get(key_of("a"))
        assert found is not None and found.training.generation == 3 and dict(found.labels) == {"k": "v"}
        assert [event.reason for event in await store.events(training="a")] == ["Created"]
        await store.write(Write(records=[Record("runs", "x", {"n": 1})]))

    async def again(store: SqliteStore) -> None:
        assert store.record("runs", "x") == {"n": 1} and store.version == 2

    opened(path, story)
    opened(path, again)
    assert sql(path, "SELECT value FROM meta WHERE name = 'schema'") == [(str(schema.VERSION),)]


def test_a_migration_that_fails_leaves_the_old_layout(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.parent.mkdir()
    make_layout_1(path)
    with monkeypatch.context() as patched:
        patched.setattr(schema, "_RECORDS", (*schema._RECORDS, "CREATE TABLE objects (already_there)"))
        with pytest.raises(errors.Unavailable, match="already exists"):
            SqliteStore.open(path)
    assert sql(path, "SELECT value FROM meta WHERE name = 'schema'") == [("1",)]
    assert sql(path, "SELECT count(*) FROM sqlite_master WHERE name = 'records'") == [(0,)]

    async def story(store: SqliteStore) -> None:
        assert store.version == 2

    opened(path, story)


def test_a_newer_layout_is_refused_untouched(path: Path) -> None:
    async def story(store: SqliteStore) -> None:
        await store.write(Write(put=a_training()))

    opened(path, story)
    sql(path, "UPDATE meta SET value = '9' WHERE name = 'schema'")
    before = path.read_bytes()
    with pytest.raises(errors.MusterError, match=r"store\.db has schema version 9; .* up to 2") as raised:
        SqliteStore.open(path)
    assert raised.value.code == "store_too_new" and raised.value.hint
    assert path.read_bytes() == before


def test_a_file_that_is_not_a_database_is_refused_with_its_name(path: Path) -> None:
    path.parent.mkdir()
    path.write_bytes(b"not a database" * 100)
    with pytest.raises(errors.Unavailable, match=r"store\.db cannot be opened") as raised:
        SqliteStore.open(path)
    assert "not muster's" in raised.value.hint and not raised.value.retryable
    path.unlink()
    sql(path, "CREATE TABLE someone_elses (a)")
    with pytest.raises(errors.MusterError, match="not one of muster's"):
        SqliteStore.open(path)


# Committing --------------------------------------------------------------------------------------


class Gate:
    """Holds transactions up until it is opened, and counts them; a transaction can be made to fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sizes: list[int] = []
        self.durable: list[bool] = []
        self.open = threading.Event()
        self.open.set()
        self.entered = threading.Event()
        self.fails = False
        real = Database.commit

        def commit(database: Database, entries: Iterable[Entry], *, durable: bool) -> Foreign | None:
            entries = list(entries)
            self.sizes.append(len(entries))
            self.durable.append(durable)
            self.entered.set()
            assert self.open.wait(10)
            if self.fails:
                raise errors.Unavailable("the disk is gone", hint="bring it back") from OSError(5, "I/O")
            return real(database, entries, durable=durable)

        monkeypatch.setattr(Database, "commit", commit)

    async def held(self) -> None:
        assert await asyncio.to_thread(self.entered.wait, 10)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    return Gate(monkeypatch)


def test_what_comes_during_a_transaction_goes_into_the_next_together(path: Path, gate: Gate) -> None:
    async def story(store: SqliteStore) -> None:
        gate.open.clear()
        first = asyncio.create_task(store.write(Write(put=a_training("first"))))
        await gate.held()
        rest = [asyncio.create_task(store.write(Write(put=a_training(f"t{n}")))) for n in range(50)]
        await asyncio.sleep(0)
        gate.open.set()
        await asyncio.gather(first, *rest)
        assert gate.sizes == [1, 50]

    opened(path, story)


def test_a_fault_of_the_writer_fails_the_write_and_not_the_store(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(*_: object, **__: object) -> None:
        raise RuntimeError("a fault")

    async def story(store: SqliteStore) -> None:
        with monkeypatch.context() as patch, pytest.raises(errors.Unavailable, match="writer failed: RuntimeError"):
            patch.setattr(Database, "commit", faulty)
            await store.write(Write(put=a_training("first")))
        assert store.get(a_training("first").key) is None
        await store.write(Write(put=a_training("second")))

    opened(path, story)


def test_nobody_sees_a_change_before_it_is_durable(path: Path, gate: Gate) -> None:
    async def story(store: SqliteStore) -> None:
        heard: list[int] = []
        store.subscribe(lambda change: heard.append(change.version))
        watch = asyncio.ensure_future(anext(store.changes(0, ALL)))
        gate.open.clear()
        record = Record("runs", "x", {})
        writing = asyncio.create_task(store.write(Write(put=a_training(), events=[Event("Created")], records=[record])))
        await gate.held()
        assert store.get(key_of()) is None and store.page(ALL).items == () and store.version == 0
        assert store.record("runs", "x") is None and await store.events() == []
        assert not watch.done() and heard == []
        second = asyncio.create_task(store.write(Write(put=a_training(), expect=0)))
        await asyncio.sleep(0)
        assert not second.done(), "a refusal waits until what it rests on can be read"
        gate.open.set()
        await writing
        with pytest.raises(errors.AlreadyExists):
            await second
        assert (await watch).version == 1 and heard == [1] and store.version == 1
        assert len(await store.events()) == 1

    opened(path, story)


def test_a_write_goes_on_when_its_caller_gives_up(path: Path, gate: Gate) -> None:
    async def story(store: SqliteStore) -> None:
        gate.open.clear()
        writing = asyncio.create_task(store.write(Write(put=a_training())))
        await gate.held()
        writing.cancel()
        behind = asyncio.create_task(store.write(Write(put=a_training("behind"))))
        gate.open.set()
        await behind
        assert store.get(key_of()) is not None

    opened(path, story)


def test_cancelling_every_task_leaves_no_doubt_about_what_is_written(path: Path, gate: Gate) -> None:
    async def story(store: SqliteStore) -> None:
        before = asyncio.all_tasks()
        gate.open.clear()
        writing = asyncio.create_task(store.write(Write(put=a_training())))
        await gate.held()
        for task in asyncio.all_tasks() - before:
            task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await writing
        gate.open.set()
        written = await store.write(Write(put=a_training(spares=1), expect=1))
        assert written is not None and written.version == 2

    opened(path, story)


def test_closing_waits_for_what_is_under_way(path: Path, gate: Gate) -> None:
    async def story(store: SqliteStore) -> None:
        gate.open.clear()
        writing = [asyncio.create_task(store.write(Write(put=a_training(f"t{n}")))) for n in range(3)]
        await gate.held()
        closing = asyncio.create_task(store.close())
        await asyncio.sleep(0)
        with pytest.raises(errors.Unavailable, match="closed"):
            await store.write(Write(put=a_training("late")))
        gate.open.set()
        await closing
        assert [one.version for one in await asyncio.gather(*writing) if one] == [1, 2, 3]

    opened(path, story)


def test_only_lazy_writes_alone_are_not_forced_to_disk(path: Path, gate: Gate) -> None:
    async def story(store: SqliteStore) -> None:
        await store.write(Write(put=a_training("a"), lazy=True))
        lazy = store.write(Write(put=a_training("b"), lazy=True))
        await asyncio.gather(lazy, store.write(Write(put=a_training("c"))))
        assert gate.durable == [False, True]

    opened(path, story)


def test_a_failed_transaction_fails_all_that_waited_and_leaves_nothing(path: Path, gate: Gate) -> None:
    async def story(store: SqliteStore) -> None:
        await store.write(Write(put=a_training("kept"), events=[Event("Created")]))
        gate.entered.clear()
        gate.open.clear()
        gate.fails = True
        lost = [asyncio.create_task(store.write(Write(put=a_training("a"), expect=0, events=[Event("A")])))]
        await gate.held()
        lost.append(asyncio.create_task(store.write(Write(put=a_training("a", spares=1), expect=2))))
        lost.append(asyncio.create_task(store.write(Write(delete=key_of("kept"), expect=1))))
        await asyncio.sleep(0)
        gate.open.set()
        for end in await asyncio.gather(*lost, return_exceptions=True):
            assert isinstance(end, errors.Unavailable) and end.hint == "bring it back"
            assert isinstance(end.__cause__, OSError)
        assert store.version == 1 and store.get(key_of("a")) is None
        gate.fails = False
        written = await store.write(Write(put=a_training("a"), expect=0, events=[Event("A again")]))
        assert written is not None and written.version == 2
        assert [(event.id, event.reason) for event in await store.events()] == [(1, "Created"), (2, "A again")]
        assert await store.write(Write(delete=key_of("kept"), expect=1)) is None

    opened(path, story)


def test_what_was_refused_because_of_a_write_that_then_fails_is_decided_again(path: Path, gate: Gate) -> None:
    async def story(store: SqliteStore) -> None:
        gate.open.clear()
        gate.fails = True
        first = asyncio.create_task(store.write(Write(put=a_training(spares=1), expect=0)))
        await gate.held()
        second = asyncio.create_task(store.write(Write(put=a_training(spares=2), expect=0)))
        await asyncio.sleep(0)
        first.add_done_callback(lambda _: setattr(gate, "fails", False))
        gate.open.set()
        with pytest.raises(errors.Unavailable):
            await first
        written = await second
        assert written is not None and (written.version, written.training.spec.spares) == (1, 2)

    opened(path, story)


def test_a_full_disk_is_said_and_nothing_is_half_written(path: Path) -> None:
    async def story(store: SqliteStore) -> None:
        await store.write(Write(put=a_training("before"), events=[Event("Created")]))
        database = store._database
        database._writer.execute("PRAGMA max_page_count = 40")
        ends: list[object] = []
        while not any(isinstance(end, Exception) for end in ends):
            assert len(ends) < 1000
            big = [Write(put=a_training(f"t{len(ends)}-{n}", args=("x" * 4000,)), events=[Event("T")]) for n in (1, 2)]
            ends += await asyncio.gather(*map(store.write, big), return_exceptions=True)
        assert isinstance(ends[-1], errors.Unavailable) and isinstance(ends[-2], errors.Unavailable)
        assert "full" in ends[-1].message and "make room" in ends[-1].hint
        held = len(ends) - 2 + 1
        assert len(store.page(ALL).items) == store.version == held
        assert sql(path, "SELECT count(*), max(version) FROM changes") == [(held, held)]
        assert sql(path, "SELECT (SELECT count(*) FROM objects), (SELECT count(*) FROM events)") == [(held, held)]
        database._writer.execute("PRAGMA max_page_count = 1000000")
        written = await store.write(Write(put=a_training("after"), expect=0))
        assert written is not None and written.version == held + 1

    opened(path, story)


# The journal does not grow for ever --------------------------------------------------------------


def _told(name: str, first: int, count: int) -> list[Event]:
    """A worker starts, runs for ten seconds and exits, over and over."""
    found = []
    for number in range(first, first + count):
        at = BIRTH + timedelta(seconds=20 * number)
        data = {"worker": f"{name}-{number}", "gpus": 1}
        start = Event("WorkerStarted", data=data, at=at, namespace="default", training=name, uid=f"uid-{name}")
        found += [start, replace(start, reason="WorkerExited", at=at + timedelta(seconds=10))]
    return found


def test_the_oldest_entries_go_and_their_usage_stays(path: Path) -> None:
    async def fill(store: SqliteStore) -> None:
        for begin in range(0, 6000, 500):
            await store.write(Write(events=_told("chatty", begin, 500), lazy=True))
        await store.write(Write(events=_told("quiet", 0, 3)))
        assert await store.trim_events(Keep(each=1000, all=0), NOW) == 11_000
        assert await store.trim_events(Keep(each=1000, all=0), NOW) == 0, "once"
        first, *rest = await store.events(uid="uid-chatty")
        assert len(rest) + 1 == 1000 and first.reason == TRIMMED
        assert first.message == "11001 older entries were dropped; what they tell of usage is kept"
        assert [event.id for event in rest] == list(range(11_002, 12_001)), "ids stay, and what is newest"
        assert len(await store.events(uid="uid-quiet")) == 6
        assert store.last_event == 12_006

    async def look(store: SqliteStore) -> None:
        found = metering.totals(metering.intervals(await store.events(), NOW), now=NOW)
        assert [(one.training, one.workers, one.worker_seconds) for one in found] == [
            ("chatty", 6000, 60_000.0),
            ("quiet", 3, 30.0),
        ]
        assert await store.trim_events(Keep(each=0, all=100), NOW) > 800
        assert len(await store.events()) <= 110
        found = metering.totals(metering.intervals(await store.events(), NOW), now=NOW)
        assert sum(one.worker_seconds for one in found) == 60_030.0

    opened(path, fill)
    opened(path, look)


def test_what_cannot_be_read_of_a_journal_stays_and_holds_up_no_other(path: Path) -> None:
    async def fill(store: SqliteStore) -> None:
        await store.write(Write(events=[*_told("a", 0, 300), *_told("b", 0, 300)]))

    opened(path, fill)
    sql(path, "UPDATE events SET body = '{' WHERE id = 3")

    async def trim(store: SqliteStore) -> None:
        await store.trim_events(Keep(each=100, all=0), NOW)
        assert len(await store.events(uid="uid-b")) == 100

    opened(path, trim)
    assert sql(path, "SELECT count(*) FROM events WHERE uid = 'uid-a'") == [(600,)]

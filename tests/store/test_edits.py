"""What happens when someone edits the database around the API."""

from __future__ import annotations

import asyncio
import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from muster import errors
from muster.ports import Filter, Stored, Write
from muster.store.sqlite import SqliteStore
from muster.types.event import Event
from tests.store.files import opened, sql
from tests.training_builders import a_training, key_of

SET = "UPDATE objects SET body = json_set(body, '$.spec.spares', {}) WHERE name = 'demo'"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


def the(store: SqliteStore, name: str = "demo") -> Stored:
    found = store.get(key_of(name))
    assert found is not None
    return found


async def create(store: SqliteStore) -> None:
    await store.write(Write(put=a_training(generation=4, env={"A": "1"}), expect=0))


def edit_body(path: Path, **changes: object) -> None:
    """As a careful editor would: read the JSON, change top-level parts of it, write it back."""
    ((body,),) = sql(path, "SELECT body FROM objects WHERE name = 'demo'")
    data = json.loads(str(body))
    for part, more in changes.items():
        assert isinstance(more, dict)
        data[part] |= more
    sql(path, "UPDATE objects SET body = ? WHERE name = 'demo'", json.dumps(data, indent=2))


def test_an_edit_of_the_spec_by_another_process_is_published_with_a_new_generation(path: Path) -> None:
    async def story(store: SqliteStore) -> None:
        await create(store)
        changes = store.changes(1, Filter())
        program = "import sqlite3, sys; c = sqlite3.connect(sys.argv[1]); c.execute(sys.argv[2]); c.commit()"
        subprocess.run([sys.executable, "-c", program, path, SET.format(7)], check=True)  # noqa: ASYNC221
        assert the(store).training.spec.spares == 0
        await store.refresh()
        change = await anext(changes)
        assert (change.type, change.version) == ("MODIFIED", 2)
        assert (change.stored.training.spec.spares, change.stored.training.generation) == (7, 5)
        assert change.stored.training.metadata.resource_version == "2"
        await store.refresh()
        assert store.version == 2, "an edit is taken up once"

    async def after(store: SqliteStore) -> None:
        assert store.version == 2 and the(store).training.generation == 5

    opened(path, story)
    opened(path, after)


def test_an_edit_while_nobody_was_there_is_found_at_start(path: Path) -> None:
    async def after(store: SqliteStore) -> None:
        assert (the(store).version, the(store).training.generation, the(store).training.spec.spares) == (2, 5, 7)
        change = await anext(store.changes(1, Filter()))
        assert (change.type, change.stored.training.spec.spares) == ("MODIFIED", 7)

    opened(path, create)
    sql(path, SET.format(7))
    opened(path, after)
    opened(path, after)


def test_an_editor_that_counts_generations_is_believed(path: Path) -> None:
    async def story(store: SqliteStore) -> None:
        await create(store)
        edit_body(path, spec={"spares": 2}, metadata={"generation": 9})
        await store.refresh()
        assert the(store).training.generation == 9
        edit_body(path, spec={"spares": 3}, metadata={"generation": 1})
        await store.refresh()
        assert the(store).training.generation == 10, "a generation never shrinks"

    opened(path, story)


def test_an_edit_that_leaves_the_spec_as_it_was_makes_no_generation(path: Path) -> None:
    async def story(store: SqliteStore) -> None:
        await create(store)
        edit_body(path, metadata={"labels": {"team": "x"}}, spec={"stopGraceSeconds": 15})
        await store.refresh()
        found = the(store)
        assert (found.version, found.training.generation, dict(found.labels)) == (2, 4, {"team": "x"})

    opened(path, story)


@pytest.mark.parametrize(
    "body",
    [
        "",
        "{",
        "[]",
        "null",
        '{"metadata": {"name": "demo"}}',
        '{"metadata": {"name": "demo", "uid": "other"}, "spec": {"script": "x"}}',
        '{"metadata": {"name": "renamed"}, "spec": {"script": "x"}}',
        "[" * 100_000,
    ],
)
def test_an_edit_that_cannot_be_read_is_said_and_undone(
    path: Path, body: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def check(store: SqliteStore) -> None:
        found = the(store)
        assert (found.training.generation, found.training.spec.env) == (4, {"A": "1"})
        assert "default/demo was edited" in caplog.text and "stays as it was" in caplog.text
        ((kept,),) = sql(path, "SELECT body FROM objects")
        assert str(kept).encode() == found.raw

    async def during(store: SqliteStore) -> None:
        await create(store)
        sql(path, "UPDATE objects SET body = ?", body)
        await store.refresh()
        await check(store)

    opened(path, during)
    caplog.clear()
    sql(path, "UPDATE objects SET body = ?", body)
    opened(path, check)


def test_an_edit_against_the_rules_of_a_spec_is_undone(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def story(store: SqliteStore) -> None:
        await create(store)
        edit_body(path, spec={"worldSize": {"min": 3, "target": 2, "max": 1}})
        await store.refresh()
        assert the(store).training.spec.world_size.min == 1
        assert "the target (2) is below the minimum (3)" in caplog.text

    opened(path, story)


def test_a_row_that_nobody_can_read_does_not_keep_the_others_from_being_served(
    path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def before(store: SqliteStore) -> None:
        await create(store)
        await store.write(Write(put=a_training("other")))

    async def after(store: SqliteStore) -> None:
        assert store.get(key_of()) is None and the(store, "other").version == 2
        assert "left alone" in caplog.text

    opened(path, before)
    sql(path, "DELETE FROM changes WHERE name = 'demo'")
    sql(path, "UPDATE objects SET body = '{' WHERE name = 'demo'")
    opened(path, after)


def test_a_write_that_was_decided_before_an_edit_was_known_does_not_undo_it(path: Path) -> None:
    async def story(store: SqliteStore) -> None:
        await create(store)
        sql(path, SET.format(7))
        with pytest.raises(errors.Conflict, match="version 2, not 1"):
            await store.write(Write(put=a_training(spares=1), expect=1, events=[Event("Lost")]))
        assert the(store).training.spec.spares == 7
        assert await store.events() == []
        sql(path, SET.format(8))
        other, mine = await asyncio.gather(
            store.write(Write(put=a_training("other"), expect=0)),
            store.write(Write(put=a_training(spares=1), expect=2)),
            return_exceptions=True,
        )
        assert isinstance(other, Stored) and isinstance(mine, errors.Conflict)
        assert the(store).training.spec.spares == 8

    opened(path, story)


def test_rows_removed_or_added_by_hand_are_published(path: Path) -> None:
    async def story(store: SqliteStore) -> None:
        await create(store)
        await store.write(Write(put=a_training("twin")))
        sql(path, "DELETE FROM objects WHERE name = 'twin'")
        sql(
            path,
            "INSERT INTO events (at, namespace, training, uid, body) VALUES ('', '', '', '', '{\"reason\": \"X\"}')",
        )
        body = json.dumps(a_training("new", uid="u").to_wire())
        columns = "namespace, name, uid, version, phase, labels, spec_hash, body"
        sql(path, f"INSERT INTO objects ({columns}) VALUES ('default', 'new', 'u', 0, '', '', '', ?)", body)
        changes = store.changes(2, Filter())
        await store.write(Write(put=a_training("after"), events=[Event("Y")]))
        told = [await anext(changes) for _ in range(3)]
        names = [(change.type, change.stored.key.name) for change in told]
        assert names == [("ADDED", "new"), ("DELETED", "twin"), ("ADDED", "after")]
        assert [(event.id, event.reason) for event in await store.events()] == [(1, "X"), (2, "Y")]

    opened(path, story)


def test_looking_for_edits_costs_no_version_and_no_log_line(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def story(store: SqliteStore) -> None:
        await create(store)
        await store.refresh()
        await store.write(Write(put=a_training("other")))
        await store.refresh()
        assert store.version == 2

    with caplog.at_level(logging.INFO):
        opened(path, story)
    assert caplog.messages == []

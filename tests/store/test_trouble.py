"""What cannot be written is said, once, and is over when something was written."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path

import pytest

from muster import errors
from muster.ports import Record, Write
from muster.store import room
from muster.store.database import Database, Foreign
from muster.store.ledger import Entry
from muster.store.room import Space
from muster.store.sqlite import SqliteStore
from tests.store.files import opened
from tests.training_builders import a_training

KB = 1024


@pytest.mark.parametrize(
    ("left", "was_low", "low"),
    [
        (Space(free=0, total=10**12), False, True),
        (Space(free=1000 * KB, total=10**12), False, True),
        (Space(free=1500 * KB, total=10**12), False, False),
        (Space(free=1500 * KB, total=10**12), True, True),
        (Space(free=3000 * KB, total=10**12), True, False),
        (Space(free=200 * KB, total=8192 * KB), False, False),  # a small disk is not full because it is small
        (Space(free=100 * KB, total=8192 * KB), False, True),
        (Space(free=10**9, total=10**12, files=3), False, True),
        (Space(free=10**9, total=10**12, files=300), True, False),
    ],
)
def test_a_disk_is_full_when_little_is_left_and_until_there_is_enough_again(
    left: Space, was_low: bool, low: bool
) -> None:
    assert left.is_low(was_low=was_low) == low


def test_a_file_owns_blocks_beyond_its_end_and_is_no_longer_for_it(tmp_path: Path) -> None:
    with open(tmp_path / "file", "wb", buffering=0) as file:
        file.write(b"x" * 5000)
        room.own(file.fileno(), 1 << 20, room.space(tmp_path).free)
        assert (tmp_path / "file").stat().st_size == 5000
        if not (tmp_path / "file").stat().st_blocks * 512 >= 1 << 20:
            pytest.skip("this file system gives no blocks beforehand")


def test_what_is_kept_for_the_start_is_given_up_and_made_again(tmp_path: Path) -> None:
    room.make(tmp_path / "reserve")
    assert (tmp_path / "reserve").stat().st_size == room.space(tmp_path).part(room.IN_RESERVE)
    room.give_up(tmp_path / "reserve")
    room.give_up(tmp_path / "reserve")
    assert not (tmp_path / "reserve").exists()


def test_a_disk_with_little_room_takes_nothing_new(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story(store: SqliteStore) -> None:
        await store.write(Write(put=a_training("known"), expect=0))
        await store.refresh()
        assert store.trouble is None
        monkeypatch.setattr(room, "space", lambda path: Space(0, 1 << 30))
        await store.refresh()
        assert store.trouble is not None and not store.trouble.stuck
        assert "nothing new is taken; what is shown is true" in str(store.trouble)
        with pytest.raises(errors.Unavailable, match="is full"):
            await store.write(Write(put=a_training("new"), expect=0))
        await store.write(Write(put=a_training("known", spares=1)))
        monkeypatch.setattr(room, "space", lambda path: Space(1 << 29, 1 << 30))
        await store.refresh()
        assert store.trouble is None
        await store.write(Write(put=a_training("new"), expect=0))

    opened(tmp_path / "store.db", story)


def test_what_cannot_be_written_is_old_until_something_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real, full = Database.commit, True

    def commit(database: Database, entries: Iterable[Entry], *, durable: bool) -> Foreign | None:
        decided = list(entries)
        if full and any(entry != Entry() for entry in decided):
            raise errors.Unavailable("store.db cannot be written: database or disk is full")
        return real(database, decided, durable=durable)

    async def story(store: SqliteStore) -> None:
        nonlocal full
        for _ in range(20):
            with pytest.raises(errors.Unavailable):
                await store.write(Write(put=a_training()))
            await store.refresh()
        assert store.trouble is not None and store.trouble.stuck
        assert "cannot write since" in str(store.trouble) and "may be as old as that" in str(store.trouble)
        full = False
        await store.refresh()
        assert store.trouble is not None, "an empty transaction is no proof"
        await store.write(Write(records=[Record("control", "x", {})]))
        assert store.trouble is None

    monkeypatch.setattr(Database, "commit", commit)
    with caplog.at_level(logging.WARNING, "muster.store"):
        opened(tmp_path / "store.db", story)
    assert len(caplog.records) == 2, "once when it began, and once when it was over"

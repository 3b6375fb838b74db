"""A backup is whole or it is refused, and nothing is lost by a restore that is refused or killed."""

from __future__ import annotations

import functools
import hashlib
import io
import json
import os
import shutil
import signal
import sqlite3
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from muster import errors
from muster.daemon import backups, home
from muster.ports import Filter, Write
from muster.store.sqlite import SqliteStore
from muster.types.event import Event
from tests.daemon.test_home import contents, serve
from tests.training_builders import a_training

MOST_STEPS = 60


def a_home(folder: Path, *names: str) -> Path:
    async def story(store: SqliteStore) -> None:
        for name in names:
            await store.write(Write(put=a_training(name), events=[Event("Created")]))

    serve(folder, story=story)
    (folder / "tokens.json").write_text("[]")
    return folder


def names_in(folder: Path) -> list[str]:
    found: list[str] = []

    def story(store: SqliteStore) -> None:
        found.extend(one.key.name for one in store.page(Filter()).items)

    serve(folder, story=story)
    return found


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return a_home(tmp_path / "home", "first")


@pytest.fixture
def backup(place: Path, tmp_path: Path) -> Path:
    backups.make(place, tmp_path / "kept.tar")
    return tmp_path / "kept.tar"


def everything(folder: Path) -> dict[str, bytes]:
    names = ("identity.json", "tokens.json", "logs/.home", "reached")
    return {**contents(folder), **{name: (folder / name).read_bytes() for name in names if (folder / name).exists()}}


# Making one --------------------------------------------------------------------------------------


def test_a_backup_is_one_private_file_with_all_that_is_needed(place: Path, backup: Path) -> None:
    assert stat.S_IMODE(backup.stat().st_mode) == 0o600 and backup.stat().st_nlink == 1
    with tarfile.open(backup) as tar:
        assert tar.getnames() == ["manifest.json", "tokens.json", "muster.db"]
    assert sorted(path.name for path in backup.parent.iterdir()) == ["home", "kept.tar"], "and nothing else is left"
    made = home.read_identity(place)
    assert made is not None and made.secret.encode() not in backup.read_bytes()


def test_a_backup_takes_no_other_files_place_unasked(place: Path, backup: Path) -> None:
    before = backup.read_bytes()
    with pytest.raises(errors.AlreadyExists, match="exists already"):
        backups.make(place, backup)
    assert backup.read_bytes() == before
    backups.make(place, backup, force=True)


def test_there_is_no_backup_of_nothing_and_none_of_what_is_damaged(place: Path, tmp_path: Path) -> None:
    with pytest.raises(errors.NotFound, match="nothing to back up"):
        backups.make(tmp_path / "nowhere", tmp_path / "a.tar")
    os.truncate(place / "muster.db", 8192)
    with pytest.raises(errors.MusterError, match="is damaged"):
        backups.make(place, tmp_path / "a.tar")
    assert not (tmp_path / "a.tar").exists() and not (tmp_path / "nowhere").exists()


def test_a_place_that_cannot_be_written_is_said(place: Path, tmp_path: Path) -> None:
    with pytest.raises(errors.MusterError, match="cannot be written: No such file"):
        backups.make(place, tmp_path / "no" / "such" / "folder.tar")


# Putting one back --------------------------------------------------------------------------------


def test_a_home_is_made_again_from_its_backup_alone(place: Path, backup: Path, tmp_path: Path) -> None:
    was = home.read_identity(place)
    shutil.rmtree(place)
    done = backups.restore(place, backup)
    assert (done.trainings, done.files, done.before) == (1, ("tokens.json",), None)
    assert names_in(place) == ["first"]
    now = home.read_identity(place)
    assert was is not None and now is not None and now.id == was.id
    assert stat.S_IMODE((place / "muster.db").stat().st_mode) == 0o600


def test_what_was_there_is_kept_beside_and_revoked_tokens_stay_revoked(place: Path, backup: Path) -> None:
    serve(place, story=lambda store: store.write(Write(put=a_training("second"))))
    (place / "tokens.json").write_text("[ ]")
    done = backups.restore(place, backup)
    assert done.before is not None and "muster.db.before-restore-" in done.before and done.files == ()
    assert (place / "tokens.json").read_text() == "[ ]"
    assert names_in(place) == ["first"]
    backups.restore(place, Path(done.before))
    assert names_in(place) == ["first", "second"]


def test_nothing_is_numbered_twice(place: Path, backup: Path) -> None:
    async def more(store: SqliteStore) -> None:
        await store.write(Write(put=a_training("second"), events=[Event("Created")]))

    serve(place, story=more)
    backups.restore(place, backup)

    async def story(store: SqliteStore) -> None:
        assert store.version > 1000
        with pytest.raises(errors.Compacted):
            await anext(store.changes(1, Filter()))
        written = await store.write(Write(put=a_training("third"), events=[Event("Created")]))
        assert written is not None and written.version > 1000
        assert [event.id > 1000 for event in await store.events()] == [False, True]

    serve(place, story=story)


def test_a_database_of_before_a_restore_is_older_than_what_came_after_it(place: Path, backup: Path) -> None:
    serve(place, story=lambda store: store.write(Write(put=a_training("second"))))
    shutil.copy(place / "muster.db", place / "by-hand")
    backups.restore(place, backup)
    serve(place)
    shutil.copy(place / "by-hand", place / "muster.db")
    with pytest.raises(errors.MusterError, match="has lost the last 1 write"):
        serve(place)


@pytest.mark.parametrize("old", ["muster.db", "kept.tar"])
def test_what_is_of_another_home_needs_a_word_more(place: Path, backup: Path, tmp_path: Path, old: str) -> None:
    other = a_home(tmp_path / "other", "elsewhere")
    what = other / "muster.db"
    if old == "kept.tar":
        what = tmp_path / "other.tar"
        backups.make(other, what)
    before = everything(place)
    with pytest.raises(errors.Conflict, match="is of another home") as refused:
        backups.restore(place, what)
    assert "--force" in refused.value.hint and everything(place) == before
    was = home.read_identity(place)
    backups.restore(place, what, force=True)
    assert names_in(place) == ["elsewhere"] and home.read_identity(place) == was


def test_a_copy_of_a_database_of_0_1_is_restored_if_asked_for(place: Path, tmp_path: Path) -> None:
    shutil.copy(place / "muster.db", tmp_path / "old.db")
    with sqlite3.connect(tmp_path / "old.db") as database:
        database.execute("DELETE FROM meta WHERE name <> 'schema'")
    database.close()
    with pytest.raises(errors.Conflict, match="of a home that nobody knows"):
        backups.restore(place, tmp_path / "old.db")
    backups.restore(place, tmp_path / "old.db", force=True)
    assert names_in(place) == ["first"]
    backups.restore(tmp_path / "new", tmp_path / "old.db")
    assert names_in(tmp_path / "new") == ["first"]


# What is refused ---------------------------------------------------------------------------------


def _again(backup: Path, change: Callable[[dict[str, Any], dict[str, bytes]], None], *, digests: bool = True) -> None:
    """Pack it again with something changed; with digests that fit, as somebody would who means it."""
    with tarfile.open(backup) as tar:
        held = {entry.name: (tar.extractfile(entry) or io.BytesIO()).read() for entry in tar.getmembers()}
    manifest = json.loads(held.pop("manifest.json"))
    change(manifest, held)
    if digests:
        manifest["files"] = {name: hashlib.sha256(raw).hexdigest() for name, raw in held.items()}
    with tarfile.open(backup, "w") as tar:
        for name, raw in {"manifest.json": json.dumps(manifest).encode(), **held}.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(raw)
            tar.addfile(entry, io.BytesIO(raw))


def _sql(raw: bytes, statement: str, folder: Path) -> bytes:
    (folder / "edited.db").write_bytes(raw)
    with sqlite3.connect(folder / "edited.db") as database:
        database.execute(statement)
    database.close()
    return (folder / "edited.db").read_bytes()


def _torn(backup: Path) -> None:
    os.truncate(backup, backup.stat().st_size // 2)


def _torn_early(backup: Path) -> None:
    os.truncate(backup, 700)


def _empty(backup: Path) -> None:
    os.truncate(backup, 0)


def _flipped(backup: Path) -> None:
    raw = bytearray(backup.read_bytes())
    raw[len(raw) - 20_000] ^= 0x01
    backup.write_bytes(raw)


def _forged_tokens(backup: Path) -> None:
    _again(backup, lambda manifest, held: held.update({"tokens.json": b'["mine"]'}))


def _forged_training(backup: Path) -> None:
    def change(manifest: dict[str, Any], held: dict[str, bytes]) -> None:
        held["muster.db"] = _sql(held["muster.db"], "DELETE FROM objects", backup.parent)

    _again(backup, change)


def _unsealed(backup: Path) -> None:
    _again(backup, lambda manifest, held: manifest.pop("seal"))


def _newer_format(backup: Path) -> None:
    _again(backup, lambda manifest, held: manifest.update(format=2))


def _stowaway(backup: Path) -> None:
    _again(backup, lambda manifest, held: held.update({"../../etc/cron.d/x": b"x"}))


def _no_database(backup: Path) -> None:
    def change(manifest: dict[str, Any], held: dict[str, bytes]) -> None:
        del held["muster.db"]

    _again(backup, change)


def _text(backup: Path) -> None:
    backup.write_text("hello")


def _pipe(backup: Path) -> None:
    backup.unlink()
    os.mkfifo(backup, 0o600)


def _writable_by_others(backup: Path) -> None:
    backup.chmod(0o666)


REFUSED = {
    _torn: "not all of one",
    _torn_early: "not a backup|not all of one",
    _empty: "not a backup",
    _flipped: "torn, or was changed",
    _forged_tokens: "its seal is broken",
    _forged_training: "its seal is broken",
    _unsealed: "its seal is broken",
    _newer_format: "a newer muster made it",
    _stowaway: "seal is broken",
    _no_database: "seal is broken",
    _text: "not a backup",
    _pipe: "not a regular file",
    _writable_by_others: "other users can write it",
}


@pytest.mark.parametrize(("spoil", "said"), REFUSED.items(), ids=lambda one: getattr(one, "__name__", ""))
def test_what_is_no_backup_of_this_home_is_refused_and_nothing_is_touched(
    place: Path, backup: Path, spoil: Callable[[Path], None], said: str
) -> None:
    spoil(backup)
    before = everything(place)
    with pytest.raises(errors.MusterError, match=said):
        backups.restore(place, backup)
    assert everything(place) == before
    assert not list(place.glob("*before-restore*")) and not list(place.glob(".*.part*"))
    assert names_in(place) == ["first"]


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("UPDATE meta SET value = '9' WHERE name = 'schema'", "schema version 9"),
        ("DELETE FROM meta", "not one of muster's"),
        ("DROP TABLE changes", "cannot be used"),
        ("DROP TABLE objects", "not that of the home|cannot be used"),
    ],
)
def test_a_database_that_could_not_be_served_is_not_put_back(
    place: Path, tmp_path: Path, statement: str, said: str
) -> None:
    copy = tmp_path / "copy.db"
    copy.write_bytes(_sql((place / "muster.db").read_bytes(), statement, tmp_path))
    before = everything(place)
    with pytest.raises(errors.MusterError, match=said):
        backups.restore(place, copy, force=True)
    assert everything(place) == before


def test_a_home_that_is_served_is_not_restored(place: Path, backup: Path) -> None:
    with backups._alone(place), pytest.raises(errors.Conflict, match="the control plane runs"):
        backups.restore(place, backup)


# Killed ------------------------------------------------------------------------------------------


def _killed_at(step: int, work: Callable[[], object]) -> bool:
    """Do it in a child that kills itself at that call to the system; whether it lived through all of it."""
    child = os.fork()
    if child == 0:
        left = step
        for name in ("open", "replace", "link", "unlink", "fsync", "close"):
            real = getattr(os, name)

            def doomed(*args: Any, real: Any = real, **more: Any) -> Any:
                nonlocal left
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                left -= 1
                return real(*args, **more)

            setattr(os, name, doomed)
        work()
        os._exit(0)
    return os.waitpid(child, 0)[1] == 0


def test_a_backup_that_is_killed_anywhere_leaves_no_half_of_one(place: Path, tmp_path: Path) -> None:
    for step in range(MOST_STEPS):
        to = tmp_path / f"{step}.tar"
        lived = _killed_at(step, functools.partial(backups.make, place, to))
        if to.exists():
            backups.restore(tmp_path / f"home-{step}", to)
        backups.make(place, to, force=True)
        assert not list(tmp_path.glob(f".{step}.tar*")), "and the next one leaves nothing of it"
        if lived:
            return
    pytest.fail("there was no end of it")


def test_a_restore_that_is_killed_anywhere_is_refused_or_done_and_can_be_done_again(
    place: Path, backup: Path, tmp_path: Path
) -> None:
    serve(place, story=lambda store: store.write(Write(put=a_training("second"))))
    outcomes = set()
    for step in range(MOST_STEPS):
        home_then = tmp_path / f"home-{step}"
        shutil.copytree(place, home_then)
        lived = _killed_at(step, functools.partial(backups.restore, home_then, backup))
        try:
            outcomes.add(tuple(names_in(home_then)))
        except errors.MusterError as refused:
            assert "muster server restore FILE" in refused.message
            outcomes.add(("refused",))
            assert list(home_then.glob("*.before-restore-*")), "what was there is beside"
        backups.restore(home_then, backup)
        assert names_in(home_then) == ["first"]
        if lived:
            assert outcomes == {("first", "second"), ("refused",), ("first",)}
            return
    pytest.fail("there was no end of it")

"""A home knows itself: what is lost of its database is noticed, and nothing is touched before somebody decides."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from muster import errors
from muster.clock import SystemClock
from muster.daemon import home, local
from muster.daemon.local import LocalSite
from muster.daemon.options import Options
from muster.ports import Write
from muster.store import reached
from muster.store.sqlite import SqliteStore
from muster.types.event import Event
from tests import damage
from tests.training_builders import a_training

UID = "0f0e0d0c-0b0a-4909-8807-060504030201"


def serve(folder: Path, *, forget: bool = False, story: Callable[[SqliteStore], object] = lambda store: None) -> None:
    folder.mkdir(exist_ok=True)

    async def run() -> None:
        site = LocalSite(Options(folder, forget=forget), SystemClock())
        store = await site.open()
        try:
            told = story(store)
            if asyncio.iscoroutine(told):
                await told
        finally:
            await store.close()

    asyncio.run(run())


@pytest.fixture
def crashed(tmp_path: Path) -> Path:
    """A home as a killed control plane leaves it: some of it in the file, the rest in the WAL, logs of a training."""
    alive, left = tmp_path / "alive", tmp_path / "home"

    async def story(store: SqliteStore) -> None:
        await store.write(Write(put=a_training("first", uid=UID), events=[Event("Created")]))
        shutil.copytree(alive, tmp_path / "older")
        with sqlite3.connect(alive / "muster.db") as other:
            other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        other.close()
        for n in range(12):
            await store.write(Write(put=a_training(f"t{n}", uid=f"u{n}"), events=[Event("Created")], lazy=n % 2 == 0))
        shutil.copytree(alive, left)

    (alive / "logs" / UID).mkdir(parents=True)
    serve_new(alive, story)
    return left


def serve_new(folder: Path, story: Callable[[SqliteStore], object]) -> None:
    """The logs of a training are there before it: as a test has it, not as it happens."""
    logs = folder / "logs" / UID
    logs.rename(folder / "kept")

    async def both(store: SqliteStore) -> None:
        (folder / "kept").rename(logs)
        told = story(store)
        if asyncio.iscoroutine(told):
            await told

    serve(folder, story=both)


def _older(folder: Path) -> None:
    damage.delete(folder)
    for path in (folder.parent / "older").glob("muster.db*"):
        shutil.copy(path, folder)


def _another_homes(folder: Path) -> None:
    other = folder.parent / "other"
    serve(other, story=lambda store: store.write(Write(put=a_training("elsewhere"))))
    damage.delete(folder)
    shutil.copy(other / "muster.db", folder)


def _of_0_1(folder: Path) -> None:
    """A copy that somebody made before this home had an identity."""
    with sqlite3.connect(folder / "muster.db") as database:
        database.execute("DELETE FROM meta WHERE name <> 'schema'")
    database.close()


LOSSES = {
    damage.delete: "is missing or empty",
    damage.empty_file: "is missing or empty",
    damage.no_wal: r"has lost the last 12 writes .* older copy, or its -wal file is gone or damaged",
    damage.cut_wal: r"has lost the last \d writes",
    damage.damage_wal: r"has lost the last \d writes",
    damage.damage_wal_header: "has lost the last 12 writes",
    damage.cut_file: "is damaged",
    damage.damage_pages: "is damaged",
    damage.overwrite: "is damaged",
    damage.empty_tables: f"knows nothing of trainings whose logs are here .{UID}",
    damage.forget_trainings: f"knows nothing of trainings whose logs are here .{UID}",
    _older: "has lost the last 12 writes",
    _another_homes: "is the database of another home",
    _of_0_1: "does not know this home",
}


def contents(folder: Path) -> dict[str, bytes]:
    """-shm is SQLite's scratch, and an empty WAL is none."""
    kept = {
        path.name: path.read_bytes() for path in folder.glob("muster.db*") if not path.name.endswith(("shm", "lock"))
    }
    return {name: raw for name, raw in kept.items() if raw or not name.endswith("-wal")}


@pytest.mark.parametrize(("lose", "said"), LOSSES.items(), ids=lambda one: getattr(one, "__name__", ""))
def test_what_is_lost_is_noticed_and_nothing_is_touched(crashed: Path, lose: Callable[[Path], None], said: str) -> None:
    lose(crashed)
    before = contents(crashed)
    with pytest.raises(errors.MusterError, match=said) as refused:
        serve(crashed)
    assert "muster server restore FILE" in refused.value.message and "muster server forget" in refused.value.message
    assert contents(crashed) == before, "the right WAL may still be found"
    with pytest.raises(errors.MusterError, match=said):
        serve(crashed)


@pytest.mark.parametrize("lose", LOSSES, ids=lambda one: one.__name__)
def test_what_is_lost_can_be_given_up_once_and_for_all(crashed: Path, lose: Callable[[Path], None]) -> None:
    lose(crashed)
    before = contents(crashed)
    serve(crashed, forget=True, story=lambda store: store.write(Write(put=a_training("later"))))
    serve(crashed)
    kept = {path.name.partition("muster.db")[2]: path.read_bytes() for path in crashed.glob("*.before-forget-*")}
    lost = {raw for raw in before.values() if raw}
    assert lost <= set(kept.values()), "what was there is kept beside"


def test_a_crash_loses_nothing_and_is_no_loss(crashed: Path) -> None:
    def story(store: SqliteStore) -> None:
        assert store.version == 13

    serve(crashed, story=story)
    serve(crashed, story=story)


def test_after_a_reboot_only_what_was_forced_to_the_disk_must_be_there(
    crashed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last write of the fixture was forced, so cut the WAL behind a lazy one and pretend that it was the last."""
    count = reached.read(crashed / "reached")
    assert count.written == count.forced == 13
    shown = f"{count.written + 5:020d} {count.forced:020d} {count.boot}\n"
    (crashed / "reached").write_text(shown)
    with pytest.raises(errors.MusterError, match="has lost the last 5 writes"):
        serve(crashed)
    for module in (home, local):
        monkeypatch.setattr(module, "boot_id", lambda: "another-boot")
    serve(crashed)


def test_a_new_home_gets_an_identity_that_only_its_owner_can_read(tmp_path: Path) -> None:
    serve(tmp_path / "home")
    made = home.read_identity(tmp_path / "home")
    assert made is not None
    with sqlite3.connect(tmp_path / "home" / "muster.db") as database:
        assert database.execute("SELECT value FROM meta WHERE name = 'home'").fetchone() == (made.id,)
    database.close()
    assert (tmp_path / "home" / "logs" / ".home").read_text().strip() == made.id
    for name in ("identity.json", "reached", "logs/.home"):
        assert stat.S_IMODE((tmp_path / "home" / name).stat().st_mode) == 0o600
    serve(tmp_path / "home")
    assert home.read_identity(tmp_path / "home") == made


@pytest.mark.parametrize("lost", ["identity.json", "logs/.home", "reached"])
def test_a_mark_that_is_lost_is_made_again_from_the_database(crashed: Path, lost: str) -> None:
    before = home.read_identity(crashed)
    (crashed / lost).unlink()
    serve(crashed)
    after = home.read_identity(crashed)
    assert before is not None and after is not None and after.id == before.id
    assert (crashed / lost).exists()


def test_a_first_start_that_is_killed_before_its_marks_are_made_is_no_loss(tmp_path: Path) -> None:
    serve(tmp_path / "home")
    before = home.read_identity(tmp_path / "home")
    for mark in ("identity.json", "logs/.home"):
        (tmp_path / "home" / mark).unlink()
    serve(tmp_path / "home")
    after = home.read_identity(tmp_path / "home")
    assert before is not None and after is not None and after.id == before.id
    assert (tmp_path / "home" / "logs" / ".home").read_text().strip() == before.id


def test_a_folder_of_somebody_else_among_the_logs_is_nobodys_training(tmp_path: Path) -> None:
    (tmp_path / "home" / "logs" / "tensorboard").mkdir(parents=True)
    (tmp_path / "home" / "logs" / UID).touch()
    serve(tmp_path / "home")
    assert home.read_identity(tmp_path / "home") is not None
    assert {path.name for path in (tmp_path / "home" / "logs").iterdir()} == {"tensorboard", UID, ".home"}


def test_a_copy_of_a_home_does_not_take_the_workers_of_the_home_that_runs_them(crashed: Path, tmp_path: Path) -> None:
    serve(crashed)
    copy = shutil.copytree(crashed, tmp_path / "copy")
    words = ["--coordinator-file", str(crashed / "coordinator.addr"), "--run-id", UID, "--name", "first-0"]
    code = "import time; print('here', flush=True); time.sleep(600)"
    worker = subprocess.Popen([sys.executable, "-c", code, *words], stdout=subprocess.PIPE)
    try:
        assert worker.stdout is not None and worker.stdout.readline() == b"here\n"
        with pytest.raises(errors.MusterError, match=f"copy/muster.db is a copy: .*{crashed}"):
            serve(copy)
        serve(crashed)
        moved = crashed.rename(tmp_path / "moved")  # a home that was moved is no copy: its workers find it by its port
        shutil.rmtree(copy)
        serve(moved)
    finally:
        worker.kill()
        worker.communicate()

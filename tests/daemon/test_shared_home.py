"""A home on a file system that several machines share: it is served by one of them, which every command names."""

from __future__ import annotations

import json
import os
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster import mounts
from muster.cli import doctor, server
from muster.daemon import plane
from muster.errors import Unavailable
from muster.home_lock import HomeLock
from muster.sdk import home as homes
from muster.sdk.find import Search, Server, find
from muster.store.database import Database

ELSEWHERE = "11111111-2222-3333-4444-555555555555/123"
URL = "http://127.0.0.1:9"
COMMANDS = (
    ("ps",),
    ("run", "train.py"),
    ("wait", "demo"),
    ("server", "status"),
    ("server", "stop"),
    ("server", "start"),
    ("server", "forget"),
    ("server", "install"),
    ("server", "restore", "backup.tar"),
    ("server", "backup", "new.tar"),
    ("token", "list"),
    ("token", "create", "ci", "--role", "viewer"),
    ("token", "rotate", "ci"),
    ("token", "revoke", "ci"),
    ("audit",),
    ("dashboard",),
    ("doctor",),
)


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A home whose lock is held, by a control plane that says it runs on the machine node7."""
    path = tmp_path / "home"
    path.mkdir(mode=0o700)
    lock = HomeLock(path)
    write_record(path, process=ELSEWHERE, host="node7")
    yield path
    lock.release()


def write_record(home: Path, **more: str) -> None:
    record = {"pid": os.getpid(), "url": URL, "version": "0.1.1", "startedAt": "", **more}
    (home / "server.json").write_text(json.dumps(record))
    (home / "server.json").chmod(0o600)


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_every_command_names_the_machine_that_has_the_control_plane(
    home: Path, tmp_path: Path, words: list[str]
) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "backup.tar").write_text("")
    env = {name: value for name, value in os.environ.items() if not name.startswith("MUSTER_")}
    command = [sys.executable, "-m", "muster.cli.main", *words]
    env |= {"MUSTER_HOME": str(home), "XDG_CONFIG_HOME": str(tmp_path / "config")}
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    said = done.stdout + done.stderr
    assert done.returncode != 0
    assert f"runs on machine node7, and this is {socket.gethostname()}" in said
    assert "ssh node7, then type the same command there" in said and URL not in said


def test_the_answer_comes_within_a_second_and_no_process_is_signalled(home: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(Unavailable, match="machine node7"):
        find(Search(home=home))
    with pytest.raises(Unavailable, match="machine node7"):
        homes.running(home)  # its pid is ours here: `server stop` would end this very process
    assert time.monotonic() - begin < 1.0


def test_a_name_that_is_none_is_not_shown(home: Path) -> None:
    write_record(home, process=ELSEWHERE, host="\x1b[2Jnode")
    with pytest.raises(Unavailable, match="runs on another machine") as refused:
        homes.running(home)
    assert "\x1b" not in f"{refused.value.message}{refused.value.hint}"


def test_a_container_with_another_name_that_shares_the_home_is_another_machine(home: Path) -> None:
    write_record(home, process=f"{homes.boot_id()}/1", host="trainer-0")
    with pytest.raises(Unavailable, match="machine trainer-0"):
        homes.running(home)


def test_a_machine_that_was_renamed_is_still_this_one(home: Path) -> None:
    write_record(home, process=homes.process_of(os.getpid()) or "", host="old-name")
    running = homes.running(home)
    assert running is not None and running.url == URL


def test_what_a_machine_left_that_holds_the_home_no_more_does_not_count(tmp_path: Path) -> None:
    write_record(tmp_path, process=ELSEWHERE, host="node7")
    assert homes.running(tmp_path) is None
    lock = HomeLock(tmp_path)
    homes.forget_elsewhere(tmp_path)
    assert homes.running(tmp_path) is None
    lock.release()


@pytest.mark.usefixtures("processes")
def test_a_control_plane_says_on_which_machine_it_runs(tmp_path: Path) -> None:
    write_record(tmp_path, process=ELSEWHERE, host="node7")
    command = [sys.executable, "-m", "muster.daemon", "--home", str(tmp_path), "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as daemon:
        assert daemon.stdout is not None and "serves on" in daemon.stdout.readline()
        running = homes.running(tmp_path)
        daemon.terminate()
    assert running is not None and (running.pid, running.host) == (daemon.pid, socket.gethostname())


# Network file systems ----------------------------------------------------------------------------

MOUNTS = """\
22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
30 22 0:40 / /home rw,relatime shared:1 - nfs4 server:/export/home rw
31 30 0:41 / /home/local rw - xfs /dev/sdb rw
32 22 0:42 / /my\\040data rw - lustre server:/fs rw
33 22 0:43 / /twice rw - nfs server:/a rw
34 22 0:44 / /twice rw - tmpfs tmpfs rw
"""


@pytest.fixture
def shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on NFS, as the kernel's list of mounts has it."""
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text(f"{MOUNTS}35 22 0:45 / {tmp_path}/shared rw - nfs4 server:/b rw\n")
    monkeypatch.setattr(mounts, "_MOUNTS", mountinfo)
    (tmp_path / "shared").mkdir(mode=0o700)
    return tmp_path / "shared"


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/home/a/.muster", "nfs4"),
        ("/home", "nfs4"),
        ("/homes/a", ""),
        ("/home/local/a", ""),
        ("/my data/x", "lustre"),
        ("/twice/x", ""),
        ("/", ""),
    ],
)
@pytest.mark.usefixtures("shared")
def test_the_innermost_mount_decides(path: str, kind: str) -> None:
    assert mounts.network_type(Path(path)) == kind


def test_a_database_on_a_network_file_system_has_no_wal(shared: Path, tmp_path: Path) -> None:
    for folder, mode in ((shared, "delete"), (tmp_path / "disk", "wal")):
        folder.mkdir(exist_ok=True)
        database = Database(folder / "muster.db", synchronous="FULL", keep_changes=10)
        try:
            database.load()
            assert database.keep_room() is not None
            with sqlite3.connect(folder / "muster.db") as other:
                assert other.execute("PRAGMA journal_mode").fetchone() == (mode,)
            other.close()
            assert (folder / "muster.db-wal").exists() == (mode == "wal")
        finally:
            database.close()


def test_a_database_with_a_wal_gets_another_journal_when_its_home_is_moved(
    shared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(mounts, "_MOUNTS", Path("/proc/self/mountinfo"))
        Database(shared / "muster.db", synchronous="FULL", keep_changes=10).close()
    database = Database(shared / "muster.db", synchronous="FULL", keep_changes=10)
    try:
        assert not (shared / "muster.db-wal").exists() and not (shared / "muster.db-shm").exists()
        database.load()
    finally:
        database.close()


def test_doctor_and_the_start_name_a_network_file_system(
    shared: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MUSTER_HOME", str(shared))
    checks = {check.name: check for check in doctor._home()}
    assert checks["file system"].state == "warn" and "(nfs4)" in checks["file system"].message
    assert "MUSTER_HOME" in checks["file system"].next
    monkeypatch.setattr("muster.sdk.find.find", lambda search: Server(URL))
    server._start(shared, [])
    assert f"{shared} is on a network file system (nfs4)" in capsys.readouterr().err
    plane._warn_of_network(shared)
    assert f"{shared} is on a network file system (nfs4)" in caplog.text
    monkeypatch.setenv("MUSTER_HOME", str(shared.parent))
    assert "file system" not in {check.name for check in doctor._home()}

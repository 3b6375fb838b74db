from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from muster import files
from muster.cli import doctor, session
from muster.errors import Unauthenticated
from muster.sdk import find, home, peers
from muster.server import auth
from muster.store import room
from tests.cli.conftest import Muster
from tests.cli.stand_in import StandIn, a_training
from tests.fleet import eventually

HOLDER = """if True:
    import fcntl, signal, sys
    file = open(sys.argv[1], "w")
    fcntl.flock(file, fcntl.LOCK_EX)
    print("held", flush=True)
    signal.pause()
"""


@pytest.fixture
def place() -> Path:
    path = files.home()
    path.mkdir(mode=0o700)
    return path


def write_context(place: Path, pid: int) -> dict[str, object]:
    context: dict[str, object] = {
        "pid": pid,
        "url": "http://127.0.0.1:1",
        "version": "0.1.0",
        "startedAt": "2026-01-31T12:00:00.000Z",
    }
    (place / "server.json").write_text(json.dumps(context))
    (place / "token").write_text("embedded-token\n")
    return context


@pytest.fixture
def daemon(place: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock, as the daemon does, and dies of SIGTERM."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(place / "daemon.lock")], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    write_context(place, process.pid)
    yield process
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    process.wait(10)
    process.stdout.close()


@pytest.fixture
def everything(monkeypatch: pytest.MonkeyPatch, control: StandIn) -> StandIn:
    monkeypatch.setattr(session, "everywhere", lambda client: client.list())
    return control


def test_status_tells_where_it_runs(muster: Muster, place: Path, daemon: subprocess.Popen[str]) -> None:
    said = muster("server", "status", "-o", "json")

    assert said.code == 0
    assert json.loads(said.out) == write_context(place, daemon.pid)


@pytest.mark.parametrize("verb", ["status", "stop"])
def test_nothing_is_started_or_made_where_none_runs(muster: Muster, verb: str) -> None:
    said = muster("server", verb)

    assert said.code == {"status": 7, "stop": 0}[verb]
    assert "the control plane does not run" in said.err
    assert not files.home().exists()


def test_a_pid_in_a_file_is_not_believed_without_the_lock(muster: Muster, place: Path) -> None:
    write_context(place, os.getpid())
    (place / "daemon.lock").touch()

    assert muster("server", "status").code == 7
    assert muster("server", "stop").code == 0


def test_stop_ends_the_daemon_and_says_which_trainings_go_on(
    muster: Muster, everything: StandIn, daemon: subprocess.Popen[str]
) -> None:
    everything.add(a_training(), a_training("done", phase="failed"))
    said = muster("server", "stop")

    assert said.code == 0
    assert daemon.wait(10) == -signal.SIGTERM
    assert "these trainings go on, and are adopted at the next start: default/demo\n" in said.err
    assert everything.asked["token"] == "embedded-token"
    assert not home.is_locked(files.home())


def test_stop_can_cancel_everything_first(muster: Muster, everything: StandIn, daemon: subprocess.Popen[str]) -> None:
    everything.add(a_training(), a_training("done", phase="failed"))
    said = muster("server", "stop", "--cancel")

    assert said.code == 0
    assert everything.orders[1:] == [("cancel", "demo", None), ("wait", "complete", None)]
    assert daemon.wait(10) == -signal.SIGTERM
    assert "go on" not in said.err


def test_starting_what_runs_is_no_error_unless_it_should_be_another(
    muster: Muster, daemon: subprocess.Popen[str]
) -> None:
    same, other = muster("server", "start"), muster("server", "start", "--listen", "127.0.0.1:9")

    assert (same.code, other.code) == (0, 4)
    assert "runs already at http://127.0.0.1:1" in same.err
    assert "hint: muster server stop" in other.err


def test_a_setting_that_the_running_control_plane_does_not_have_is_named(
    muster: Muster, daemon: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_GPUS", "4")
    said = muster("server", "start", "--log-bytes", "5Mi")

    assert said.code == 4
    assert "runs already at http://127.0.0.1:1" in said.err
    assert "these settings are not in force: MUSTER_GPUS=4, --log-bytes 5242880" in said.err
    assert "hint: muster server stop, then the same command again" in said.err


@pytest.mark.usefixtures("processes")
def test_settings_that_the_running_control_plane_has_are_no_error(
    muster: Muster, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_GPUS", "4")
    command = [sys.executable, "-m", "muster.daemon", "--home", str(place), "--log-bytes", "5242880"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert "muster serves on" in process.stdout.readline()
            assert muster("server", "start", "--log-bytes", "5Mi").code == 0
            assert muster("server", "start").code == 0
            monkeypatch.setenv("MUSTER_GPUS", "8")
            other = muster("server", "start")
            assert (other.code, "MUSTER_GPUS=8" in other.err) == (4, True)
        finally:
            process.kill()


def test_foreground_becomes_the_daemon(muster: Muster, monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, args: called.append(args))
    monkeypatch.setattr("muster.cli.server._start", lambda *_: None)
    muster("server", "start", "--foreground", "--listen", "127.0.0.1:0", "--insecure")

    expected = ["-m", "muster.daemon", "--home", str(files.home()), "--listen", "127.0.0.1:0", "--insecure"]
    assert called[0][1:] == expected


def test_the_lock_alone_says_whether_it_runs(place: Path) -> None:
    with open(place / "daemon.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert home.is_locked(place)
        assert home.running(place) is None  # it has not said where yet
    assert not home.is_locked(place)


# Tokens ------------------------------------------------------------------------------------------


def test_a_token_is_shown_once_and_kept_for_its_owner_alone(muster: Muster) -> None:
    made = muster("token", "create", "ci", "--role", "editor", "-n", "research", "-n", "vision")
    listed = muster("token", "list", "-o", "json")

    assert made.code == 0
    assert len(made.out.split()) == 1
    assert made.out.strip() not in listed.out
    [item] = json.loads(listed.out)["items"]
    assert item.pop("created").startswith("20")
    identity = {"name": "ci", "role": "editor", "namespaces": ["research", "vision"]}
    assert item == identity | {"expires": None, "lastUse": None}
    for path in files.home().iterdir():
        assert made.out.strip() not in path.read_text()
        assert not stat.S_IMODE(path.stat().st_mode) & 0o077


def test_a_token_that_exists_is_not_made_again(muster: Muster) -> None:
    muster("token", "create", "ci", "--role", "viewer")

    assert muster("token", "create", "ci", "--role", "admin").code == 4


def test_a_revoked_token_is_gone_and_an_unknown_one_is_answered_with_the_nearest(muster: Muster) -> None:
    muster("token", "create", "ci-runner", "--role", "viewer")
    wrong, right = muster("token", "revoke", "ci-runer"), muster("token", "revoke", "ci-runner")

    assert (wrong.code, right.code) == (3, 0)
    assert "hint: did you mean ci-runner?" in wrong.err
    assert json.loads(muster("token", "list", "-o", "json").out)["items"] == []


def test_a_token_lasts_as_long_as_it_is_told_and_again_as_long_when_it_is_rotated(muster: Muster) -> None:
    muster("token", "create", "ci", "--role", "viewer", "--expires", "7d")
    rotated = muster("token", "rotate", "ci")
    [item] = json.loads(muster("token", "list", "-o", "json").out)["items"]
    lasts = datetime.fromisoformat(item["expires"]) - datetime.fromisoformat(item["created"])

    assert (rotated.code, len(rotated.out.split())) == (0, 1)
    assert "the old one is good until 20" in rotated.err
    assert lasts == timedelta(days=7)
    assert "in 6d23h" in muster("token", "list").out


@pytest.mark.parametrize("span", ["nonsense", "7", "0", "0d", "-5d", "11000w", "5d7w", ""])
def test_a_life_that_makes_no_sense_is_refused(muster: Muster, span: str) -> None:
    said = muster("token", "create", "ci", "--role", "viewer", f"--expires={span}")

    assert said.code == (0 if span == "7" else 2)  # seconds
    assert (said.out == "") == (span != "7")


def test_the_embedded_token_is_rotated_in_its_file_and_is_not_printed(muster: Muster) -> None:
    before = auth.ensure_embedded(files.home())
    said = muster("token", "rotate", "embedded", "--grace", "0")
    now = (files.home() / "token").read_text().strip()

    assert (said.code, said.out) == (0, "")
    assert now != before and now not in said.err
    assert stat.S_IMODE((files.home() / "token").stat().st_mode) == 0o600
    assert auth.Tokens(files.home()).identify(now).role == "admin"
    with pytest.raises(Unauthenticated):
        auth.Tokens(files.home()).identify(before)
    assert auth.ensure_embedded(files.home()) == now
    assert muster("token", "rotate", "embedded", "--expires", "1h").code == 2


# Doctor ------------------------------------------------------------------------------------------


def checks(text: str) -> dict[str, Any]:
    return {check["name"]: check for check in json.loads(text)["checks"]}


def test_doctor_has_a_line_for_each_look(muster: Muster) -> None:
    found = checks(muster("doctor", "-o", "json").out)

    assert {"python", "torch", "starlette", "httptools", "gpus", "home", "control plane", "time", "open files"} <= set(
        found
    )
    assert "free where" in found["free space"]["message"]
    assert {check["state"] for check in found.values()} <= {"ok", "warn", "fail"}
    assert all(check["next"] for check in found.values() if check["state"] == "fail")


@pytest.mark.parametrize(
    ("space", "state", "message"),
    [
        (room.Space(5 << 30, 10 << 30), "ok", "5.0 GiB of 10.0 GiB are free where /home/me is"),
        (room.Space(900 << 20, 10 << 30), "warn", "900.0 MiB of 10.0 GiB are free where /home/me is"),
        (room.Space(100 << 10, 10 << 30), "fail", "100.0 KiB of 10.0 GiB are free where /home/me is"),
        (room.Space(5 << 30, 10 << 30, 500), "warn", "500 more files can be made where /home/me is"),
        (room.Space(5 << 30, 10 << 30, 3), "fail", "3 more files can be made where /home/me is"),
    ],
)
def test_doctor_looks_at_free_space_before_there_is_none(space: room.Space, state: str, message: str) -> None:
    check = doctor.room_of(space, Path("/home/me"))

    assert (check.state, check.message) == (state, message)
    assert "muster delete NAME" in check.next


def test_doctor_fails_for_a_secret_that_others_can_read(muster: Muster, place: Path) -> None:
    (place / "token").write_text("hunter2")
    (place / "token").chmod(0o644)
    said = muster("doctor")

    assert said.code == 1
    assert "fail  token" in said.out
    assert f"next: chmod 600 {place / 'token'}" in said.out
    assert "hunter2" not in said.out


def test_doctor_fails_for_a_control_plane_that_does_not_answer(muster: Muster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSTER_URL", "http://127.0.0.1:1")
    said = muster("doctor", "-o", "json")

    assert said.code == 1
    assert checks(said.out)["control plane"]["state"] == "fail"


def test_doctor_shows_how_many_files_the_control_plane_may_open_and_not_the_shell(
    muster: Muster, daemon: subprocess.Popen[str]
) -> None:
    resource.prlimit(daemon.pid, resource.RLIMIT_NOFILE, (256, 300))
    found = checks(muster("doctor", "-o", "json").out)["open files"]

    assert found["message"] == f"256 at once, at most 300, for the control plane (pid {daemon.pid})"
    assert found["state"] == "warn"
    assert "muster server stop" in found["next"]


def test_doctor_and_ps_say_that_a_control_plane_is_hung(
    muster: Muster, daemon: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(find, "SILENT_S", 0.1)
    os.kill(daemon.pid, signal.SIGSTOP)
    eventually(lambda: Path(f"/proc/{daemon.pid}/stat").read_text().split()[2] == "T", "it stands still")
    doctor, ps = muster("doctor", "-o", "json"), muster("ps")

    story = (
        f"the control plane (pid {daemon.pid}) is hung: it runs but does not answer at http://127.0.0.1:1, "
        "because a signal stopped it"
    )
    assert checks(doctor.out)["control plane"] == {
        "name": "control plane",
        "state": "fail",
        "message": story,
        "next": f"kill -CONT {daemon.pid}",
    }
    assert (ps.code, ps.err) == (7, f"muster: {story}\nhint: kill -CONT {daemon.pid}\n")
    assert daemon.poll() is None


def test_doctor_says_whose_server_answers_if_it_is_not_the_user_s(
    muster: Muster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: object) -> None:
        raise peers.Unproved("127.0.0.1:1 is served by user eve, not by yours: nothing was sent")

    monkeypatch.setattr(peers, "check", refuse)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("MUSTER_URL", f"http://127.0.0.1:{listener.getsockname()[1]}")
        found = checks(muster("doctor", "-o", "json").out)["control plane"]

    assert found["state"] == "fail"
    assert "served by user eve" in found["message"]


def test_doctor_leaves_nothing_behind(muster: Muster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "LOOKS", [look for look in doctor.LOOKS if look is not doctor._gpus])
    muster("doctor")

    assert not files.home().exists()

"""The coordinator as a program: what it refuses, what it says, and what it leaves when it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from muster import coordinator, run_token
from muster.run_token import KeptToken
from muster.world.statefile import StateFile
from tests.data.old import STATE_FILE
from tests.fleet import free_port


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path))
    monkeypatch.delenv("MUSTER_RUN_TOKEN", raising=False)
    return tmp_path


@pytest.fixture
def signals() -> Iterator[None]:
    """As they were: the program takes two of them for itself."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def state_of(home: Path, port: int) -> Path:
    return home / "coordinators" / f"127.0.0.1-{port}.json"


def runs_until_told(listen: str, number: int) -> tuple[int, str]:
    """Its exit code, and the address that it says; it gets that signal once it has said it."""
    read, write = os.pipe()
    said: list[str] = []

    def tell() -> None:
        with open(read) as file:
            said.append(file.read().strip())
        os.kill(os.getpid(), number)

    teller = threading.Thread(target=tell)
    teller.start()
    try:
        return coordinator.run(listen, ready_fd=write, quiet=True), said[0]
    finally:
        teller.join()


# What cannot be


def test_bad_input_is_one_line_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert coordinator.run("nowhere") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "muster coordinator: 'nowhere' is not HOST:PORT"


def test_a_port_that_is_taken_is_named_and_its_state_is_left(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        state_of(home, port).parent.mkdir()
        state_of(home, port).write_bytes(STATE_FILE.read_bytes())
        assert coordinator.run(f"127.0.0.1:{port}") == 1
    said = capsys.readouterr().err
    assert f"cannot listen on 127.0.0.1:{port}: " in said and "address already in use; choose another --listen" in said
    assert "run" in json.loads(state_of(home, port).read_text())["runs"]


def test_the_state_of_another_coordinator_is_not_touched(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept = StateFile(home / "state", keep_s=60.0)
    assert coordinator.run("127.0.0.1:0", state=home / "state") == 1
    assert "in use by another coordinator; join that one, or choose another --listen" in capsys.readouterr().err
    kept.close(remove=True)


def test_a_state_file_that_cannot_be_kept_is_named(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "file").touch()
    assert coordinator.run("127.0.0.1:0", state=home / "file" / "state") == 1
    assert "cannot keep a state file" in capsys.readouterr().err


# Serving


def test_one_that_nobody_needs_leaves_nothing(home: Path, signals: None, capfd: pytest.CaptureFixture[str]) -> None:
    port = free_port()
    assert coordinator.run(f"127.0.0.1:{port}", idle_s=0.0) == 0
    assert capfd.readouterr().out == f"coordinator listens on 127.0.0.1:{port}\n"
    assert list((home / "coordinators").iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_that_is_told_to_stop_leaves_its_state_for_the_next(home: Path, signals: None, number: int) -> None:
    port = free_port()
    state_of(home, port).parent.mkdir()
    state_of(home, port).write_bytes(STATE_FILE.read_bytes())
    assert runs_until_told(f"127.0.0.1:{port}", number) == (0, f"127.0.0.1:{port}")
    assert json.loads(state_of(home, port).read_text())["runs"]["run"]["record"]["round"] == 2


def test_any_port_is_said_and_kept_nowhere(home: Path, signals: None) -> None:
    code, address = runs_until_told("127.0.0.1:0", signal.SIGTERM)
    assert code == 0 and int(address.rpartition(":")[2]) > 0
    assert list(home.rglob("*")) == [home / "coordinators"] and not list((home / "coordinators").iterdir())


def test_the_command_line_says_the_same(
    home: Path, signals: None, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    read, write = os.pipe()
    words = ["--listen", "127.0.0.1:0", "--state", str(home / "s"), "--idle-s", "0", "--ready-fd", str(write)]
    monkeypatch.setattr("sys.argv", ["muster coordinator", *words])
    assert coordinator.main() == 0
    with open(read) as file:
        assert file.read().startswith("127.0.0.1:")
    assert capfd.readouterr().out == "", "whoever is told over the descriptor needs no lines"


# Its token


def test_without_a_token_it_makes_one_that_this_user_finds(home: Path, signals: None) -> None:
    port = free_port()
    seen: list[str | None] = []
    for _ in range(2):  # the second time it is started again, and its members still have the first token
        assert runs_until_told(f"127.0.0.1:{port}", signal.SIGTERM)[0] == 0
        seen.append(run_token.find(home, [("127.0.0.1", port)]))
    assert seen[0] is not None and seen[0] == seen[1]
    assert coordinator.run(f"127.0.0.1:{port}", idle_s=0.0) == 0
    assert run_token.find(home, [("127.0.0.1", port)]) is None, "it left for good"


def test_a_port_that_is_taken_costs_its_coordinator_no_token(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert coordinator.run(f"127.0.0.1:{port}") == 1
        assert run_token.find(home, [("127.0.0.1", port)]) is None, "nobody is there who knows it"
        KeptToken(home, "127.0.0.1", port, "ab" * 32).listens()
        assert coordinator.run(f"127.0.0.1:{port}") == 1
        assert run_token.find(home, [("127.0.0.1", port)]) == "ab" * 32


def test_beyond_loopback_it_says_where_its_token_is_and_not_what(
    home: Path, signals: None, capfd: pytest.CaptureFixture[str]
) -> None:
    real = KeptToken.close

    def close(self: KeptToken, *, remove: bool) -> None:
        seen.append(self.path.read_text().strip())
        real(self, remove=remove)

    seen: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(KeptToken, "close", close)
        assert coordinator.run(f"0.0.0.0:{free_port()}", idle_s=0.0) == 0
    said = capfd.readouterr()
    assert "on other machines: export MUSTER_RUN_TOKEN=$(ssh " in said.err and len(said.err.splitlines()) == 1
    assert len(seen[0]) == 64 and seen[0] not in said.err + said.out


def test_one_that_is_given_a_token_removes_what_another_left(
    home: Path, signals: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    KeptToken(home, "127.0.0.1", port, "ab" * 32).listens()
    monkeypatch.setenv("MUSTER_RUN_TOKEN", "given")
    assert runs_until_told(f"127.0.0.1:{port}", signal.SIGTERM)[0] == 0
    assert run_token.find(home, [("127.0.0.1", port)]) is None


def test_a_token_that_cannot_be_kept_is_named(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "coordinators").touch()
    assert coordinator.run("127.0.0.1:0", state=home / "state") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot keep the run token" in line and line.endswith("; set MUSTER_HOME or MUSTER_RUN_TOKEN")


# Its output


def test_lines_that_nobody_reads_are_lost_and_hold_up_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    stuck, wrote, write_on = threading.Event(), threading.Event(), os.write

    def write(file: int, line: bytes) -> int:
        if file != 1:
            return write_on(file, line)
        wrote.set()
        stuck.wait(20)
        return len(line)

    monkeypatch.setattr("muster.coordinator.os.write", write)
    output = coordinator._Output()
    output.say("first")
    assert wrote.wait(20)
    for _ in range(2 * coordinator.UNREAD_LINES):
        output.say("more")
    assert output._lines.full()
    stuck.set()

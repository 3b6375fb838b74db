"""Programs of muster that are forked from a prepared process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import forked, prepared
from tests.fleet import Fleet, eventually

_AGENT = [sys.executable, "-m", "muster.node.cli"]


def calls_of(command: list[str], monkeypatch: pytest.MonkeyPatch, **options: Any) -> list[tuple[Any, ...]]:
    """Return the calls of `_fork_exec` that one Popen makes, without starting a process."""
    calls: list[tuple[Any, ...]] = []

    def record(*call: Any) -> int:
        calls.append(call)
        raise OSError("nothing is started")

    monkeypatch.setattr(subprocess, "_fork_exec", record)
    with pytest.raises(OSError, match="nothing is started"):
        subprocess.Popen(command, **options)
    return calls


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("command", "words"),
    [
        ([*_AGENT, "--help"], ("--help",)),
        ([sys.executable, "-m", "muster.daemon", "--home", "/h"], ("--home", "/h")),
        ([str(Path(sys.executable).with_name("muster")), "ps"], ("ps",)),
        ([str(Path(sys.executable).with_name("muster-node"))], ()),
    ],
    ids=["agent", "daemon", "muster", "muster-node"],
)
def test_a_program_of_muster_is_forked(
    monkeypatch: pytest.MonkeyPatch, command: list[str], words: tuple[str, ...]
) -> None:
    [call] = calls_of(command, monkeypatch, env={})
    read = forked.read_command(call)
    assert read is not None and (read.words, read.argv) == (words, tuple(command))


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("command", "options"),
    [
        ([sys.executable, "-m", "muster.node.warm"], {}),
        ([sys.executable, "train.py"], {}),
        (["/bin/sh", "-c", "true"], {}),
        ([sys.executable, "-X", "importtime", "-m", "muster.node.cli"], {}),
        (_AGENT, {"env": {"PYTHONPATH": "/somewhere"}}),
        (_AGENT, {"env": {"PYTHONHASHSEED": "1"}}),
        (_AGENT, {"preexec_fn": os.getpid}),
        (_AGENT, {"cwd": "/no/such/folder"}),
        (_AGENT, {"executable": "/bin/true"}),
        (_AGENT, {"user": 65534}),
        (_AGENT, {"process_group": 0}),
    ],
    ids=str,
)
def test_any_other_command_starts_an_interpreter(
    monkeypatch: pytest.MonkeyPatch, command: list[str], options: dict[str, Any]
) -> None:
    [call] = calls_of(command, monkeypatch, **{"env": {}, **options})
    assert forked.read_command(call) is None


def start_agent(fleet: Fleet, *more: str, **options: Any) -> subprocess.Popen[str]:
    env = {**fleet.env, **options.pop("env", {})}
    return subprocess.Popen(
        [*_AGENT, *more], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def test_a_forked_program_has_output_exit_code_and_parent_of_a_started_one(fleet: Fleet) -> None:
    process = start_agent(fleet, "--help")
    out, err = process.communicate(timeout=60)
    assert out.startswith("usage: ") and (err, process.returncode) == ("", 0)
    process = start_agent(fleet)
    out, err = process.communicate(timeout=60)
    assert (out, process.returncode) == ("", 2) and "arguments are required" in err


def test_a_forked_coordinator_looks_as_if_it_had_been_started(fleet: Fleet) -> None:
    reader, writer = os.pipe()
    proc = subprocess.Popen(
        [sys.executable, "-m", "muster.coordinator", "--listen", "127.0.0.1:0"],
        env={**fleet.env, "A_VARIABLE": "of its own"},
        cwd=fleet.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        pass_fds=[writer],
        start_new_session=True,
    )
    try:
        assert proc.stdout is not None and proc.stdout.readline()
        proc_folder = Path(f"/proc/{proc.pid}")
        assert proc_folder.joinpath("cmdline").read_bytes().split(b"\0")[1:3] == [b"-m", b"muster.coordinator"]
        assert b"A_VARIABLE=of its own" in proc_folder.joinpath("environ").read_bytes().split(b"\0")
        assert proc_folder.joinpath("cwd").resolve() == fleet.folder.resolve()
        assert os.getsid(proc.pid) == proc.pid and os.getpgid(proc.pid) == proc.pid
        passed = {int(link.name) for link in proc_folder.joinpath("fd").iterdir()}
        assert writer in passed and reader not in passed
        assert f"PPid:\t{os.getpid()}\n" in proc_folder.joinpath("status").read_text()
        proc.send_signal(signal.SIGTERM)
        assert proc.wait(60) in (0, -signal.SIGTERM)
    finally:
        proc.kill()
        proc.wait()
        os.close(reader)
        os.close(writer)


@pytest.mark.interpreter
def test_a_test_with_the_mark_starts_interpreters(fleet: Fleet) -> None:
    assert prepared.prepared.forks is False
    process = start_agent(fleet, "--help")
    assert process.communicate(timeout=60)[0].startswith("usage: ")


def test_the_prepared_process_ends_with_a_killed_pytest(fleet: Fleet, tmp_path: Path) -> None:
    script = (
        "import os, sys, subprocess\n"
        "from tests import prepared\n"
        "os.environ.pop('PYTHONPATH')\n"
        "prepared.install()\n"
        f"subprocess.run({[*_AGENT, '--help']!r}, stdout=subprocess.DEVNULL)\n"
        "print('ready', flush=True)\n"
        "sys.stdin.read()\n"
    )
    parent = fleet.start(sys.executable, "-c", script, PYTHONPATH=str(prepared.ROOT))
    parent.expect("ready")
    children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
    assert any(b"tests.prepared" in Path(f"/proc/{pid}/cmdline").read_bytes() for pid in children)
    parent.kill()
    parent.wait()
    eventually(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children), "the prepared process has ended")

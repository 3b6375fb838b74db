"""What does a shell beside a rank get of it, and what not? And who finds the rank?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from muster import run_token
from muster.node import first_bench, numbers, progress, shell, whereabouts
from muster.node.shell import CannotOpen
from muster.node.whereabouts import RankHere
from muster.state import talk
from muster.types.world import HELD_VARIABLE
from tests.fleet import Fleet
from tests.strangers import stranger, two_users

# Whoever has one of these writes what the rank alone should write, or speaks for it.
AS_THE_RANK = {
    progress.FILE_VARIABLE: "/tmp/x/progress-0-1",
    numbers.FILE_VARIABLE: "/tmp/x/numbers-0",
    talk.SOCKET_VARIABLE: "/tmp/x/state",
    first_bench.FILE_VARIABLE: "/tmp/x/bench-0",
    first_bench.TIME_VARIABLE: "30",
    run_token.VARIABLE: "secret",
    HELD_VARIABLE: "7",
    whereabouts.FOLDER_VARIABLE: "/tmp/x",
    "MUSTER_RUN_ID": "uid-demo",
    "MUSTER_WHAT_COMES_LATER": "1",
}
ITS_OWN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "CUDA_VISIBLE_DEVICES": "3",
    "PATH": "/opt/x/bin:/bin",
    "MUSTER_WORKER": "demo-1",
    "MUSTER_ROUND": "4",
    "MUSTER_TRAINING": "demo",
    "MUSTER_NAMESPACE": "default",
    "MUSTER_MESH_PREFIX": "muster/default/demo",
    "MUSTER_STORAGE_DATA": "/data",
}
A_RANK = RankHere(9, 1, 4, "uid-demo", "demo-1", "/opt/x/bin/python", {**ITS_OWN, **AS_THE_RANK, "TERM": "dumb"})


def a_rank(**different: object) -> RankHere:
    return A_RANK._replace(**different)  # type: ignore[arg-type]


def test_a_shell_has_what_the_rank_has_and_nothing_that_writes_as_the_rank() -> None:
    given = shell.environment(A_RANK, {"TERM": "xterm-256color"})
    assert given == ITS_OWN | {"TERM": "xterm-256color", shell.PYTHON: "/opt/x/bin/python"}


def test_without_a_terminal_there_is_no_kind_of_terminal() -> None:
    env = {**ITS_OWN, "TERM": "dumb", "PS1": "# ", "SHLVL": "4", "OLDPWD": "/"}
    assert shell.environment(a_rank(env=env, python=""), {}) == ITS_OWN


@pytest.mark.parametrize(
    ("env", "run_id", "title"),
    [
        ({"MUSTER_TRAINING": "demo"}, "uid", "demo"),
        ({}, "run-7", "run-7"),
        ({"MUSTER_TRAINING": "$(reboot)"}, "run-7", "run-7"),
        ({"MUSTER_TRAINING": "`id`"}, "a b", "a run"),
    ],
)
def test_nothing_that_a_shell_would_expand_gets_into_its_prompt(
    env: Mapping[str, str], run_id: str, title: str
) -> None:
    assert shell.title_of(a_rank(env=env, run_id=run_id)) == title
    assert shell.prompt(f"{title}:1", "/bin/sh") == f"({title}:1) $ "
    assert shell.prompt(f"{title}:1", "/bin/bash") == rf"({title}:1) \w\$ "


@pytest.mark.parametrize(
    ("wanted", "usual", "there", "command"),
    [
        (None, "/bin/zsh", {"/bin/zsh", "/bin/bash"}, ["/bin/zsh", "-f"]),
        (None, "/bin/zsh", {"/bin/bash", "/bin/sh"}, ["/bin/bash", "--norc"]),
        (None, None, {"/bin/sh"}, ["/bin/sh"]),
        ("fish", "/bin/bash", {"fish", "/bin/bash"}, ["fish", "--no-config"]),
    ],
)
def test_which_shell_it_is(wanted: str | None, usual: str | None, there: set[str], command: list[str]) -> None:
    assert shell.shell(wanted, usual, there.__contains__) == command


def test_a_shell_that_is_not_there_is_not_replaced_by_another() -> None:
    with pytest.raises(CannotOpen, match="no shell fish") as wanted:
        shell.shell("fish", "/bin/bash", {"/bin/bash"}.__contains__)
    with pytest.raises(CannotOpen, match="no shell where") as none:
        shell.shell(None, None, set[str]().__contains__)
    assert (wanted.value.code, none.value.code) == (shell.USAGE, shell.ERROR)


def test_of_two_rounds_the_later_is_meant_and_of_two_runs_none() -> None:
    old, new, other = a_rank(round=3), a_rank(round=4), a_rank(run_id="another")
    assert shell.chosen([new, old], "uid-demo", 1) is new
    assert shell.chosen([new, old, other], "another", 1) is other
    assert shell.chosen([new], None, 1) is new
    assert shell.chosen([new], "uid-demo", 0) is None
    with pytest.raises(CannotOpen, match="several runs have a rank 1 here: another, uid-demo"):
        shell.chosen([new, other], None, 1)


# Real processes

TELLS = """
import json, os, sys
from muster.node import whereabouts
whereabouts.tell(json.loads(sys.argv[1]))
assert whereabouts.FOLDER_VARIABLE not in os.environ
print("told", flush=True)
sys.stdin.read()
"""
RUN = uuid.uuid4().hex  # tests beside this one have ranks, too
TOLD = {"RANK": "1", "MUSTER_ROUND": "4", "MUSTER_RUN_ID": RUN, "MUSTER_WORKER": "demo-1"}


@pytest.fixture
def running(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that has said where it is."""
    env = os.environ | {whereabouts.FOLDER_VARIABLE: str(tmp_path), "ITS_OWN": "1", "RANK": "of its parent"}
    command = [sys.executable, "-c", TELLS, json.dumps(TOLD)]
    with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "told\n"
        yield process
        process.kill()


def found(folder: Path) -> list[RankHere]:
    return [one for one in whereabouts.ranks() if one.run_id == RUN and list(folder.iterdir())]


def test_a_rank_is_found_with_all_that_its_program_found(running: subprocess.Popen[str], tmp_path: Path) -> None:
    (one,) = found(tmp_path)
    assert (one.pid, one.rank, one.round, one.worker, one.python) == (running.pid, 1, 4, "demo-1", sys.executable)
    assert one.env["ITS_OWN"] == "1", "what it has from its parent"
    assert one.env["RANK"] == "1", "what it was told wins"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_text(path.read_text()[:20]),
        lambda path: path.write_text("[]"),
        lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | {"started": 1})),
        lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | {"env": {"RANK": "1"}})),
        lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | {"pid": 1 << 30})),
        lambda path: path.chmod(0o644),
        lambda path: path.unlink() or path.symlink_to("/etc/passwd"),
    ],
)
def test_a_note_that_is_not_to_be_believed_is_none(running: object, tmp_path: Path, spoil: object) -> None:
    (note,) = tmp_path.iterdir()
    assert callable(spoil)
    spoil(note)
    assert found(tmp_path) == []


def test_a_rank_that_has_ended_is_not_found(running: subprocess.Popen[str], tmp_path: Path) -> None:
    with subprocess.Popen(["sleep", "60"], env={whereabouts.FOLDER_VARIABLE: str(tmp_path)}) as another:
        running.kill()
        running.wait()
        assert found(tmp_path) == []
        another.kill()


SHELL = (sys.executable, "-m", "muster.node.cli", "--shell")


@pytest.mark.parametrize("warm", ["auto", "never"])
def test_a_worker_without_a_control_plane_has_it_too(fleet: Fleet, warm: str) -> None:
    fleet.run_id = uuid.uuid4().hex
    node = fleet.node("a", "--standalone", "--run-id", fleet.run_id, "--nproc", "2", "--warm", warm, join=False)
    fleet.started(0, 2)
    asks = fleet.start(*SHELL, "--rank", "1", "--run-id", fleet.run_id, "--", "sh", "-c", 'echo "$RANK $PWD"; exit 7')
    assert asks.wait() == 7 and f"1 {fleet.folder}\n" in asks.text, asks.text
    nobody = fleet.start(*SHELL, "--rank", "2", "--run-id", fleet.run_id, "--", "env")
    assert nobody.wait() == shell.NOT_NOW
    assert f"muster: rank 2 of {fleet.run_id} has no process here now" in nobody.text
    assert fleet.start(*SHELL, "--rank", "1", "--run-id", fleet.run_id, "--", "no-such").wait() == shell.NO_PROGRAM
    fleet.go()
    assert node.wait() == 0


@two_users
def test_another_user_is_told_whose_rank_it_is_and_gets_nothing_of_it(fleet: Fleet) -> None:
    fleet.run_id = uuid.uuid4().hex
    node = fleet.node("a", "--standalone", "--run-id", fleet.run_id, join=False)
    fleet.started(0, 1)
    tried = stranger(
        "sys.exit(shell.main(sys.argv[1:]))", "--rank", "0", "--run-id", fleet.run_id, "--name", "demo", "--", "env"
    )
    assert tried.returncode == shell.NOT_YOURS and tried.stdout == ""
    assert "muster: rank 0 of demo runs as user root: only that user has a shell there" in tried.stderr
    fleet.go()
    assert node.wait() == 0

"""`muster shell`: where does it lead, what does it say where it leads nowhere, and what is there?"""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from muster import agent_copy
from muster.cli import shell
from muster.cli.shell import Wish
from muster.errors import MusterError
from muster.node import shell as there
from muster.types.training import Metadata, RankStatus, Training
from tests.cli.conftest import Muster
from tests.cli.stand_in import StandIn, a_training
from tests.cli.test_terminal import Terminal
from tests.fleet import eventually
from tests.plane import Plane

RANKS = (
    RankStatus(0, "demo-0", "node-a", "running"),
    RankStatus(1, "demo-1", "node-b", "running"),
    RankStatus(2, "demo-2", "node-b", "lost"),
)
BESIDE = f"sh -c {shlex.quote(agent_copy.BESIDE)}"
IN_POD = (
    f"kubectl exec -it -n ml demo-1 -c worker -- {BESIDE} muster-node --shell --rank=1 --run-id=uid-demo --name=demo"
)


def running(**different: Any) -> Training:
    return a_training(ranks=RANKS, **different)


def on_kubernetes() -> Training:
    """It names no backend: nobody has to, where there is only one."""
    training = running()
    return Training(Metadata("demo", "ml", uid="uid-demo"), training.spec, training.status)


@pytest.fixture
def became(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What the command has become, in the place of that."""
    found: list[list[str]] = []

    def main(words: list[str]) -> int:
        found.append(words)
        return 7

    monkeypatch.setattr(there, "main", main)
    monkeypatch.setattr(there, "become", lambda words, env: found.append(list(words)))
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    return found


def test_here_it_is_this_very_process_that_becomes_the_command(
    muster: Muster, control: StandIn, became: list[list[str]]
) -> None:
    control.add(running())
    assert muster("shell", "demo", "1", "--shell", "zsh", "--", "sh", "-c", "exit 7").code == 7
    assert became == [
        ["--rank=1", "--run-id=uid-demo", "--name=demo", "--program=zsh", "--", "sh", "-c", "exit 7"],
    ]


@pytest.mark.parametrize(
    ("training", "rank", "code", "said"),
    [
        (running(), "99", 3, "demo has no rank 99: its ranks are 0 to 2"),
        (running(), "2", 4, "rank 2 of demo does not run now: lost"),
        (running(phase="succeeded"), "0", 4, "demo has ended: succeeded"),
        (a_training(phase="pending"), "0", 4, "demo is pending: none of its ranks runs yet"),
        (a_training(ranks=RANKS[:1]), "1", 3, "demo has no rank 1: its only rank is 0"),
        (running(), "one", 2, "RANK: must be a whole number, not 'one'"),
        (running(), "-- -1", 2, "RANK: must be at least 0, not -1"),
    ],
)
def test_where_no_rank_runs_one_line_says_why(
    muster: Muster, control: StandIn, became: list[list[str]], training: Training, rank: str, code: int, said: str
) -> None:
    control.add(training)
    answer = muster("shell", "demo", *rank.split())
    assert answer.code == code and answer.err.splitlines()[0] == f"muster: {said}"
    assert answer.err.splitlines()[1].startswith("hint: muster ")
    assert became == []


def test_a_training_that_is_not_there_gets_a_suggestion(muster: Muster, control: StandIn) -> None:
    control.add(running())
    answer = muster("shell", "dmeo", "0")
    assert answer.code == 3 and "did you mean demo?" in answer.err


def test_on_another_machine_that_is_named(muster: Muster, control: StandIn, became: list[list[str]]) -> None:
    control.add(running())
    control.far = True
    answer = muster("shell", "demo", "1")
    assert answer.code == 1 and became == []
    assert answer.err == (
        "muster: rank 1 of demo runs on node-b, not here\n"
        "hint: there, as the user of the control plane: muster shell demo 1\n"
    )


def test_without_a_terminal_a_shell_is_refused(
    muster: Muster, control: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    control.add(running())
    answer = muster("shell", "demo", "1")
    assert answer.code == 2 and answer.err.startswith("muster: there is no terminal here for a shell\nhint: ")


# Kubernetes


@pytest.mark.parametrize(
    ("wish", "command"),
    [
        (Wish("demo", 1), IN_POD),
        (Wish("demo", 1, term="xterm"), f"{IN_POD} --term=xterm"),
        (Wish("demo", 1, ("echo", "$RANK")), f"{IN_POD} -- echo '$RANK'"),
        (Wish("demo", 1, ("env",), terminal=False), f"{IN_POD} -- env".replace("-it", "-i")),
        (
            Wish("demo", 1, context="lab", program="/bin/zsh"),
            f"{IN_POD} --program=/bin/zsh".replace("kubectl exec", "kubectl --context lab exec"),
        ),
    ],
)
def test_what_kubectl_is_asked(wish: Wish, command: str) -> None:
    assert shlex.join(shell.in_pod(on_kubernetes(), RANKS[1], wish)) == command


@pytest.mark.parametrize("worker", ["--kubeconfig=x", "demo-1 x", "", "-n"])
def test_a_name_from_the_server_is_never_an_option_of_kubectl(worker: str) -> None:
    with pytest.raises(MusterError, match="is no name in Kubernetes"):
        shell.in_pod(on_kubernetes(), RankStatus(1, worker), Wish("demo", 1))


def test_a_dry_run_prints_it_and_runs_nothing(muster: Muster, control: StandIn, became: list[list[str]]) -> None:
    control.add(on_kubernetes())
    control.backends = ("kube",)
    control.far = True
    answer = muster("shell", "demo", "1", "--dry-run")
    assert (answer.code, answer.out, became) == (0, f"{IN_POD.replace('-it', '-i')}\n", [])
    muster("shell", "demo", "1", "--", "env")
    assert [shlex.join(one) for one in became] == [f"{IN_POD.replace('-it', '-i')} -- env"]


def test_where_kubectl_is_missing_it_is_said_what_to_type(
    muster: Muster, control: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    control.add(on_kubernetes())
    control.backends = ("kube",)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    answer = muster("shell", "demo", "1")
    assert answer.code == 1
    assert answer.err == f"muster: kubectl is not on the PATH\nhint: where it is: {IN_POD.replace('-it', '-i')}\n"


# Real ones


@pytest.mark.shared
def test_a_command_runs_beside_the_rank_and_its_exit_code_is_ours(plane: Plane) -> None:
    training = plane.train("demo", world=(2, 2, 2), env={"MINE": "yes"})
    training.wait_until_target_world(timeout=30)
    asked = plane.muster("shell", "demo", "1", "--", "sh", "-c", "echo $RANK of $WORLD_SIZE in $PWD, $MINE; exit 5")
    assert asked.wait() == 5 and asked.text == f"1 of 2 in {plane.folder}, yes\n"
    writes = "import muster; muster.progress(999); muster.log(loss=1.0)"
    assert plane.muster("shell", "demo", "0", "--", "sh", "-c", f'"$MUSTER_PYTHON" -c "{writes}"').wait() == 0
    training.refresh()
    assert all(rank.step is None for rank in training.training.status.ranks), "it does not speak as the rank"
    assert plane.muster("shell", "demo", "2", "--", "env").wait() == 3
    printed = plane.muster("shell", "demo", "1", "--dry-run", "--", "printenv", "RANK")
    assert printed.wait() == 0
    typed = plane.start("sh", "-c", printed.text, PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert typed.wait() == 0 and typed.text == "1\n", "what is printed does the same, wherever the rank runs"
    plane.go()
    training.wait(timeout=30)
    ended = plane.muster("shell", "demo", "1", "--", "env")
    assert ended.wait() == 4 and ended.text.startswith("muster: demo has ended: succeeded\n")


@pytest.mark.shared
def test_a_shell_on_a_terminal_tells_whose_it_is_and_outlives_the_rank(plane: Plane) -> None:
    training = plane.train("demo", world=(1, 1, 1))
    training.wait_until_target_world(timeout=30)
    terminal = Terminal(plane, "shell", "demo", "0", "--shell", "/bin/sh", TERM="xterm-256color")
    try:
        terminal.shows(r"rank 0 of demo, round 0, on demo-0: its process is \d+\. exit leaves the shell\.")
        terminal.shows(r"\(demo:0\) \$ ")
        terminal.type("echo here-$RANK-$TERM-${MUSTER_PROGRESS_FILE:-none}\n")
        terminal.shows("here-0-xterm-256color-none")
        plane.go()
        training.wait(timeout=30)
        eventually(lambda: not plane.worker_pids(training.training.uid), "its worker has left")
        terminal.type("echo still-$RANK; exit 6\n")
        terminal.shows("still-0")
        assert terminal.ends() == 6
    finally:
        terminal.close()

"""`muster shell`: a shell where a rank runs, in its environment.

The control plane says where that is, and no more: it starts nothing for anybody. On this machine the shell is this
very process, which needs the rank's own user; in a cluster it is kubectl's, which needs the right to exec in the Pod.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from dataclasses import dataclass
from typing import Annotated

import typer

from muster import agent_copy
from muster.cli import session
from muster.cli.safe_text import shown
from muster.core.training.admission import backend_of
from muster.core.training.seats import seat_of
from muster.errors import MusterError
from muster.sdk import flows
from muster.types.pod_template import CONTAINER
from muster.types.training import DNS_LABEL, RankStatus, Training

app = typer.Typer(rich_markup_mode=None)

ON_KUBERNETES = "kube"
_POD = re.compile(rf"{DNS_LABEL}(\.{DNS_LABEL})*")  # what comes from a server must not be taken for an option


@dataclass(frozen=True)
class Wish:
    """What somebody wants to have there."""

    name: str  # of the training, as it was typed
    rank: int
    command: tuple[str, ...] = ()  # nothing: a shell
    program: str = ""  # which shell; empty: the usual one
    terminal: bool = True  # stdin and stdout are one
    term: str = ""  # of what kind it is
    context: str = ""  # of the kubeconfig


@app.command(epilog="Example: muster shell demo 1 -- python -c 'import torch; print(torch.__version__)'")
def shell(
    name: session.Name,
    rank: Annotated[int, typer.Argument(metavar="RANK", min=0, help="Which rank.")],
    command: list[str] = typer.Argument(None, metavar="[-- COMMAND…]", help="Run this instead, with its exit code."),
    program: str = typer.Option("", "--shell", metavar="PROGRAM", help="Which shell; $SHELL, /bin/bash or /bin/sh."),
    dry_run: bool = typer.Option(False, "--dry-run", help="Print the command that would be run, and run nothing."),
    context: str = typer.Option("", metavar="CONTEXT", help="Which one of the kubeconfig, on Kubernetes."),
    namespace: session.Namespace = session.DEFAULT,
    url: session.Url = None,
    token: session.Token = None,
) -> int:
    """Open a shell where a rank runs: in its folder, with its environment, beside its process."""
    client = session.open_client(url, token, namespace)
    training = session.find(client, name).training
    seat = seat_of(training, rank)
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    term = os.environ.get("TERM", "") if terminal else ""
    wish = Wish(name, rank, tuple(command or ()), program, terminal, term, context)
    if backend_of(training.spec, client.run(flows.backends())) == ON_KUBERNETES:
        words = in_pod(training, seat, wish)
    elif client.is_far():
        raise _elsewhere(training, seat)
    else:
        words = ["muster-node", "--shell", *_asked(training, wish)]
    if dry_run:
        print(shown(shlex.join(words)))
        return 0
    return _become(words)


def in_pod(training: Training, seat: RankStatus, wish: Wish) -> list[str]:
    """What kubectl is asked."""
    namespace = training.metadata.namespace
    for name in (namespace, seat.worker):
        if not _POD.fullmatch(name):
            raise MusterError(f"{name!r} is no name in Kubernetes: the control plane is not to be trusted")
    chosen = ["--context", wish.context] if wish.context else []
    streams = "-it" if wish.terminal else "-i"
    kubectl = ["kubectl", *chosen, "exec", streams, "-n", namespace, seat.worker, "-c", CONTAINER]
    return [*kubectl, "--", "sh", "-c", agent_copy.BESIDE, "muster-node", "--shell", *_asked(training, wish)]


def _asked(training: Training, wish: Wish) -> list[str]:
    """What `node.shell` is told, where the rank runs."""
    told = {"run-id": training.uid, "name": wish.name, "program": wish.program, "term": wish.term}
    options = [f"--{name}={value}" for name, value in told.items() if value]
    return [f"--rank={wish.rank}", *options, *(["--", *wish.command] if wish.command else [])]


def _elsewhere(training: Training, seat: RankStatus) -> MusterError:
    where = seat.node or "another machine"
    again = f"muster shell {training.metadata.name} {seat.rank}"
    hint = f"there, as the user of the control plane: {again}"
    return MusterError(f"rank {seat.rank} of {training.metadata.name} runs on {where}, not here", hint=hint)


def _become(words: list[str]) -> int:
    from muster.node import shell

    if words[0] == "muster-node":
        return shell.main(words[2:])  # which is in this very interpreter, too
    if shutil.which(words[0]) is None:
        raise MusterError("kubectl is not on the PATH", hint=f"where it is: {shlex.join(words)}")
    try:
        shell.become(words, os.environ)
    except shell.CannotOpen as error:
        raise MusterError(str(error)) from None

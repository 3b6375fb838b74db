"""`muster kill`: end a rank or a worker with SIGKILL, so that people can try a loss."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from muster.cli import exits, session
from muster.cli.output import tell
from muster.core.training.seats import seat_of

app = typer.Typer(rich_markup_mode=None)


@app.command(epilog="Example: muster kill demo 1 --worker --yes")
def kill(
    name: session.Name,
    rank: Annotated[int, typer.Argument(metavar="RANK", min=0, help="Which rank.")],
    worker: bool = typer.Option(False, "--worker", help="Every process of the rank's worker, not only the rank."),
    yes: bool = typer.Option(False, "-y", "--yes", help="Do not ask first."),
    namespace: session.Namespace = session.DEFAULT,
    url: session.Url = None,
    token: session.Token = None,
) -> None:
    """Kill a rank with SIGKILL, to see how the training heals. muster cancel ends the training itself.

    A killed rank counts as a crash and costs a restart; a killed worker costs none. Not on Kubernetes, where kubectl
    deletes Pods.
    """
    handle = session.find(session.open_client(url, token, namespace), name)
    seat = seat_of(handle.training, rank)
    what = f"every process of worker {seat.worker} (rank {rank} of {name})" if worker else f"rank {rank} of {name}"
    if not yes:
        if not sys.stdin.isatty():
            again = f"muster kill {name} {rank}{' --worker' if worker else ''} --yes"
            raise exits.Misused("muster kill asks first, and there is no terminal here to answer", hint=again)
        if not typer.confirm(f"Kill {what}?", err=True):
            tell("nothing was killed")
            raise typer.Exit(exits.ERROR)
    handle.kill(rank, worker=worker)
    tell(f"{what} was killed; muster events {name} shows what follows")

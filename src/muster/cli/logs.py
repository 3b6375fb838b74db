"""`muster logs`: what did the ranks print?"""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import TYPE_CHECKING

import typer

from muster.cli import follow as following
from muster.cli import session
from muster.cli.safe_text import line as safe_line
from muster.cli.safe_text import raw
from muster.errors import MusterError
from muster.types.event import Event

if TYPE_CHECKING:
    from muster.sdk.client import Client
    from muster.sdk.training import DistributedTraining

app = typer.Typer(rich_markup_mode=None)


@app.command(epilog="Example: muster logs demo -f --rank 0 --tail 100")
def logs(
    name: session.Name,
    follow: bool = typer.Option(False, "-f", "--follow", help="Go on until the training ends."),
    rank: int | None = typer.Option(None, min=0, metavar="R", help="Only this rank."),
    round_number: int | None = typer.Option(None, "--round", min=0, metavar="N", help="Only this round."),
    tail: int | None = typer.Option(None, min=0, metavar="N", help="Only the last N lines of all."),
    timestamps: bool = typer.Option(False, "-t", "--timestamps", help="Before each line, when it was written."),
    namespace: session.Namespace = session.DEFAULT,
    url: session.Url = None,
    token: session.Token = None,
) -> None:
    """Print the output of ranks in order of time; with -f from pending, through restarts, to the end.

    Heals are told on stderr.
    """
    client = session.open_client(url, token, namespace)
    handle = session.find(client, name)
    if follow and not handle.training.is_terminal:
        known = max((event.id for event in handle.events(limit=1)), default=0)
        threading.Thread(target=_tell_of_heals, args=(client, handle, known), daemon=True).start()
    found, out = False, raw(sys.stdout)
    stays = follow and not handle.training.is_terminal
    with following.leaving(handle, namespace) if stays else contextlib.nullcontext():
        for line in handle.logs(rank=rank, round=round_number, follow=follow, tail=tail, timestamps=timestamps):
            found = True
            out.write(line if line.endswith("\n") else f"{line}\n")
            out.flush()
    if not found and not follow:
        later = "" if handle.training.is_terminal else " yet; -f waits for it"
        typer.echo(f"no output of {name} ({handle.training.status.phase}){later}", err=True)


def _tell_of_heals(client: Client, handle: DistributedTraining, known: int) -> None:
    """Beside the output, for as long as that is followed: what happened since the entry with that id."""
    watching = False
    try:
        for news in session.changes(client, handle):
            heard = [news] if isinstance(news, Event) else []
            if not watching:  # what was written before there was a watch is not told by it
                watching, heard = True, handle.events(known)
            for event in heard:
                if event.id > known:
                    known = event.id
                    following.tell_of(event, lambda text: print(safe_line(text), file=sys.stderr, flush=True))
    except MusterError:
        return  # whoever reads the output is told what is wrong

"""`muster logs`: what did the ranks print?"""

from __future__ import annotations

import sys

import typer

from muster.cli import session
from muster.cli.safe_text import raw

app = typer.Typer(rich_markup_mode=None)


@app.command(epilog="Example: muster logs demo -f --rank 0 --tail 100")
def logs(
    name: session.Name,
    follow: bool = typer.Option(False, "-f", "--follow", help="Go on until the training ends."),
    rank: int | None = typer.Option(None, min=0, metavar="R", help="Only this rank."),
    round_number: int | None = typer.Option(None, "--round", min=0, metavar="N", help="Only this round."),
    tail: int | None = typer.Option(None, min=0, metavar="N", help="Only the last N lines."),
    namespace: session.Namespace = session.DEFAULT,
    url: session.Url = None,
    token: session.Token = None,
) -> None:
    """Print the output of ranks; with -f from pending, through restarts, to the end."""
    handle = session.find(session.open_client(url, token, namespace), name)
    found, out = False, raw(sys.stdout)
    for line in handle.logs(rank=rank, round=round_number, follow=follow, tail=tail):
        found = True
        out.write(line if line.endswith("\n") else f"{line}\n")
        out.flush()
    if not found and not follow:
        later = "" if handle.training.is_terminal else " yet; -f waits for it"
        typer.echo(f"no such output of {name} ({handle.training.status.phase}){later}", err=True)

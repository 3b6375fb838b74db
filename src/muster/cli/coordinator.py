"""`muster coordinator`: a coordinator on its own, without a control plane."""

from __future__ import annotations

from pathlib import Path

import typer

app = typer.Typer(rich_markup_mode=None)


@app.command("coordinator", epilog="Example: muster coordinator --listen 127.0.0.1:29400")
def coordinator(
    listen: str = typer.Option("127.0.0.1:29400", metavar="HOST:PORT", help="Where members connect."),
    state: Path | None = typer.Option(None, help="Where its record is kept (under MUSTER_HOME by default)."),
    idle_s: float | None = typer.Option(None, help="End when nobody has been connected for this long."),
    outcome_ttl_s: float = typer.Option(600.0, help="How long late joiners are told how a run ended."),
) -> None:
    """Serve any number of runs. Whoever takes part needs its token.

    Without MUSTER_RUN_TOKEN it makes one, which your other commands on this machine find by themselves.
    """
    from muster import coordinator as program

    raise typer.Exit(program.run(listen, state=state, idle_s=idle_s, outcome_ttl_s=outcome_ttl_s))

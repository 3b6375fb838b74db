"""`muster world`: look at a run and change it, through its coordinator alone."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, NoReturn

import typer

from muster.cli import exits
from muster.cli.safe_text import raw, shown
from muster.types import plural
from muster.types.frames import AskFrame
from muster.types.world import RunId
from muster.world import wire

app = typer.Typer(
    help="Show a run, set its target, or cancel it, by asking its coordinator.",
    no_args_is_help=True,
    rich_markup_mode=None,
    epilog="Example: muster world --coordinator 127.0.0.1:29400 --run-id demo show",
)

_EXIT_CODES = {"not_found": 3, "terminal_state": 4, "bad_token": 5, "out_of_bounds": 2, "invalid": 2}


class ShowAs(StrEnum):
    TABLE = "table"
    JSON = "json"


@dataclass(frozen=True)
class _Where:
    addresses: list[tuple[str, int]]
    run_id: RunId


@app.callback()
def where(
    context: typer.Context,
    coordinator: str = typer.Option(
        "", envvar="MUSTER_COORDINATOR", metavar="HOST:PORT", help="Where it listens; several with commas."
    ),
    run_id: str = typer.Option("", envvar="MUSTER_RUN_ID", metavar="ID", help="Which run."),
) -> None:
    """Show a run, set its target, or cancel it, by asking its coordinator."""
    try:
        addresses = [wire.parse_address(part) for part in coordinator.split(",") if coordinator]
    except ValueError as error:
        _fail(f"--coordinator: {error}", 2)
    context.obj = _Where(addresses, RunId(run_id))


@app.command(epilog="Example: muster world … show -o json")
def show(
    context: typer.Context, output: ShowAs = typer.Option(ShowAs.TABLE, "-o", "--output", help="How to print it.")
) -> None:
    """Members, roles, ranks, and why the run is where it is."""
    _print(_ask(context.obj, AskFrame(ask="show")), output)


@app.command("set-target", epilog="Example: muster world … set-target 3")
def set_target(
    context: typer.Context,
    target: int = typer.Argument(..., metavar="N", help="How many workers."),
    remove: list[str] = typer.Option([], help="When shrinking, send these workers away first."),
    output: ShowAs = typer.Option(ShowAs.TABLE, "-o", "--output", help="How to print it."),
) -> None:
    """Ask for N workers. Up waits for members; down sends the highest ranks away."""
    _print(_ask(context.obj, AskFrame(ask="set-target", target=target, remove=tuple(remove))), output)


@app.command(epilog="Example: muster world … cancel --reason enough")
def cancel(
    context: typer.Context,
    reason: str = typer.Option("cancelled on request", help="Recorded as the outcome's message."),
    output: ShowAs = typer.Option(ShowAs.TABLE, "-o", "--output", help="How to print it."),
) -> None:
    """End the run as cancelled."""
    _print(_ask(context.obj, AskFrame(ask="cancel", why=reason)), output)


def _ask(where: _Where, question: AskFrame) -> dict[str, Any]:
    """Return the coordinator's reply. Options of the group are checked here, because `--help` needs none of them."""
    for option, value in (("--coordinator", where.addresses), ("--run-id", where.run_id)):
        if not value:
            raise exits.Misused(f"{option} is missing", hint="muster world --help")
    from muster import files, run_token
    from muster.world.connection import CoordinatorRefused, ask

    token = run_token.given() or run_token.find(files.home(), where.addresses)
    try:
        return dict(asyncio.run(ask(where.addresses, where.run_id, question, token=token)))
    except CoordinatorRefused as refused:
        _fail(str(refused), _EXIT_CODES.get(refused.code, 1))
    except TimeoutError as error:
        _fail(f"{error}; is the coordinator running?", 7)


def _fail(message: str, code: int) -> NoReturn:
    typer.echo(f"muster world: {message}", err=True)
    raise typer.Exit(code)


def _state_lines(told: dict[str, Any] | None) -> list[str]:
    """What of its state is safe; none of a run that keeps none, or of a coordinator that does not tell."""
    if told is None:
        return []
    from datetime import timedelta

    from muster.core.training import state_words
    from muster.core.training.explain import show_age
    from muster.types.codec import from_wire, plain
    from muster.types.state import KeptState

    known = from_wire(KeptState, {key: told[key] for key in told if told[key] is not None}, strict=False, names=plain)
    age = show_age(timedelta(seconds=told["age_s"])) if told.get("age_s") is not None else ""
    return [f"{name.lower()}: {text}" for name, text in state_words.facts(known, age).items()]


def _print(view: dict[str, Any], output: ShowAs) -> None:
    if output is ShowAs.JSON:
        print(json.dumps(view))
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(file=raw(sys.stdout))
    round_text = "no round yet" if view["round"] is None else f"round {view['round']}"
    size = plural.workers(view["target"], f"{view['world']} of ") + f" ({view['min']}…{view['max']})"
    restarts = f"restarts {view['restarts_used']}/{view['max_restarts']}"
    if view.get("false_alarms"):  # a coordinator of 0.1 does not count them
        restarts += f"  false alarms {view['false_alarms']}"
    console.print(
        f"[bold]{escape(shown(view['run_id']))}[/]  {shown(view['state'])}  {round_text}  {size}  {restarts}",
        highlight=False,
    )
    console.print(escape(shown(view["reason"])), style="dim", highlight=False)
    if view.get("term", 0) > 1:
        console.print(f"led by {escape(shown(view['leader']))} in term {view['term']}", style="dim", highlight=False)
    for told in _state_lines(view.get("kept_state")):
        console.print(escape(shown(told)), style="dim", highlight=False)
    table = Table(box=None, pad_edge=False)
    for title in ("NAME", "ROLE", "RANK", "RANKS", "ADDRESS", "DOMAIN", "NOTE"):
        table.add_column(title)
    for member in view["members"]:
        rank = "-" if member["rank"] is None else str(member["rank"])
        row = (member["name"], member["role"], rank, member["ranks_state"], member["addr"])
        table.add_row(*(escape(shown(text)) for text in (*row, member["domain"] or "-", member["note"])))
    console.print(table)

"""The `muster` command: wires subcommands together and turns errors into one line and an exit code."""

from __future__ import annotations

import sys

import typer

from muster import __version__
from muster.cli import coordinator, world

app = typer.Typer(
    name="muster",
    help="An elastic control plane for distributed training.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
app.command("coordinator", epilog=coordinator.EXAMPLE)(coordinator.coordinator)
app.add_typer(world.app, name="world")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"muster {__version__}")
        raise typer.Exit()


@app.callback()
def root(version: bool = typer.Option(False, "--version", callback=_version, is_eager=True)) -> None:
    """An elastic control plane for distributed training."""


def main() -> None:
    try:
        app()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()

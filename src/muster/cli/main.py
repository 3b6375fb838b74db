"""The `muster` command: finds the subcommand and turns errors into one line and an exit code.

A subcommand's module is imported only when it is called or listed, so that `muster ps` does not pay for the others.
"""

from __future__ import annotations

import difflib
import importlib
import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_group

from muster import __version__
from muster.cli import exits, quick, safe_text
from muster.errors import MusterError
from muster.types.codec import Invalid

# Subcommand → the module under muster.cli that has it, in the order in which help lists them.
VERBS = {
    "run": "run",
    "ps": "trainings",
    "get": "trainings",
    "describe": "describe",
    "logs": "logs",
    "events": "describe",
    "explain": "describe",
    "scale": "orders",
    "wait": "orders",
    "cancel": "orders",
    "suspend": "orders",
    "resume": "orders",
    "delete": "orders",
    "apply": "apply",
    "top": "top",
    "pool": "pool",
    "usage": "usage",
    "audit": "audit",
    "doctor": "doctor",
    "completion": "completion",
    "coordinator": "coordinator",
}
GROUPS = {
    "server": "server",
    "token": "token",
    "world": "world",
    "bench": "bench",
    "share": "share",
    "kube": "kube",
}


class Verbs(TyperGroup):
    """All subcommands, each imported when it is needed."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [*VERBS, *GROUPS]

    def get_params(self, ctx: Any) -> Any:
        return quick.lightened(super().get_params(ctx))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name in GROUPS:
            group = get_group(importlib.import_module(f"muster.cli.{GROUPS[cmd_name]}").app)
            group.name = cmd_name
            return group
        if cmd_name in VERBS:
            module = importlib.import_module(f"muster.cli.{VERBS[cmd_name]}")
            return quick.lighten(get_group(module.app).commands[cmd_name])
        return None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0].startswith("-") or args[0] in self.list_commands(ctx):
            return super().resolve_command(ctx, args)
        close = difflib.get_close_matches(args[0], self.list_commands(ctx), 1)
        hint = f"did you mean muster {close[0]}?" if close else "muster --help lists all commands"
        raise exits.Misused(f"there is no command {args[0]!r}", hint=hint)


app = typer.Typer(
    name="muster",
    cls=Verbs,
    help="An elastic control plane for distributed training.",
    epilog="Example: muster run train.py --workers 2:2:4 --spares 1",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"muster {__version__}")
        raise typer.Exit()


@app.callback()
def root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", callback=_version, is_eager=True, help="Show the version."),
) -> None:
    """An elastic control plane for distributed training."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help(), err=True)
        raise typer.Exit(exits.USAGE)


def call(args: Sequence[str]) -> int:
    """Run a command line; its exit code. Nothing is raised."""
    if "_MUSTER_COMPLETE" in os.environ:
        return _told(args)  # a shell reads it, not a terminal, and tabs are of its form
    with safe_text.guarded():
        return _told(args)


def _told(args: Sequence[str]) -> int:
    try:
        return _call(args)
    except (MusterError, Invalid) as error:
        _trace()
        return exits.report(error)
    except typer.TyperException as error:
        return _misused(error)
    except (KeyboardInterrupt, typer.Abort):
        return exits.INTERRUPT
    except BrokenPipeError:
        _leave_quietly()
        return exits.ERROR
    except Exception as error:  # noqa: BLE001 - the top of the command line: a user never sees a traceback unasked
        _trace()
        exits.say(f"{type(error).__name__}: {error}", "set MUSTER_DEBUG=1 to see where this happened")
        return exits.ERROR


def main() -> None:
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:  # closed by whoever started us
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
            setattr(sys, name, io.TextIOWrapper(io.FileIO(number, "w", closefd=False)))
    sys.exit(call(sys.argv[1:]))


def _call(args: Sequence[str]) -> int:
    if "_MUSTER_COMPLETE" in os.environ:
        from typer.completion import completion_init  # type: ignore[attr-defined]  # public, but not marked so

        completion_init()
    code = app(list(args), prog_name="muster", standalone_mode=False)
    sys.stdout.flush()
    return code if isinstance(code, int) else 0


def _misused(error: typer.TyperException) -> int:
    context = getattr(error, "ctx", None)
    path = context.command_path if context is not None else "muster"
    if error.format_message().startswith("Usage:"):  # a group without a verb: its help is the answer
        typer.echo(error.format_message(), err=True)
        return error.exit_code
    hint = f"{path} --help"
    if path == "muster run" and "option" in error.format_message().lower():
        hint += "; arguments of the script itself go behind --"
    exits.say(error.format_message(), hint)
    return error.exit_code


def _trace() -> None:
    if os.environ.get("MUSTER_DEBUG"):
        traceback.print_exc()


def _leave_quietly() -> None:
    """Whoever read our output has gone; the interpreter must not complain about it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()

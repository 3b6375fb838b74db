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
from muster.cli import exits, misuse, quick, safe_text
from muster.errors import MusterError
from muster.types.codec import Invalid

# Subcommand → the module under muster.cli that has it, in the order in which help lists them.
VERBS = {
    "run": "run",
    "ps": "trainings",
    "get": "trainings",
    "describe": "describe",
    "logs": "logs",
    "shell": "shell",
    "kill": "kill",
    "events": "describe",
    "explain": "describe",
    "metrics": "metrics",
    "scale": "orders",
    "wait": "orders",
    "cancel": "orders",
    "suspend": "orders",
    "resume": "orders",
    "delete": "orders",
    "apply": "apply",
    "top": "top",
    "dashboard": "dashboard",
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
    "mesh": "mesh",
    "bench": "bench",
    "share": "share",
    "kube": "kube",
}
# What people type who come from elsewhere, where we do not do it by ourselves: `_meant` knows the others.
_ELSEWHERE = {
    "stop": "muster cancel {0} ends it, muster suspend {0} lets it wait; muster server stop is for the control plane",
    "submit": "muster run -d {0} submits it and comes back at once; muster apply -f FILE takes a description",
    "launch": "muster run {0} submits it and follows it; muster run -d comes back at once",
    "attach": "muster logs -f {0} follows it",
    "rm": "muster delete {0} ends it and removes it; muster cancel only ends it",
    "down": "muster delete {0} ends it and removes it; muster cancel only ends it",
}
_PROGRAMS = frozenset({"submit", "launch"})  # of which a script follows


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
        args = _meant(args)
        if args[0].startswith("-") or args[0] in self.list_commands(ctx):
            return super().resolve_command(ctx, args)
        if args == ["help"]:
            typer.echo(ctx.get_help())
            ctx.exit()
        if args[0] in _ELSEWHERE:
            words = " ".join(args[1:]) or ("SCRIPT" if args[0] in _PROGRAMS else "NAME")
            raise exits.Misused(f"there is no command {args[0]!r}", hint=_ELSEWHERE[args[0]].format(words))
        close = difflib.get_close_matches(args[0], [*self.list_commands(ctx), "help"], 1)
        hint = f"did you mean muster {close[0]}?" if close else "muster --help lists all commands"
        raise exits.Misused(f"there is no command {args[0]!r}", hint=hint)


def _meant(args: list[str]) -> list[str]:
    """A command line with our verb in the place of one that everybody knows, where both do the same."""
    verb, rest = args[0], args[1:]
    match verb:
        case "ls" | "list":
            return ["ps", *rest]
        case "status":
            return ["describe" if rest and not rest[0].startswith("-") else "ps", *rest]
        case "help" if rest:
            return [*rest, "--help"]
    return args


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
    message, helps = misuse.told(error)
    hint = helps or f"{path} --help"
    if path == "muster run" and hasattr(error, "option_name"):
        hint += "; arguments of the script itself go behind --"
    exits.say(message, hint)
    return error.exit_code


def _trace() -> None:
    if os.environ.get("MUSTER_DEBUG"):
        traceback.print_exc()


def _leave_quietly() -> None:
    """Whoever read our output has gone; the interpreter must not complain about it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()

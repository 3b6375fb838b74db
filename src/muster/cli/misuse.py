"""What does somebody hear who typed a command line that cannot be? Our words, whatever found the mistake.

typer and pydantic say the same things in theirs. What a check of our own has said is kept as it is.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import typer

from muster.cli.safe_text import shown

_LONGEST_SHOWN = 80
_TOO_MANY = "Got unexpected extra argument"
_NUMBERS = {"int": "must be a whole number", "float": "must be a number", "bool": "must be true or false"}
# What other launchers call it. Under us a training is formed by its control plane, so that some have nothing to say.
_ELSEWHERE = {"nnodes": "workers", "nodes": "workers", "num-nodes": "workers", "nproc-per-node": "nproc"}
_NEEDLESS = ("standalone", "rdzv-", "master-", "node-rank", "local-addr")
_BOUNDS = {"greater_than_equal": ("ge", "at least"), "less_than_equal": ("le", "at most")}


def told(error: typer.TyperException) -> tuple[str, str]:
    """What is wrong, and what helps if that is known."""
    option = getattr(error, "option_name", None)
    if option is not None:
        return _about_option(error, str(option))
    param = getattr(error, "param", None)
    if isinstance(error, typer.BadParameter) and param is not None:
        if hasattr(error, "param_type"):  # only the one that was not given says of what kind it is
            return f"{name_of(param)} is missing", ""
        return f"{name_of(param)}: {_why(error, param)}", ""
    message = error.format_message()
    if message.startswith(_TOO_MANY):
        words = message.partition(" (")[2].rstrip(")")
        return f"that is more than it takes: {words}", ""
    if message.startswith("No such command"):
        return _about_command(error)
    return message, ""


def _about_command(error: typer.TyperException) -> tuple[str, str]:
    """Return what is wrong with a verb of a group, and the nearest verb that the group has."""
    context: Any = getattr(error, "ctx", None)
    typed = error.format_message().split("'")[1]
    path = context.command_path if context is not None else "muster"
    known = context.command.list_commands(context) if context is not None else []
    close = difflib.get_close_matches(typed, known, 1)
    return f"there is no command {path} {shown(typed)}", f"did you mean {path} {close[0]}?" if close else ""


def name_of(param: Any) -> str:
    """Return what people type for a parameter: the long form of an option, or an argument's word in the help."""
    if param.param_type_name == "argument":
        return str(param.metavar or param.name.upper())
    return str(max(param.opts, key=len))


def _about_option(error: typer.TyperException, option: str) -> tuple[str, str]:
    if not hasattr(error, "possibilities"):
        takes = "takes no value" if "does not take" in error.message else "needs a value"
        return f"{shown(option)} {takes}", ""
    context = getattr(error, "ctx", None)
    params = [] if context is None else context.command.get_params(context)
    known = [name[2:] for param in params for name in param.opts if name.startswith("--")]
    return f"there is no option {shown(option)}", _meant(option.lstrip("-").replace("_", "-"), known)


def _meant(name: str, known: Sequence[str]) -> str:
    """What somebody could have had in mind who typed this for an option; dashes are no likeness."""
    if "workers" in known and name.startswith(_NEEDLESS):
        return "leave it out: workers find each other by themselves"
    if "replicas" in name and "workers" not in known:
        return "the number stands behind the name: muster scale NAME N"
    close = [one for one in [_ELSEWHERE.get(name, "")] if one in known] or difflib.get_close_matches(name, known, 1)
    return f"did you mean --{close[0]}?" if close else ""


def _why(error: typer.BadParameter, param: Any) -> str:
    found = getattr(error.__cause__, "errors", None)
    if found is None:
        return error.message
    first: Mapping[str, Any] = found()[0]
    kind, given = str(first.get("type", "")), _quoted(first.get("input"))
    choices = getattr(getattr(param, "type_descriptor", None), "choices", None)
    if choices is not None:
        return f"must be one of {', '.join(str(getattr(one, 'value', one)) for one in choices)}, not {given}"
    if kind in _BOUNDS:
        limit, words = _BOUNDS[kind]
        return f"must be {words} {first['ctx'][limit]}, not {first.get('input')}"
    return f"{_NUMBERS.get(kind.partition('_')[0], 'is not understood')}, not {given}"


def _quoted(value: object) -> str:
    text = str(value)
    return repr(text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…")

"""How does `muster ps` start in less than it takes to import pydantic?

typer has pydantic convert every value of a command line, which costs more time than all the rest of a short command.
Texts, choices and what was not given need no conversion; they are taken here as they are. Everything else, and every
value that is wrong, goes typer's own way, so what users see is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, StrEnum
from typing import Any

_NOT_OURS = object()


def lighten(command: Any) -> Any:
    """The same command, with parameters that convert simple values by themselves."""
    all_params = command.get_params
    command.get_params = lambda ctx: lightened(all_params(ctx))  # the help option is made only when it is asked for
    return command


def lightened(params: list[Any]) -> list[Any]:
    for param in params:
        descriptor = getattr(param, "type_descriptor", None)
        declared = getattr(descriptor, "annotation", None)
        parsed = getattr(getattr(descriptor, "parameter_info", None), "parser", None) is not None
        if declared is not None and not parsed and "process_value" not in vars(param):
            param.process_value = _process(param, declared, param.process_value)
    return params


def _process(param: Any, declared: Any, slowly: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    def process(ctx: Any, value: Any) -> Any:
        taken = _taken(declared, value, many=param.multiple or param.nargs == -1)
        if taken is _NOT_OURS or (param.required and not taken):
            return slowly(ctx, value)
        return taken if param.callback is None else param.callback(ctx, param, taken)

    return process


def _taken(declared: Any, value: Any, *, many: bool) -> Any:
    """The value as the command wants it, or _NOT_OURS."""
    if many:
        texts = declared == list[str] and isinstance(value, list | tuple) and all(isinstance(one, str) for one in value)
        return list(value) if texts else _NOT_OURS
    if value is None or (declared is str and isinstance(value, str)):
        return value
    if isinstance(declared, type) and issubclass(declared, StrEnum) and isinstance(value, str):
        text = value.value if isinstance(value, Enum) else value
        return declared(text) if text in set(declared) else _NOT_OURS
    return _NOT_OURS

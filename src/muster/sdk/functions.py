"""How is a training submitted in one call, or by calling a function?

`distributed` with a program submits it. Without one it is a decorator: calling the function submits a training that
runs the function in every rank. The rank imports the function by name, so it must be importable, and its arguments
travel as JSON.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any, Generic, ParamSpec, TypeVar, Unpack, overload

from muster.errors import InvalidRequest
from muster.sdk import guards
from muster.sdk.client import Client, default_client
from muster.sdk.submission import SubmitOptions, unique_name
from muster.sdk.training import DistributedTraining
from muster.types.codec import Problem

_GUARD = "put the call below `if __name__ == '__main__':`; with force=True it is not looked at"

P = ParamSpec("P")
R = TypeVar("R")
RUNNER = "muster.sdk.call"

in_rank = False  # set by the runner: there, a decorated function is itself
loading = False  # set by the runner while it imports the function's module: nothing there may be called yet


class Submits(Generic[P, R]):
    """A function that runs as a training when it is called. `local` calls it here."""

    def __init__(
        self, function: Callable[P, R], client: Client | None, key: str | None, options: SubmitOptions
    ) -> None:
        _refuse_unimportable(function)
        functools.update_wrapper(self, function)
        self.local = function
        self._client = client
        self._key = key
        self._options = options

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> DistributedTraining:
        self._check_guard(sys._getframe(1))
        if in_rank:
            return self.local(*args, **kwargs)  # type: ignore[return-value]  # in a rank nobody submits
        client = self._client or default_client()
        return client.train(module=RUNNER, idempotency_key=self._key, **self._made(args, kwargs))

    async def submit_async(self, *args: P.args, **kwargs: P.kwargs) -> DistributedTraining:
        self._check_guard(sys._getframe(1))
        client = self._client or default_client()
        return await client.train_async(module=RUNNER, idempotency_key=self._key, **self._made(args, kwargs))

    def _check_guard(self, frame: FrameType) -> None:
        if self._options.get("force"):
            return
        _refuse_while_loading(self.local.__name__)
        line = guards.unguarded_line(self.local.__globals__, frame)
        if line is not None:
            message = f"{self.local.__name__} is called at the top of its module (line {line}): ranks, which import"
            raise _refused(f"{message} the module, would call it again", _GUARD)

    def _made(self, args: tuple[object, ...], kwargs: Mapping[str, object]) -> SubmitOptions:
        inspect.signature(self.local).bind(*args, **kwargs)
        for position, value in enumerate(args):
            _refuse_unsendable(f"argument {position}", value)
        for name, value in kwargs.items():
            _refuse_unsendable(f"argument {name!r}", value)
        target, root = address_of(self.local)
        options = SubmitOptions(**self._options)
        options["args"] = [target, json.dumps({"args": args, "kwargs": kwargs}), root]
        options["name"] = options.get("name") or unique_name(self.local.__name__)
        return options


def address_of(function: Callable[..., object]) -> tuple[str, str]:
    """How a rank finds the function: `module:name` or `file.py:name`, and the directory to import from."""
    module = function.__module__
    main = sys.modules.get("__main__")
    if module == "__main__" and main is not None:
        if main.__spec__ is None:
            return _address_in_program(function, getattr(main, "__file__", None))
        module = main.__spec__.name  # the program was started with -m
    source = os.path.abspath(inspect.getfile(function))
    levels = module.count(".") + (2 if os.path.basename(source) == "__init__.py" else 1)
    root = source
    for _ in range(levels):
        root = os.path.dirname(root)
    return f"{module}:{function.__name__}", root


def _address_in_program(function: Callable[..., object], file: str | None) -> tuple[str, str]:
    if file is None:
        raise _refused(f"{function.__qualname__} was typed in by hand: put it into a file that ranks can import")
    path = os.path.abspath(file)
    return f"{path}:{function.__name__}", os.path.dirname(path)


def _refuse_unimportable(function: Callable[..., object]) -> None:
    name = getattr(function, "__qualname__", repr(function))
    if not inspect.isfunction(function):
        raise _refused(f"{name} is not a function")
    if "<lambda>" in name:
        raise _refused("a lambda has no name that a rank could import: write a function at the top of a module")
    if "<locals>" in name or "." in name:
        raise _refused(f"{name} is not at the top of its module, so a rank cannot import it")
    if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
        raise _refused(f"{name} must be a plain function: what an async function or a generator does is not run")


def _refuse_unsendable(where: str, value: object) -> None:
    """Arguments travel as JSON; what JSON would turn into something else is refused too."""
    if value is None or isinstance(value, bool | int | float | str):
        return
    if isinstance(value, list | tuple):
        for item in value:
            _refuse_unsendable(where, item)
    elif isinstance(value, dict) and all(isinstance(key, str) for key in value):
        for item in value.values():
            _refuse_unsendable(where, item)
    else:
        what = f"{type(value).__name__}, which does not fit into JSON"
        raise _refused(f"{where} is or holds a {what}: pass numbers, texts, lists and dicts with text keys")


def _refuse_while_loading(what: str) -> None:
    if loading:
        raise _refused(f"{what} is called while this rank imports its module: each rank would submit it again", _GUARD)


def _refused(message: str, hint: str = "") -> InvalidRequest:
    return InvalidRequest(message, problems=(Problem("function", message),), hint=hint)


# The public calls --------------------------------------------------------------------------------


@overload
def distributed(function: Callable[P, R], /) -> Submits[P, R]: ...


@overload
def distributed(
    *,
    script: str | os.PathLike[str],
    client: Client | None = None,
    idempotency_key: str | None = None,
    **options: Unpack[SubmitOptions],
) -> DistributedTraining: ...


@overload
def distributed(
    *, module: str, client: Client | None = None, idempotency_key: str | None = None, **options: Unpack[SubmitOptions]
) -> DistributedTraining: ...


@overload
def distributed(
    *,
    command: Sequence[str],
    client: Client | None = None,
    idempotency_key: str | None = None,
    **options: Unpack[SubmitOptions],
) -> DistributedTraining: ...


@overload
def distributed(
    *, client: Client | None = None, idempotency_key: str | None = None, **options: Unpack[SubmitOptions]
) -> Callable[[Callable[P, R]], Submits[P, R]]: ...


def distributed(
    function: Callable[..., Any] | None = None,
    /,
    *,
    script: str | os.PathLike[str] | None = None,
    module: str | None = None,
    command: Sequence[str] | None = None,
    client: Client | None = None,
    idempotency_key: str | None = None,
    **options: Unpack[SubmitOptions],
) -> Any:
    """Submit a training and return the handle on it; or, without a program, decorate a function.

    Takes the fields of a training's spec in snake_case, and its name, namespace, labels and annotations. It waits
    for nothing and deletes nothing.
    """
    if function is not None:
        return Submits(function, client, idempotency_key, options)
    if script is None and module is None and command is None:
        return lambda decorated: Submits(decorated, client, idempotency_key, options)
    if not options.get("force"):
        _refuse_while_loading("distributed()")
    speaks = client or default_client()
    return speaks.train(script=script, module=module, command=command, idempotency_key=idempotency_key, **options)


async def distributed_async(
    *,
    script: str | os.PathLike[str] | None = None,
    module: str | None = None,
    command: Sequence[str] | None = None,
    client: Client | None = None,
    idempotency_key: str | None = None,
    **options: Unpack[SubmitOptions],
) -> DistributedTraining:
    """Submit a training from a coroutine; the twin of `distributed` with a program."""
    if not options.get("force"):
        _refuse_while_loading("distributed_async()")
    speaks = client or default_client()
    return await speaks.train_async(
        script=script, module=module, command=command, idempotency_key=idempotency_key, **options
    )

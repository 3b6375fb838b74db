"""The warm parent's imports: which of them leave no trace that a rank could not have made itself?

A forked rank has its parent's modules, but not its threads, and it shares its descriptors. So the process is looked at
after each import. Where one has left more than modules, the parent has to begin anew without it (`Spoilt`), and it is
left to ranks. `--preload` modules are what the user wants: they are imported as they are.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.machinery import PathFinder
from typing import NamedTuple

from muster.node import imports, opening, torch_version
from muster.node.opening import Load, Put
from muster.node.program import Program
from muster.node.traces import Spoilt, Watch
from muster.types.modules import joined

MAX_PRINTED = 1 << 16


class Loaded(NamedTuple):
    problems: list[str]  # of modules that the user named
    printed: tuple[bytes, ...] = ()  # by the imports at the program's top: that is for its ranks to write
    doomed: bool = False  # ranks will hardly get past their imports


def load(program: Program, tell: Callable[[str], None] = lambda name: None) -> Loaded:
    """Import what the ranks of this program will need; raises Spoilt. `tell`: a module is about to be imported."""
    problems = []
    for name in program.preload:
        tell(name)
        try:
            __import__(name)
        except (Exception, SystemExit) as error:  # noqa: BLE001  a user's module may raise anything
            problems.append(f"{name}: {type(error).__name__}: {error}")
    if not program.auto:
        return Loaded(problems)
    first = opening.steps(program.mode, program.target)
    before = dict(os.environ)
    with _kept_output() as printed, Watch(program.patience_s) as watch:
        whole = _carry_out(first, program.without, watch, tell)
    with Watch(program.patience_s) as watch:
        _carry_out(_later(program, first), program.without, watch, tell)
    for step in first:
        if isinstance(step, Put):
            _take_back(step, before)
    doomed = not whole or (not first and opening.is_broken(program.mode, program.target))
    return Loaded(problems, tuple(printed), doomed)


def lacking(program: Program, names: tuple[str, ...]) -> list[str]:
    """Those modules that are not imported here, are installed, and are not the program's own."""
    roots = {str(root) for root in imports.roots(program.mode, imports.entry(program.mode, program.target))}
    places = [entry for entry in sys.path if os.path.realpath(entry) not in roots]
    installed: dict[str, bool] = {}
    found = []
    for name in joined(names):
        if name in sys.modules or name in (program.target, f"{program.target}.__main__"):
            continue
        top = name.partition(".")[0]
        if top not in installed:
            installed[top] = PathFinder.find_spec(top, places) is not None
        if installed[top]:
            found.append(name)
    return found


def _later(program: Program, first: list[Load | Put]) -> Iterator[Load]:
    """What the program imports further on. That is left to it where it may set variables before."""
    missing = "torch" not in sys.modules and imports.needs_torch(program.mode, program.target)
    if not (missing or program.heir) or opening.sets_variables(program.mode, program.target, first):
        return
    if missing:
        yield Load("torch")
    if program.heir:
        yield from map(Load, lacking(program, program.learned))
        if "torch" in sys.modules:
            yield Load("torch._dynamo")  # torch.optim imports it


def _carry_out(
    steps: Iterable[Load | Put], without: tuple[str, ...], watch: Watch, tell: Callable[[str], None]
) -> bool:
    """False if a module was not there that the program cannot do without."""
    whole = True
    for step in steps:
        if isinstance(step, Put):
            if not (step.default and step.variable in os.environ):
                os.environ[step.variable] = step.value
        elif step.module.partition(".")[0] == "torch" and torch_version.refusal():
            continue  # a rank that imports it gets the refusal
        elif not _is_among(step, without):
            tell(step.module)
            with watch.over(step.key):
                whole &= _import(step) or not step.sure
    return whole


def _is_among(step: Load, names: tuple[str, ...]) -> bool:
    """It, or what it would import on the way to it."""
    whole = f"{step.module}.{step.name}" if step.name else step.module
    parts = whole.split(".")
    around = {".".join(parts[:count]) for count in range(1, len(parts) + 1)}
    return step.key in names or not around.isdisjoint(names)


def _import(step: Load) -> bool:
    """As if it were done where it is written. One that is not there leaves nothing, and the rank will say so: False.

    What was learned from a rank is what it looked for, and it may have had to do without: then so do we.
    """
    tree = ast.parse(f"from {step.module} import {step.name}" if step.name else f"import {step.module}")
    ast.increment_lineno(tree, step.line - 1)
    code = compile(tree, step.path or "<muster>", "exec", dont_inherit=True)
    place = {"__name__": "__main__" if step.main else "", "__file__": step.path, "__builtins__": builtins}
    try:
        exec(code, place)
    except ModuleNotFoundError as error:
        if step.path and (error.name is None or not f"{step.module}.".startswith(f"{error.name}.")):
            raise
        return not step.path
    except ImportError as error:
        if step.path and (error.name != step.module or not str(error).startswith("cannot import name")):
            raise
        return not step.path
    return True


def _take_back(step: Put, before: dict[str, str]) -> None:
    """The rank will do it itself."""
    if os.environ.get(step.variable) == step.value:
        if step.variable in before:
            os.environ[step.variable] = before[step.variable]
        else:
            del os.environ[step.variable]


@contextlib.contextmanager
def _kept_output() -> Iterator[list[bytes]]:
    """What is written meanwhile to standard output and standard error, as far as it is worth keeping."""
    from muster.node import system

    kept: list[bytes] = []
    system.flush()
    saved = [(number, os.dup(number), os.memfd_create("muster-printed")) for number in (1, 2)]
    for number, _, file in saved:
        os.dup2(file, number)
    try:
        yield kept
    finally:
        system.flush()
        for number, old, file in saved:
            os.dup2(old, number)
            kept.append(os.pread(file, MAX_PRINTED, 0))
            os.close(old)
            os.close(file)


__all__ = ["Loaded", "Spoilt", "lacking", "load"]

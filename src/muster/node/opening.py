"""How does a program begin? What of its first lines can be done ahead without its noticing.

Those are the imports of other people's modules at the top of the script, as they are written there, up to the first
line that may change what an import does. A line that gives a variable a constant (`os.environ["X"] = "1"`) can be done
ahead, too. The program's own modules are looked into at the place where they are imported, and are never imported.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from muster.node import imports

_MAX_FILES = 50
_MAX_STEPS = 500
_OTHERS_READ = {"get", "items", "keys", "values", "copy"}
_HARMLESS = {
    *("bool", "dict", "float", "frozenset", "int", "len", "list", "max", "min", "range", "set", "str", "tuple"),
    *("logging.getLogger", "os.getenv", "Path", "pathlib.Path", "os.cpu_count", "time.time", "time.perf_counter"),
    *("os.path.abspath", "os.path.basename", "os.path.dirname", "os.path.join", "os.path.realpath"),
    *("TypeVar", "typing.TypeVar", "namedtuple", "collections.namedtuple"),
    *(f"{name}.{word}" for name in ("os.environ", "environ") for word in _OTHERS_READ),
}
_SETTERS = {"os.putenv", "os.unsetenv", "putenv", "unsetenv", "load_dotenv", "dotenv.load_dotenv"}
# What a rank is told anyway: setting it again says nothing about imports.
_OF_RANKS = {"MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}
_Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


class Load(NamedTuple):
    """Import a module, and take that name from it: a lazy package loads only what somebody takes."""

    module: str
    name: str = ""
    path: str = ""  # where that is written, which warnings point at
    line: int = 1
    main: bool = False
    sure: bool = True  # without it the program ends there: nothing is ready for its failure

    @property
    def key(self) -> str:
        return f"{self.module}:{self.name}" if self.name else self.module


class Put(NamedTuple):
    """Give a variable a value; with `default`, only where it has none."""

    variable: str
    value: str
    default: bool


class _Stop(Exception):
    """What follows may depend on what the program has done by then."""


class Obstacle(NamedTuple):
    """A line at the top of a program that keeps torch from being imported ahead."""

    path: Path
    line: int
    sets_variables: bool


def steps(mode: str, target: str) -> list[Load | Put]:
    """What the program does first, in its own order."""
    return _steps(_read(mode, target), mode, target)


def obstacle(mode: str, target: str) -> Obstacle | None:
    """Find the first line that keeps torch from being imported ahead, in a program that imports it."""
    reading = _read(mode, target)
    first = _steps(reading, mode, target)
    if reading.stopped is None or any(isinstance(step, Load) and step.module.startswith("torch") for step in first):
        return None
    if not imports.needs_torch(mode, target) or not sets_variables(mode, target, first):
        return None
    path, node = reading.stopped
    return Obstacle(path, node.lineno, _changes_environment(ast.Module([node], []), set()))


def _read(mode: str, target: str) -> _Reading:
    entries = imports.entry(mode, target)
    reading = _Reading(imports.roots(mode, entries), entries[-1] if entries else None, target)
    try:
        for path in entries:
            reading.read(path)
    except _Stop:
        pass
    return reading


def _steps(reading: _Reading, mode: str, target: str) -> list[Load | Put]:
    own = {target, f"{target}.__main__"} if mode == "module" else set()
    return [step for step in reading.steps if isinstance(step, Put) or step.module not in own]


def is_broken(mode: str, target: str) -> bool:
    """True if the program's own file does not compile."""
    entries = imports.entry(mode, target)
    return bool(entries) and imports.parsed(entries[-1]) is None


def sets_variables(mode: str, target: str, known: list[Load | Put]) -> bool:
    """True if the program may give variables other values than those `known` steps do, anywhere in its own files."""
    puts = {step for step in known if isinstance(step, Put)}
    trees = [tree for tree, _ in imports.walk(mode, target, set())]
    return not trees or any(_changes_environment(tree, puts) for tree in trees)


class _Reading:
    def __init__(self, roots: list[Path], main: Path | None, target: str) -> None:
        self._roots = roots
        self._main = main
        self._target = target
        self._seen: set[Path] = set()
        self._trying = 0
        self.steps: list[Load | Put] = []
        self.stopped: tuple[Path, ast.stmt] | None = None  # where the reading ended

    def read(self, path: Path) -> None:
        if path in self._seen:
            return
        self._seen.add(path)
        tree = imports.parsed(path)
        if tree is None or len(self._seen) > _MAX_FILES:
            raise _Stop
        for statement in tree.body:
            try:
                self._follow(statement, path)
            except _Stop:
                self.stopped = self.stopped or (path, statement)
                raise

    def _follow(self, node: ast.stmt, path: Path) -> None:
        if len(self.steps) > _MAX_STEPS:
            raise _Stop
        match node:
            case ast.Import():
                for alias in node.names:
                    self._import(alias.name, "", path, node.lineno)
            case ast.ImportFrom():
                base = imports.base_of(node, path, self._roots)
                for alias in node.names if base else ():
                    self._import(base, alias.name, path, node.lineno)
            case ast.Try():
                self._trying += 1
                for inner in node.body:
                    self._follow(inner, path)
                self._trying -= 1
                if any(map(_matters, [*node.handlers, *node.orelse, *node.finalbody])):
                    raise _Stop
            case ast.If() if _dotted(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING") and not node.orelse:
                return
            case ast.Assign() | ast.Expr() if (put := _put(node)) is not None:
                self.steps.append(put)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                return
            case ast.ClassDef():
                if _changes_environment(node, set()):
                    raise _Stop
            case _:
                if _matters(node):
                    raise _Stop

    def _import(self, module: str, name: str, path: Path, line: int) -> None:
        top = module.partition(".")[0]
        if top in ("muster", "__main__"):
            return
        whole = f"{module}.{name}" if name and name != "*" else module
        if files := imports.local(whole, self._roots):
            for file in files:
                self.read(file)
        elif top not in sys.stdlib_module_names:
            main = path == self._main
            typed = os.path.join(os.getcwd(), self._target)
            shown = typed if main and os.path.isfile(typed) else str(path)
            name = "" if name == "*" else name
            self.steps.append(Load(module, name, shown, line, main, sure=not self._trying))


def _put(node: ast.Assign | ast.Expr) -> Put | None:
    """`os.environ["NAME"] = "value"` or `os.environ.setdefault("NAME", "value")`."""
    found: tuple[ast.expr, ast.expr] | None = None
    default = False
    match node:
        case ast.Assign(targets=[ast.Subscript(value=place, slice=name)], value=value) if _is_environ(place):
            found = name, value
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=place, attr="setdefault"), args=[name, value])):
            default = True
            found = (name, value) if _is_environ(place) else None
    match found:
        case ast.Constant(value=str(variable)), ast.Constant(value=str(given)):
            sane = variable and "=" not in variable and "\0" not in variable + given
            return Put(variable, given, default) if sane else None
    return None


def _matters(node: ast.AST) -> bool:
    """Whether running this may change what a later import does. A function is not run where it is defined."""
    if isinstance(node, ast.If) and "__name__" in {_dotted(part) for part in ast.walk(node.test)}:
        return True  # the program itself
    for part in _run_by(node):
        match part:
            case ast.Call(func=func) if _dotted(func) not in _HARMLESS:
                return True
            case ast.Attribute(ctx=ast.Store() | ast.Del()) | ast.Subscript(ctx=ast.Store() | ast.Del()):
                return True
            case ast.Import() | ast.ImportFrom() if part is not node:
                continue  # whether it is run is not known here
            case ast.Await() | ast.Raise() | ast.AsyncFor() | ast.AsyncWith() | ast.While():
                return True
    return False


def _run_by(node: ast.AST) -> Iterator[ast.AST]:
    yield node
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, _Function):
            yield from _run_by(child)


def _changes_environment(tree: ast.AST, puts: set[Put]) -> bool:
    """Anything that is done to `os.environ` but reading it, beside what is done at the top and known."""
    top = [node for node in getattr(tree, "body", ()) if isinstance(node, ast.Assign | ast.Expr)]
    known = {id(node) for node in top if _put(node) in puts}
    todo: list[tuple[ast.AST, ast.AST]] = [(tree, child) for child in ast.iter_child_nodes(tree)]
    while todo:
        parent, node = todo.pop()
        if id(node) in known:
            continue
        if _is_environ(node) and not _only_reads(parent):
            return True
        if isinstance(node, ast.Call) and _dotted(node.func) in _SETTERS:
            return True
        if isinstance(node, ast.alias) and node.name == "environ" and node.asname:
            return True
        todo += [(node, child) for child in ast.iter_child_nodes(node)]
    return False


def _only_reads(parent: ast.AST) -> bool:
    """What is done with `os.environ` there. (Its name may also be part of a longer one, or be imported.)"""
    match parent:
        case ast.Subscript(ctx=ast.Load()) | ast.Compare() | ast.Dict() | ast.BinOp() | ast.keyword() | ast.For():
            return True
        case ast.Subscript(slice=ast.Constant(value=name)):
            return name in _OF_RANKS
        case ast.Attribute(attr=word):
            return word in _OTHERS_READ or word == "environ"
        case ast.Call(func=func):
            return _dotted(func) in ("dict", "len", "sorted", "list", "print", "json.dumps")
    return False


def _is_environ(node: ast.AST) -> bool:
    return f".{_dotted(node)}".endswith(".environ")


def _dotted(node: ast.AST) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr):
            return f"{_dotted(value)}.{attr}"
    return ""

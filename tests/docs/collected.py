"""Tests with their marks and the targets of make that run them, read from the sources: no test module is imported."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from tests.tiers import MARK_OF_FIXTURE

ROOT = Path(__file__).parents[2]
_RECIPE = re.compile(r"(?m)^([a-z][-a-z]*):.*\n((?:\t.*\n)+)")
_VARIABLE = re.compile(r"(?m)^(\w+) := (.*)$")
_MARKED = re.compile(r"-m '([^']+)'(.*)")


@dataclass(frozen=True)
class Target:
    """A target of make that runs tests: its expression of marks, and the folders and files that it is limited to."""

    name: str
    expression: str
    folders: tuple[str, ...]

    def runs(self, path: str, marks: frozenset[str]) -> bool:
        names = {word: word in marks for word in re.findall(r"\w+", self.expression)}
        if self.folders and not any(path == folder or path.startswith(f"{folder}/") for folder in self.folders):
            return False
        return bool(eval(self.expression, {}, names))  # pytest evaluates it in the same way


def targets(makefile: str) -> dict[str, Target]:
    """Return the targets whose recipe gives pytest an expression of marks, in the order of the Makefile."""
    variables = dict(_VARIABLE.findall(makefile))
    targets_by_name = {}
    for name, recipe in _RECIPE.findall(makefile):
        for variable, value in variables.items():
            recipe = recipe.replace(f"$({variable})", value)
        if marked := _MARKED.search(recipe.replace("-m pytest", "")):
            expression, rest = marked[1], marked[2].split()
            folders = tuple(word for word in rest if word.startswith("tests/"))
            if "$(" not in " ".join(folders):
                targets_by_name[name] = Target(name, expression, folders)
        elif alone := re.search(r"-m pytest -m (\w+) (tests/\w+)", recipe):
            targets_by_name[name] = Target(name, alone[1], (alone[2],))
    return targets_by_name


@dataclass(frozen=True)
class _Fixture:
    needs: tuple[str, ...]
    always: bool
    of_params: frozenset[str]


@dataclass(frozen=True)
class MarkedTest:
    """A test function: the marks of all its cases, and the marks that only some cases have."""

    path: str
    name: str
    marks: frozenset[str]
    of_cases: frozenset[str]

    def runs_in(self, target: Target) -> bool:
        cases = [self.marks, *(self.marks | {mark} for mark in self.of_cases)]
        return any(target.runs(self.path, marks) for marks in cases)

    @property
    def is_scenario(self) -> bool:
        return "scenario" in self.marks | self.of_cases


@dataclass
class _Module:
    fixtures: dict[str, _Fixture] = field(default_factory=dict)
    tests: dict[str, ast.FunctionDef | ast.AsyncFunctionDef] = field(default_factory=dict)
    constants: dict[str, ast.expr] = field(default_factory=dict)
    marks: frozenset[str] = frozenset()


def read_tests(path: str, root: Path = ROOT) -> dict[str, MarkedTest]:
    """Return the tests of one file by name."""
    module = _module(root, path)
    folders = [*reversed(Path(path).parents[:-1])]
    layers = [_module(root, str(folder / "conftest.py")) for folder in folders] + [module]
    fixtures: dict[str, _Fixture] = {}
    for layer in layers:
        fixtures |= layer.fixtures
    return {name: _test(path, module, fixtures, node) for name, node in module.tests.items()}


def all_tests(root: Path = ROOT) -> Iterator[MarkedTest]:
    for path in sorted((root / "tests").rglob("test_*.py")):
        yield from read_tests(str(path.relative_to(root)), root).values()


def _test(
    path: str, module: _Module, fixtures: Mapping[str, _Fixture], node: ast.FunctionDef | ast.AsyncFunctionDef
) -> MarkedTest:
    marks, of_cases = set(module.marks), set()
    names = [*_arguments(node), *(name for name, fixture in fixtures.items() if fixture.always)]
    for decorator in node.decorator_list:
        if (mark := _mark(decorator)) == "parametrize":
            of_cases |= _marks_within(decorator, module)
        elif mark == "usefixtures" and isinstance(decorator, ast.Call):
            names += [str(ast.literal_eval(argument)) for argument in decorator.args]
        elif mark:
            marks.add(mark)
        elif isinstance(decorator, ast.Name) and decorator.id in module.constants:
            constant = module.constants[decorator.id]
            if (mark := _mark(constant)) == "parametrize":
                of_cases |= _marks_within(constant, module)
            elif mark:
                marks.add(mark)
    values = {name for decorator in node.decorator_list for name in _parameters(decorator, module)}
    for name in _closure([name for name in names if name not in values], fixtures):
        marks |= {MARK_OF_FIXTURE[name]} if name in MARK_OF_FIXTURE else set()
        of_cases |= fixtures[name].of_params if name in fixtures else set()
    return MarkedTest(path, node.name, frozenset(marks), frozenset(of_cases) - marks)


def _parameters(decorator: ast.expr, module: _Module) -> list[str]:
    """Return the arguments that a `parametrize` gives values to: no fixture of that name is used."""
    if isinstance(decorator, ast.Name):
        decorator = module.constants.get(decorator.id, decorator)
    if _mark(decorator) != "parametrize" or not isinstance(decorator, ast.Call):
        return []
    if any(option.arg == "indirect" for option in decorator.keywords):
        return []
    names = ast.literal_eval(decorator.args[0])
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)


def _closure(names: list[str], fixtures: Mapping[str, _Fixture]) -> set[str]:
    closure: set[str] = set()
    while names:
        name = names.pop()
        if name not in closure:
            closure.add(name)
            names += fixtures[name].needs if name in fixtures else ()
    return closure


@cache
def _module(root: Path, path: str) -> _Module:
    module = _Module()
    if not (root / path).exists():
        return module
    for node in ast.parse((root / path).read_text()).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests."):
            imported = _module(root, str(node.module).replace(".", "/") + ".py")
            for alias in node.names:
                if alias.name in imported.fixtures:
                    module.fixtures[alias.asname or alias.name] = imported.fixtures[alias.name]
                elif alias.name in imported.tests:
                    module.tests[alias.asname or alias.name] = imported.tests[alias.name]
                elif alias.name in imported.constants:
                    module.constants[alias.asname or alias.name] = imported.constants[alias.name]
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            module.constants[node.targets[0].id] = node.value
            if node.targets[0].id == "pytestmark":
                values = node.value.elts if isinstance(node.value, ast.List) else [node.value]
                module.marks = frozenset(filter(None, map(_mark, values)))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if fixture := _fixture(node):
                module.fixtures[fixture[0]] = fixture[1]
            elif node.name.startswith("test_"):
                module.tests[node.name] = node
    return module


def _fixture(node: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[str, _Fixture] | None:
    for decorator in node.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        if _dotted(called) == "pytest.fixture":
            options = {word.arg: word.value for word in decorator.keywords} if isinstance(decorator, ast.Call) else {}
            always = "autouse" in options and bool(ast.literal_eval(options["autouse"]))
            name = str(ast.literal_eval(options["name"])) if "name" in options else node.name
            of_params = frozenset(_names_of_marks(options["params"])) if "params" in options else frozenset()
            return name, _Fixture(tuple(_arguments(node)), always, of_params)
    return None


def _arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    return [argument.arg for argument in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]]


def _mark(node: ast.expr) -> str:
    """Return the name of `pytest.mark.NAME` or `pytest.mark.NAME(…)`, else nothing."""
    text = _dotted(node.func if isinstance(node, ast.Call) else node)
    return text.removeprefix("pytest.mark.") if text.startswith("pytest.mark.") else ""


def _marks_within(node: ast.expr, module: _Module) -> set[str]:
    """Return the marks of single cases in a `parametrize`, also where its cases are a constant of the module."""
    constants = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)} & module.constants.keys()
    parts = [node, *(module.constants[name] for name in constants)]
    return set().union(*map(_names_of_marks, parts)) - {"parametrize"}


def _names_of_marks(node: ast.expr) -> set[str]:
    """Return the names of all `pytest.mark.NAME` in an expression."""
    return {
        part.attr for part in ast.walk(node) if isinstance(part, ast.Attribute) and _dotted(part.value) == "pytest.mark"
    }


def _dotted(node: ast.expr) -> str:
    """Return `a.b.c` as text, and nothing for other expressions."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := _dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""

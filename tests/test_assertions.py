"""A check that every test can fail: it asserts, expects an error, or calls a helper of the tests that does."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Calls of libraries that raise, and waits: some methods named `until` leave the bound to their caller.
_CHECKS = {"raises", "warns", "fail", "expect", "assert_close", "run_state_machine_as_test"}
_CHECKS |= {"timeout", "wait_for", "until"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, eq=False)
class Routine:
    """A function under tests: whether it checks by itself, and the helpers that it may use."""

    path: str
    checks: bool
    names: frozenset[str]
    methods: frozenset[str]


@dataclass
class Suite:
    """All functions under tests. A method is known by its name only."""

    functions: dict[tuple[str, str], Routine] = field(default_factory=dict)
    methods: dict[str, list[Routine]] = field(default_factory=dict)
    imports: dict[tuple[str, str], tuple[str, str]] = field(default_factory=dict)
    modules: dict[str, dict[str, str]] = field(default_factory=dict)

    def resolve(self, path: str, name: str) -> Routine | None:
        module, _, function = name.rpartition(".")
        if module in self.modules.get(path, {}):
            path = self.modules[path][module]
        place = (path, function)
        while place in self.imports:
            place = self.imports[place]
        return self.functions.get(place)

    def helpless(self) -> list[str]:
        """Return the tests that cannot fail."""
        checking = {routine for routine in self._all() if routine.checks}
        while more := {routine for routine in self._all() if routine not in checking and self._uses(routine, checking)}:
            checking |= more
        return sorted(
            f"{path}::{name}"
            for (path, name), routine in self.functions.items()
            if name.startswith("test_") and Path(path).name.startswith("test_") and routine not in checking
        )

    def _all(self) -> Iterator[Routine]:
        yield from self.functions.values()
        for routines in self.methods.values():
            yield from routines

    def _uses(self, routine: Routine, checking: set[Routine]) -> bool:
        if any(self.resolve(routine.path, name) in checking for name in routine.names):
            return True
        return any(name in self.methods and checking.issuperset(self.methods[name]) for name in routine.methods)


def read_suite(root: Path) -> Suite:
    suite = Suite()
    for file in sorted((root / "tests").rglob("*.py")):
        path = str(file.relative_to(root))
        tree = ast.parse(file.read_text())
        for node in tree.body:
            if isinstance(node, Function):
                suite.functions[path, node.name] = _routine(path, node)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
                if isinstance(target, ast.Name):
                    suite.functions[path, target.id] = _routine(path, node)  # perhaps the cases of a `parametrize`
            elif isinstance(node, ast.ClassDef):
                for method in node.body:
                    if isinstance(method, Function):
                        suite.methods.setdefault(method.name, []).append(_routine(path, method))
            elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("tests."):
                source = node.module.replace(".", "/")
                for alias in node.names:
                    suite.imports[path, alias.asname or alias.name] = (f"{source}.py", alias.name)
                    suite.modules.setdefault(path, {})[alias.asname or alias.name] = f"{source}/{alias.name}.py"
    return suite


def _routine(path: str, definition: Function | ast.Assign | ast.AnnAssign) -> Routine:
    names, methods = set(), set()
    for node in ast.walk(definition):
        if isinstance(node, ast.Assert | ast.Raise):
            return Routine(path, True, frozenset(), frozenset())
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            methods.add(node.func.attr)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            names.add(f"{node.value.id}.{node.attr}")
        elif isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.arg):
            names.add(node.arg)  # a fixture of the module may give the test a function that checks
    return Routine(path, bool(_CHECKS & (names | methods)), frozenset(names), frozenset(methods))


def test_every_test_can_fail() -> None:
    assert read_suite(ROOT).helpless() == []


HELPERS = """
def eventually(condition):
    while not condition():
        raise AssertionError

def play(story):
    story()

class World:
    def until(self, condition):
        eventually(condition)

    def join(self):
        self.joined = True
"""
MODULE = """
from tests.helpers import World, eventually as soon, play

def checked(story):
    play(story)
    assert story.played

def test_case():
"""


@pytest.mark.parametrize(
    ("body", "can_fail"),
    [
        ("assert World()", True),
        ("with pytest.raises(ValueError): World()", True),
        ("World().until(bool)", True),
        ("soon(bool)", True),
        ("checked(lambda: None)", True),
        ("World().join()", False),
        ("play(World().join)", False),
        ("eventually = World(); eventually(bool)", False),
    ],
)
def test_a_test_that_cannot_fail_is_listed(tmp_path: Path, body: str, can_fail: bool) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "helpers.py").write_text(HELPERS)
    (tmp_path / "tests" / "test_made.py").write_text(f"{MODULE}    {body}\n")
    assert (read_suite(tmp_path).helpless() == []) == can_fail

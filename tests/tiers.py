"""Tiers of tests: the marks that a test gets from its fixtures, and a check that no test evades its tier."""

from __future__ import annotations

import itertools
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import PurePath
from typing import Any

import pytest

from tests.prepared import prepared

# A test of `make test` that starts real processes carries the mark `scenario`, too.
MARK_OF_FIXTURE = {
    "browser": "pages",
    "cluster": "kube",
    "fleet": "process",
    "plane": "process",
    "processes": "process",
    "ray_outcomes": "ray",
    "real": "containers",
    "resident": "process",
}
_TIERS_WITH_PROCESSES = {"process", "containers", "engines", "frameworks", "kube", "netns", "pages", "ray", "soak"}
_COMMANDS = {"muster", "muster-node", "torchrun"}
_HELPERS = {"muster.package_check"}  # a server in the process of the test starts it for each package
_current: list[pytest.Item] = []


@pytest.fixture
def processes() -> None:
    """Give a test the mark `process` that starts a process of muster by itself."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for fixture in MARK_OF_FIXTURE.keys() & getattr(item, "fixturenames", ()):
            item.add_marker(MARK_OF_FIXTURE[fixture])


def is_of_muster(command: Sequence[Any] | Any) -> bool:
    """Return whether the command starts a program of muster, such as `muster`, `python -m muster.…` or torchrun."""
    words = [str(word) for word in command] if isinstance(command, Sequence) and not isinstance(command, str) else []
    if any(PurePath(word).name in _COMMANDS for word in words):
        return True
    modules = {word for option, word in itertools.pairwise(words) if option == "-m"}
    return any(module.partition(".")[0] == "muster" for module in modules - _HELPERS)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _current.append(item)
    prepared.forks = item.get_closest_marker("interpreter") is None
    try:
        return (yield)
    finally:
        _current.pop()


def check_commands() -> None:
    """Let a test fail that starts a process of muster in a tier without processes."""
    start = subprocess.Popen.__init__

    def checked(self: subprocess.Popen[Any], args: Any, *more: Any, **options: Any) -> None:
        if _current and is_of_muster(args) and not _TIERS_WITH_PROCESSES & _marks(_current[-1]):
            raise AssertionError(f"{_current[-1].nodeid} starts {args}: it has to take the fixture `processes`")
        start(self, args, *more, **options)

    subprocess.Popen.__init__ = checked  # type: ignore[method-assign]


def _marks(item: pytest.Item) -> set[str]:
    return {mark.name for mark in item.iter_markers()}

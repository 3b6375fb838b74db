"""The page of promises names tests that exist, in the target that runs them, and leaves out no page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs import promises
from tests.docs.collected import ROOT, MarkedTest, Target, all_tests, read_tests, targets
from tests.docs.test_site import navigation

PAGE = (ROOT / "docs" / "promises.md").read_text()
TARGETS = targets((ROOT / "Makefile").read_text())
WITHOUT_PROMISES = {
    "architecture.md",  # how the code is laid out
    "benchmarks.md",  # figures that were measured
    "comparison.md",  # other projects
    "promises.md",
    "protocol.md",  # frames, checked by tests/docs/test_docs.py
    "states.md",  # how the code is laid out
}


def scenarios(root: Path = ROOT) -> set[str]:
    """Return the tests marked `scenario`. Only files with that word are read."""
    paths = [path for path in sorted((root / "tests").rglob("test_*.py")) if "mark.scenario" in path.read_text()]
    tests = [test for path in paths for test in read_tests(str(path.relative_to(root)), root).values()]
    return {f"{test.path}::{test.name}" for test in tests if test.is_scenario}


def pages() -> set[str]:
    return {"README.md", *navigation()} - WITHOUT_PROMISES


# The page ----------------------------------------------------------------------------------------


def test_each_named_test_exists_and_runs_where_the_page_says() -> None:
    assert list(promises.problems(PAGE, TARGETS)) == []
    assert len({row.promise for row in promises.rows(PAGE)}) > 90


def test_each_page_that_makes_promises_has_one_section() -> None:
    assert promises.missing_pages(PAGE, pages()) == []
    assert set(promises.linked_pages(PAGE)) <= pages()
    assert set(navigation()) >= WITHOUT_PROMISES


def test_promises_without_a_test_come_last_and_have_a_reason() -> None:
    assert list(promises.unproven_problems(PAGE)) == []


def test_make_test_runs_forty_to_eighty_scenarios_and_each_proves_a_promise() -> None:
    assert list(promises.scenario_problems(PAGE, scenarios())) == []


# Wrong pages --------------------------------------------------------------------------------------

GOOD = """# Promises

## Spares
Page: [hot spares](hot-spares.md).

| promise | test | run by |
|---|---|---|
| Spares wait. | `tests/docs/test_promises.py::test_a_good_page_has_no_problems` | `make test` |
|  | `tests/test_tiers.py::test_a_test_with_the_fixture_may_start_muster` | `make test-process` |
"""


def test_a_good_page_has_no_problems() -> None:
    assert list(promises.problems(GOOD, TARGETS)) == []
    assert promises.missing_pages(GOOD, {"hot-spares.md"}) == []


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ("::test_a_good_page", "::test_a_bad_page", "test_a_bad_page_has_no_problems does not exist"),
        ("test_tiers.py", "test_no_tiers.py", "test_no_tiers.py::.* does not exist"),
        ("`make test-process`", "`make test`", "is run by make test-process, not by make test"),
        ("`make test` ", "`make test-kube` ", "is run by make test, not by make test-kube"),
        ("`make test` ", "`make everything` ", "not by make everything"),
        ("| Spares wait. ", "|  ", "the first row has no promise"),
        ("`make test` |", "soon |", "Spares: a row is not of the form"),
        (GOOD[GOOD.index("|  |") :], GOOD[GOOD.index("|  |") :] * 3, "Spares wait.: more than three tests"),
    ],
)
def test_a_wrong_row_is_reported(before: str, after: str, expected: str) -> None:
    page = GOOD.replace(before, after)
    assert page != GOOD
    reported = list(promises.problems(page, TARGETS))
    assert any(re.search(expected, problem) for problem in reported), reported


def test_a_page_without_a_section_or_with_two_is_reported() -> None:
    assert promises.missing_pages(GOOD, {"hot-spares.md", "state.md"}) == ["state.md"]
    twice = GOOD + GOOD.partition("\n\n")[2].replace("## Spares", "## Spares again")
    assert promises.missing_pages(twice, {"hot-spares.md"}) == ["hot-spares.md"]


@pytest.mark.parametrize(
    ("last", "expected"),
    [
        ("", "the last section is not 'Not proven by a test'"),
        (f"\n## {promises.UNPROVEN}\n", "no promise is listed"),
        (
            f"\n## {promises.UNPROVEN}\n| a | b | c |\n|---|---|---|\n| It flies. | state | |\n",
            "It flies.: a promise, a page",
        ),
        (f"\n## {promises.UNPROVEN}\n| a | b | c |\n|---|---|---|\n| It flies. | state | No test has wings. |\n", ""),
    ],
)
def test_a_promise_without_test_and_reason_is_reported(last: str, expected: str) -> None:
    reported = "; ".join(promises.unproven_problems(GOOD + last))
    assert reported.startswith(expected) and bool(reported) == bool(expected)


def test_too_few_and_too_many_scenarios_are_reported_and_those_without_a_promise() -> None:
    [row, _] = promises.rows(GOOD)
    few, *without = promises.scenario_problems(GOOD, {row.test, "tests/test_other.py::test_other"})
    assert few == "there are 2 scenarios, not 40 to 80"
    assert without == ["tests/test_other.py::test_other proves no promise"]
    many = {f"tests/test_many.py::test_{number}" for number in range(81)}
    assert next(promises.scenario_problems(GOOD, many)) == "there are 81 scenarios, not 40 to 80"
    enough = promises.scenario_problems(GOOD, {f"tests/test_many.py::test_{number}" for number in range(40)})
    assert all(problem.endswith("proves no promise") for problem in enough)


MODULE = """import pytest
from tests.tiers import processes

@pytest.fixture
def world(fleet): ...

@pytest.fixture(params=["here", pytest.param("there", marks=pytest.mark.kube)])
def place(): ...

def test_plain(): ...
def test_started(world): ...

@pytest.mark.scenario
def test_shown(plane): ...

@pytest.mark.usefixtures("processes")
def test_used(): ...

@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.scenario)])
def test_sampled(world, seed): ...

@pytest.mark.parametrize("plane", ["a", "b"])
def test_named_like_a_fixture(plane): ...

def test_in_two_places(place): ...

@pytest.mark.soak
def test_long(world): ...
"""


@pytest.fixture
def made_tests(tmp_path: Path) -> dict[str, MarkedTest]:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_made.py").write_text(MODULE)
    return read_tests("tests/test_made.py", tmp_path)


@pytest.mark.parametrize(
    ("name", "run_by"),
    [
        ("plain", {"test"}),
        ("started", {"test-process"}),
        ("shown", {"test"}),
        ("used", {"test-process"}),
        ("sampled", {"test", "test-process"}),
        ("named_like_a_fixture", {"test"}),
        ("in_two_places", {"test", "test-kube"}),
        ("long", {"soak"}),
    ],
)
def test_the_targets_of_a_test_follow_from_its_marks_and_fixtures(
    made_tests: dict[str, MarkedTest], name: str, run_by: set[str]
) -> None:
    assert {target.name for target in TARGETS.values() if made_tests[f"test_{name}"].runs_in(target)} == run_by


def test_scenarios_are_counted(tmp_path: Path, made_tests: dict[str, MarkedTest]) -> None:
    assert made_tests
    assert scenarios(tmp_path) == {"tests/test_made.py::test_shown", "tests/test_made.py::test_sampled"}


def test_a_target_that_is_limited_to_a_folder_runs_no_test_of_another() -> None:
    ray = TARGETS["test-ray"]
    folders = ("tests/contract", "tests/sharing", "tests/bench/test_small_runs.py")
    assert ray == Target("test-ray", "ray and not soak", folders)
    assert ray.runs("tests/sharing/test_ray.py", frozenset({"ray"}))
    assert ray.runs("tests/bench/test_small_runs.py", frozenset({"ray"}))
    assert not ray.runs("tests/core/test_ray.py", frozenset({"ray"}))


@pytest.mark.pages
def test_the_marks_that_are_read_are_those_that_pytest_sees(tmp_path: Path) -> None:
    """Compare outside of `make test`, because pytest needs half a minute to collect all tests."""
    (tmp_path / "noted.py").write_text(
        "def pytest_collection_finish(session):\n"
        "    for item in session.items:\n"
        "        print('NOTED', item.nodeid.partition('[')[0], *{mark.name for mark in item.iter_markers()})\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "noted", "-o", "addopts=", "--collect-only", "-q", "tests"]
    env = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    run_by_pytest: dict[str, set[str]] = {}
    for line in done.stdout.splitlines():
        if line.startswith("NOTED "):
            _, name, *marks = line.split()
            run_by = {
                target.name for target in TARGETS.values() if target.runs(name.partition("::")[0], frozenset(marks))
            }
            run_by_pytest.setdefault(name, set()).update(run_by)
    read = {
        f"{test.path}::{test.name}": {target.name for target in TARGETS.values() if test.runs_in(target)}
        for test in all_tests()
    }
    assert {name: run_by_pytest.get(name) for name in read} == read

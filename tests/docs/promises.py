"""The page of promises: its rows, and the differences between the page and the tests."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from tests.docs.collected import Target, read_tests

UNPROVEN = "Not proven by a test"
_SECTION = re.compile(r"(?m)^## (.+)$")
_PAGE = re.compile(r"(?m)^Page: (?:\[.+\]\()?`?(\w\S*?\.md)[`)]\.$")  # a link, or a name of a file outside of docs
_ROW = re.compile(r"(?m)^\| (.*?) *\| `([^`]+)` +\| `make ([-a-z]+)` +\|$")
_LINE = re.compile(r"(?m)^\|.*$")
_MOST_TESTS = 3
_FEWEST_SCENARIOS, _MOST_SCENARIOS = 40, 80


@dataclass(frozen=True)
class Row:
    """One test of a promise, and the target of make that runs it."""

    section: str
    promise: str
    test: str
    target: str


def sections(page: str) -> dict[str, str]:
    """Return the text of each section by its heading."""
    _, *parts = _SECTION.split(page)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def rows(page: str) -> Iterator[Row]:
    for heading, text in sections(page).items():
        promise = ""
        for first, test, target in _ROW.findall(text) if heading != UNPROVEN else ():
            promise = first or promise
            yield Row(heading, promise, test, target)


def linked_pages(page: str) -> list[str]:
    """Return the page that each section is about."""
    return [link for text in sections(page).values() for link in _PAGE.findall(text)]


def missing_pages(page: str, pages: Iterable[str]) -> list[str]:
    linked = linked_pages(page)
    return sorted(name for name in pages if linked.count(name) != 1)


def scenario_problems(page: str, scenarios: set[str]) -> Iterator[str]:
    """Yield a sentence if `make test` runs too few or too many scenarios, and for each one without a promise."""
    if not _FEWEST_SCENARIOS <= len(scenarios) <= _MOST_SCENARIOS:
        yield f"there are {len(scenarios)} scenarios, not {_FEWEST_SCENARIOS} to {_MOST_SCENARIOS}"
    yield from (f"{test} proves no promise" for test in sorted(scenarios - {row.test for row in rows(page)}))


def unproven_problems(page: str) -> Iterator[str]:
    """Yield a sentence if promises without a test are not in the last section, or have no reason."""
    heading, text = list(sections(page).items())[-1]
    if heading != UNPROVEN:
        yield f"the last section is not {UNPROVEN!r}"
        return
    lines = _LINE.findall(text)[2:]
    if not lines:
        yield "no promise is listed"
    for line in lines:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) != 3 or not all(cells):
            yield f"{cells[0]}: a promise, a page and a reason are needed"


def problems(page: str, targets: Mapping[str, Target]) -> Iterator[str]:
    """Yield a sentence for each row that does not agree with the tests."""
    for heading, text in sections(page).items():
        if heading != UNPROVEN and len(_ROW.findall(text)) + 2 != len(_LINE.findall(text)):
            yield f"{heading}: a row is not of the form | promise | `tests/….py::test_…` | `make …` |"
    counts: dict[tuple[str, str], int] = {}
    for row in rows(page):
        key = row.section, row.promise
        counts[key] = counts.get(key, 0) + 1
        path, _, name = row.test.partition("::")
        test = read_tests(path).get(name)
        if not row.promise:
            yield f"{row.section}: the first row has no promise"
        if test is None:
            yield f"{row.test} does not exist"
        elif row.target not in targets or not test.runs_in(targets[row.target]):
            runs = " and ".join(f"make {target.name}" for target in targets.values() if test.runs_in(target))
            yield f"{row.test} is run by {runs}, not by make {row.target}"
    yield from (f"{promise}: more than three tests" for (_, promise), count in counts.items() if count > _MOST_TESTS)

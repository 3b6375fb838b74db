"""When is a home what was left there? By table: what is found, and what is said of it."""

from __future__ import annotations

import re
from typing import Any

import pytest

from muster.core.home import FileState, Found, Kept, advice, loss

ID, OTHER = "a" * 32, "b" * 32
ABSENT, DAMAGED = Kept(FileState.ABSENT), Kept(FileState.DAMAGED, "malformed")
WORKER = ("t1", "demo-0")


def a_database(**what: Any) -> Kept:
    return Kept(FileState.READABLE, **{"home": ID, "commits": 9, "trainings": frozenset({"t1"}), **what})


def found(kept: Kept, **what: Any) -> Found:
    return Found("muster.db", kept, **{"marks": {"identity.json": ID}, "reached": 9, **what})


@pytest.mark.parametrize(
    "home",
    [
        found(ABSENT, marks={}, reached=0),
        found(DAMAGED, marks={}, reached=0),  # whoever opens it says what it is
        found(a_database()),
        found(a_database(), reached=8),
        found(a_database(), marks={}, reached=0),
        found(a_database(home="", commits=0), marks={}, reached=0, folders={"t1"}, living=[WORKER]),
        found(a_database(), folders={"t1"}, living=[WORKER]),
        found(a_database(told=frozenset({"t2"})), folders={"t2"}),
        found(a_database(trainings=frozenset(), deleted=frozenset({"t1"})), folders={"t1"}),
        found(a_database(trainings=frozenset()), folders={"t1"}, forgotten=["t1"]),
        found(a_database(workers=frozenset({"t2/demo-0"})), living=[("t2", "demo-0")]),
    ],
)
def test_a_home_as_it_was_left_is_served(home: Found) -> None:
    assert loss(home) == ""


@pytest.mark.parametrize(
    ("home", "said"),
    [
        (found(ABSENT), "is missing or empty"),
        (found(ABSENT, marks={}, folders={"t1"}), "is missing or empty"),
        (found(ABSENT, marks={}, living=[WORKER]), "is missing or empty"),
        (found(DAMAGED), r"is damaged \(malformed\)"),
        (found(a_database(home=OTHER)), "is the database of another home: identity.json says so"),
        (found(a_database(home="")), "does not know this home"),
        (found(a_database(commits=8)), "has lost the last 1 write that it had"),
        (found(a_database(commits=2)), "has lost the last 7 writes that it had"),
        (found(a_database(), living=[("t2", "demo-0")]), "does not know them"),
        (found(a_database(trainings=frozenset(), workers=frozenset({"t1/demo-0"})), living=[WORKER]), "does not know"),
        (found(a_database(), folders={"t2"}), r"knows nothing of trainings whose logs are here \(t2\)"),
        (found(a_database(trainings=frozenset(), told=frozenset({"t1"})), folders={"t1"}), "knows nothing of"),
    ],
)
def test_a_home_that_has_lost_something_is_not_served(home: Found, said: str) -> None:
    what = loss(home)
    assert re.search(said, what)
    told = advice(home, what)
    assert "muster server restore FILE" in told and "muster server forget" in told
    assert ("workers run here" in told) == bool(home.living)


def test_ten_workers_are_not_all_named() -> None:
    home = found(ABSENT, living=[("t1", f"demo-{n}") for n in range(10)])
    assert "workers run here (demo-0, " in advice(home, loss(home)) and "demo-7 and 2 more" in advice(home, loss(home))

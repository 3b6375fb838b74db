"""Which writes of a status are allowed."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from muster.core.training import lifecycle
from muster.types.training import TERMINAL, Outcome, Status
from tests.training_builders import a_rank_exit

NOW = datetime(2026, 1, 1, tzinfo=UTC)
DONE = Status(2, "succeeded", rank_exits=(a_rank_exit(),), outcome=Outcome("succeeded"), finished_at=NOW)


def test_the_table_allows_exactly_the_ways_of_the_contract() -> None:
    phases = ["pending", "ready", *sorted(TERMINAL)]
    ways = {(a, b) for a in phases for b in phases if a != b and lifecycle.may_become(a, b)}
    assert ways == {("pending", "ready")} | {(a, b) for a in ("pending", "ready") for b in TERMINAL}


def test_only_what_is_suspended_is_pending_again() -> None:
    ready = Status(2, "ready")
    assert lifecycle.set_back(ready) == ready and lifecycle.broken_rules(ready, replace(ready, phase="pending"))
    suspended = lifecycle.with_condition(ready, "Admitted", False, "Suspended", "waits", NOW, 3)
    assert lifecycle.set_back(suspended).phase == "pending"
    assert lifecycle.broken_rules(ready, lifecycle.set_back(suspended)) == []
    assert lifecycle.set_back(replace(suspended, phase="failed")).phase == "failed"


@pytest.mark.parametrize(
    ("after", "rule"),
    [
        (replace(DONE, phase="failed"), "cannot become"),
        (replace(DONE, phase="ready", rank_exits=None), "cannot become"),
        (replace(DONE, observed_generation=1), "must not go back"),
        (replace(DONE, outcome=Outcome("failed")), "decided once"),
        (replace(DONE, rank_exits=None), "exactly when"),
        (replace(DONE, rank_exits=()), "nothing of an ended"),
        (replace(DONE, restarts=5), "nothing of an ended"),
    ],
)
def test_an_ended_training_cannot_be_rewritten(after: Status, rule: str) -> None:
    assert any(rule in broken for broken in lifecycle.broken_rules(DONE, after))


def test_a_new_generation_may_be_noted_and_nothing_else() -> None:
    assert lifecycle.broken_rules(DONE, DONE) == []
    assert lifecycle.broken_rules(DONE, replace(DONE, observed_generation=3)) == []


def test_exits_belong_to_ended_trainings_only() -> None:
    assert lifecycle.broken_rules(Status(), Status(rank_exits=())) != []
    assert lifecycle.broken_rules(Status(), Status(phase="cancelled", rank_exits=())) == []


def test_a_condition_keeps_the_time_at_which_it_turned() -> None:
    first = lifecycle.with_condition(Status(), "Admitted", False, "Queued", "waits", NOW, 1)
    later = NOW + timedelta(seconds=5)
    same = lifecycle.with_condition(first, "Admitted", False, "Queued", "still waits", later, 2)
    turned = lifecycle.with_condition(same, "Admitted", True, "Admitted", "go", later, 2)
    assert [one.conditions[0].last_transition_time for one in (first, same, turned)] == [NOW, NOW, later]
    assert same.conditions[0].message == "still waits" and same.conditions[0].observed_generation == 2
    assert len(turned.conditions) == 1


def test_a_phase_that_cannot_be_entered_is_a_fault() -> None:
    with pytest.raises(ValueError, match="cannot become"):
        lifecycle.with_phase(DONE, "ready")

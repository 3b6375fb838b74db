"""What a program says of its secret variables, and who reads it."""

from __future__ import annotations

from muster.core.training.hiding import Hiding
from muster.types.event import Event
from muster.types.training import Condition, Outcome, Spec, Status
from tests.training_builders import a_rank_exit

SPEC = Spec(
    script="train.py",
    env={"KEY": "hunter2 and more", "PEM": "first-line\nsecond-line\n", "SHORT": "on", "OPEN": "in-the-open"},
    secret_env=("KEY", "PEM", "SHORT", "GONE"),
)


def test_values_are_hidden_wherever_words_of_a_program_are_told() -> None:
    end = a_rank_exit(0, 1, stderr_tail=("no hunter2 here", "second-line on in-the-open"))
    outcome = Outcome("failed", "rank_failed", "rank 0: hunter2 and more!", end)
    told = Status(outcome=outcome, rank_exits=(end,), conditions=(Condition("Ready", "False", "x", "hunter2"),))
    found = Hiding(SPEC).status(told)
    assert found.outcome is not None and found.outcome.message == "rank 0: ***!"
    assert found.rank_exits is not None and found.outcome.first_failure == found.rank_exits[0]
    assert found.rank_exits[0].stderr_tail == ("no *** here", "*** on in-the-open")
    assert found.conditions[0].message == "***"
    assert Hiding(SPEC).status(found) == found


def test_entries_of_the_journal_have_none_either() -> None:
    event = Event("RankFailed", "it said first-line", data={"lost": ["second-line"], "step": 3})
    assert Hiding(SPEC).event(event) == Event("RankFailed", "it said ***", data={"lost": ["***"], "step": 3})


def test_where_nothing_is_secret_nothing_is_looked_at() -> None:
    status, event = Status(), Event("x", "hunter2")
    hiding = Hiding(Spec(script="train.py", env={"KEY": "hunter2"}))
    assert hiding.status(status) is status and hiding.event(event) is event

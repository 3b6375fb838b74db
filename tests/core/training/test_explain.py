from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.core.training.explain import Explanation, explain, first_line, show_age
from muster.types.event import WORKER_EXITED, Event
from muster.types.state import KeptState
from muster.types.training import (
    LENT,
    Cancel,
    Condition,
    Metadata,
    Outcome,
    RankExit,
    Resize,
    Spec,
    Status,
    Training,
    WorldSize,
    WorldStatus,
)

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)
Truth = Literal["True", "False", "Unknown"]


def ago(seconds: float) -> datetime:
    return NOW - timedelta(seconds=seconds)


def a_condition(kind: str, status: Truth, message: str, seconds: float = 5) -> Condition:
    return Condition(kind, status, "Because", message, ago(seconds), 1)


def a_training(
    *conditions: Condition, generation: int = 1, spec: dict[str, Any] | None = None, **status: Any
) -> Training:
    status.setdefault("observed_generation", 1)
    status.setdefault("world_size", WorldStatus(ready=2, target=2, min=2, max=4))
    return Training(
        Metadata("demo", uid="u1", generation=generation),
        Spec(script="train.py", world_size=WorldSize(2, 2, 4), **(spec or {})),
        Status(conditions=conditions, **status),
    )


def explained(training: Training, *events: Event) -> Explanation:
    return explain(training, events, NOW)


def test_a_training_that_nobody_looked_at_says_so() -> None:
    assert "has not looked at it yet" in explained(a_training(observed_generation=0)).summary


def test_a_training_without_gpus_gives_the_reason_of_its_admission() -> None:
    why = "needs 2 GPUs, 1 is free; training 'other' holds 7"
    training = a_training(a_condition("Admitted", "False", why), a_condition("TargetReached", "False", "not admitted"))

    found = explained(training)

    assert found.summary == f"demo is pending: {why}."
    assert "Admitted is False for 5s" in found.details
    assert str(found).count(why) == 1, "no sentence is said twice"


def test_two_conditions_with_the_same_message_say_it_once() -> None:
    told = "1 of 2 workers has joined"
    conditions = (a_condition("TargetReached", "False", told), a_condition("Resizing", "True", told))
    found = explained(a_training(a_condition("Admitted", "True", "fits"), *conditions))

    assert str(found).count(told) == 1
    assert sum(line.startswith(("TargetReached is False", "Resizing is True")) for line in found.details) == 2


def test_a_pending_training_that_was_admitted_names_what_it_waits_for() -> None:
    world = WorldStatus(ready=0, target=2, min=2, max=4)
    admitted = a_condition("Admitted", "True", "fits")
    waiting = a_condition("TargetReached", "False", "1 of 2 workers have joined")

    assert explained(a_training(admitted, waiting, world_size=world)).summary == (
        "demo is pending with 0 of at least 2 workers: 1 of 2 workers have joined."
    )


def test_a_pending_training_without_conditions_still_gets_a_sentence() -> None:
    assert "its world has not formed yet" in explained(a_training()).summary


def test_a_training_below_its_minimum_says_when_it_fails() -> None:
    world = WorldStatus(ready=1, target=2, min=2, max=4, below_minimum=True)
    below = a_condition("BelowMinimum", "True", "worker w1 was lost", seconds=60)

    found = explained(a_training(below, phase="ready", world_size=world))

    assert found.summary == "demo is below its minimum: 1 of 2 workers train: worker w1 was lost."
    assert "it fails in 4m unless 2 workers train by then" in found.details


WITH_P2 = "GPU 5 is with p2's generation since 12 s, comes back in about 30 s"


def test_one_that_lends_says_where_its_gpus_are_and_when_they_come_back() -> None:
    lent = Condition("TargetReached", "False", LENT, "1 of 2 ready: GPU 5 is with p2's generation", ago(5), 1)
    world = WorldStatus(ready=1, target=2, min=1, max=4)
    training = a_training(lent, phase="ready", world_size=world, spec={"elasticity": "lend"})

    assert explain(training, (), NOW, lent=WITH_P2).summary == f"demo trains with 1 of 2 workers: {WITH_P2}."
    assert "1 of 2 ready: GPU 5" in explained(training).summary, "without the pool's word the status has to do"


def test_one_that_fills_says_that_it_has_more_than_was_asked_for_and_until_when() -> None:
    reached = a_condition("TargetReached", "True", "4 of 4 workers train")
    world = WorldStatus(ready=4, target=2, min=1, max=6)
    training = a_training(reached, phase="ready", world_size=world, spec={"elasticity": "fill"})

    found = explain(training, (), NOW, lent=WITH_P2)

    assert found.summary == ("demo is ready: 4 workers train, 2 more than asked for, until somebody needs their GPUs.")
    assert found.details[0] == f"lent: {WITH_P2}"


def test_where_lent_gpus_are_is_of_no_interest_once_it_has_ended() -> None:
    ended = a_training(phase="succeeded", outcome=Outcome("succeeded", "Done", ""), finished_at=ago(5))
    assert "lent" not in str(explain(ended, (), NOW, lent=WITH_P2))


def test_a_resize_is_told_with_its_last_step() -> None:
    resizing = a_condition("Resizing", "True", "one more worker is starting")
    training = a_training(
        resizing,
        phase="ready",
        world_size=WorldStatus(ready=2, target=3, min=2, max=4),
        last_resize=Resize(2, 3, "scaled by alice", ago(10)),
    )

    found = explained(training)

    assert found.summary == "demo is resizing to 3 workers: one more worker is starting."
    assert "last resize: 2 → 3 workers, 10s ago: scaled by alice" in found.details


def test_a_change_that_is_not_acted_on_yet_is_named() -> None:
    found = explained(a_training(phase="ready", generation=3, round=0))

    assert "has not acted on that yet" in found.summary
    assert "generation 3 was asked for; generation 1 is acted on" in found.details


def test_a_training_that_is_well_says_so() -> None:
    reached = a_condition("TargetReached", "True", "all there")

    assert explained(a_training(reached, phase="ready", round=4)).summary == (
        "demo is ready: 2 of 2 workers train in round 4."
    )


def test_a_failed_training_names_each_rank_that_failed_and_the_last_output_of_the_first() -> None:
    first = RankExit(1, 137, "OOMKilled", "SIGKILL", "w1", stderr_tail=("loading", "out of memory"))
    training = a_training(
        phase="failed",
        outcome=Outcome("failed", "RankFailed", "rank 1: exit_code=137 reason=OOMKilled", first, ago(30)),
        rank_exits=(RankExit(0, 143, "Stopped", "SIGTERM", "w0"), first),
        started_at=ago(90),
        finished_at=ago(30),
    )

    found = explained(training)

    assert found.summary == "demo failed 30s ago after 1m: rank 1: exit_code=137 reason=OOMKilled."
    assert found.details == (
        "rank 1: exit_code=137 reason=OOMKilled on w1 in round 0",
        "last output of rank 1: out of memory",
    )


def test_what_the_first_line_says_is_not_repeated() -> None:
    cause = "ValueError: label 7 at train.py:7 (rank 1)"
    message = f"{cause}; worker w1, round 1; 1 of 1 restarts used"
    first = RankExit(1, 1, "Exit 1", None, "w1", stderr_tail=("ValueError: label 7",))
    training = a_training(
        phase="failed",
        outcome=Outcome("failed", "RankFailed", message, first, ago(30)),
        rank_exits=(first,),
        started_at=ago(90),
        finished_at=ago(30),
    )
    events = [
        Event("RankFailed", f"{cause}; worker w0", "Warning", uid="u1", at=ago(60)),
        Event("RankFailed", f"{cause}; worker w1", "Warning", uid="u1", at=ago(31)),
        Event("OutcomeDecided", f"failed: {message}", uid="u1", at=ago(30)),
        Event("Failed", f"{message} [rank 1: exit_code=1 reason=Exit 1]", "Warning", uid="u1", at=ago(30)),
    ]

    found = explained(training, *events)

    assert str(found).count("label 7") == 1
    assert found.details[-2:] == ("1m ago: RankFailed: the same; worker w0", "31s ago: RankFailed: the same; worker w1")


def test_a_success_is_told_once() -> None:
    ended = a_training(phase="succeeded", outcome=Outcome("succeeded", message="all ranks exited 0"), rank_exits=())
    events = [
        Event("OutcomeDecided", "succeeded: all ranks exited 0", uid="u1", at=ago(2)),
        Event("Succeeded", "all ranks exited 0", uid="u1", at=ago(2)),
    ]
    assert explained(ended, *events).details == ("2s ago: Succeeded: all ranks exited 0",)


@pytest.mark.parametrize(("phase", "text"), [("succeeded", "demo succeeded"), ("cancelled", "demo was cancelled")])
def test_an_end_is_told_as_what_it_was(phase: Any, text: str) -> None:
    training = a_training(phase=phase, outcome=Outcome(phase), finished_at=ago(120), rank_exits=())

    assert explained(training).summary == f"{text} 2m ago."


def test_an_outcome_that_is_not_yet_final_is_told_as_ending() -> None:
    training = a_training(phase="ready", outcome=Outcome("failed", message="rank 0: exit_code=3 reason=Exit 3"))

    assert explained(training).summary == "demo is ending as failed: rank 0: exit_code=3 reason=Exit 3."


def test_a_cancel_that_is_under_way_is_told() -> None:
    assert "is being cancelled since 7s" in explained(a_training(spec={"cancel": Cancel(ago(7))})).summary


def test_warnings_and_exits_are_shown_before_other_events() -> None:
    chatter = [Event("Noted", f"{number}", uid="u1", at=ago(50 - number)) for number in range(20)]
    telling = [
        Event(WORKER_EXITED, "w1 left", uid="u1", at=ago(100)),
        Event("Lost", "w2", "Warning", uid="u1", at=ago(90)),
    ]

    found = explained(a_training(phase="ready", round=0), *telling, *chatter)

    assert found.details == (
        f"1m40s ago: {WORKER_EXITED}: w1 left",
        "1m30s ago: Lost: w2",
        "33s ago: Noted: 17",
        "32s ago: Noted: 18",
        "31s ago: Noted: 19",
    )


def test_events_of_an_earlier_training_of_that_name_do_not_count() -> None:
    assert explained(a_training(phase="ready", round=0), Event("Failed", uid="older", at=ago(1))).details == ()


def test_values_of_variables_are_never_shown() -> None:
    training = a_training(
        a_condition("Admitted", "False", "no room"), spec={"env": {"KEY": "hunter2"}, "secret_env": ("KEY",)}
    )
    explanation = explained(training, Event("Submitted", "by alice", uid="u1", at=ago(3)))

    assert "hunter2" not in explanation.summary + " ".join(explanation.details)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-3, "0s"), (0, "0s"), (59, "59s"), (60, "1m"), (200, "3m20s"), (3600, "1h"), (7500, "2h5m"), (349_200, "4d1h")],
)
def test_ages_are_told_in_their_two_largest_units(seconds: int, text: str) -> None:
    assert show_age(timedelta(seconds=seconds)) == text


@given(
    st.sampled_from(["pending", "ready", "succeeded", "failed", "cancelled"]),
    st.lists(
        st.builds(
            Condition,
            st.sampled_from(["Admitted", "TargetReached", "BelowMinimum", "Resizing"]),
            st.sampled_from(["True", "False", "Unknown"]),
            message=st.sampled_from(["", "why", "Why?"]),
        ),
        max_size=4,
    ),
    st.integers(0, 2),
)
def test_every_state_has_one_sentence(phase: Any, conditions: list[Condition], observed: int) -> None:
    summary = explained(a_training(*conditions, phase=phase, observed_generation=observed)).summary

    assert summary.startswith("demo ")
    assert summary.endswith((".", "?"))
    assert "\n" not in summary


def test_what_workers_do_after_the_end_is_left_out() -> None:
    ended = a_training(phase="succeeded", outcome=Outcome("succeeded"), rank_exits=())
    events = [
        Event("Ready", uid="u1", at=ago(9)),
        Event("Succeeded", uid="u1", at=ago(2)),
        Event(WORKER_EXITED, "w0: exit code 0", uid="u1", at=ago(1)),
    ]

    assert explained(ended, *events).details == ("9s ago: Ready", "2s ago: Succeeded")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("rank 1: Exit 3; no restarts; its last lines:\n  boom\n  bang", "rank 1: Exit 3; no restarts"),
        ("its last lines:\n boom", "its last lines:"),
        ("one line:", "one line:"),
        ("two\nlines", "two"),
        ("", ""),
    ],
)
def test_a_reason_is_one_line_and_announces_nothing_that_does_not_follow(text: str, line: str) -> None:
    assert first_line(text) == line


def test_what_of_its_state_is_safe_and_why_it_went_on_where_it_did_is_told() -> None:
    kept = KeptState(
        step=119,
        survives="worker",
        loss="the loss of any one worker now costs 1 step: it goes on from step 119 in memory",
        resumed="from step 90 in memory",
        refused="demo-2: 64 MiB of state do not fit",
    )
    details = explained(a_training(phase="ready", round=3, kept_state=kept)).details
    assert [line for line in details if line.startswith("state: ")] == [
        "state: step 119 is safe against the loss of any one worker",
        "state: the loss of any one worker now costs 1 step: it goes on from step 119 in memory",
        "state: the ranks of round 3 went on from step 90 in memory",
        "state: not all of it is kept: demo-2: 64 MiB of state do not fit",
    ]
    assert "state" not in str(explained(a_training(phase="ready", round=3)))

"""Waits: never over early, never a timeout for a training that has ended, and errors that say what happened."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.core.training import waits
from muster.core.training.waits import Done, Goal, Look, NotYet, Raise, Receipt, Verdict, Wait
from muster.errors import (
    BelowMinimumWorld,
    ScaleSuperseded,
    TrainingCancelled,
    TrainingFailed,
    UDTerminalState,
    WaitTimeout,
)
from muster.types.training import (
    Condition,
    Metadata,
    Outcome,
    Phase,
    RankExit,
    Spec,
    Status,
    Training,
    WorldSize,
    WorldStatus,
)

EARLY = Look(at=0.0, deadline=10.0)
LAST = Look(at=10.0, deadline=10.0)
GOALS: tuple[Goal, ...] = get_args(Goal)
TERMINAL_PHASES: tuple[Phase, ...] = ("succeeded", "failed", "cancelled")


def a_training(
    phase: Phase = "ready",
    ready: int = 2,
    size: tuple[int, int, int] = (1, 2, 4),
    *,
    generation: int = 1,
    observed: int | None = None,
    reached: bool | None = None,
    reached_for: int | None = None,
    exits: tuple[RankExit, ...] | None = None,
    outcome: Outcome | None = None,
    below: bool = False,
) -> Training:
    """A training whose status is about its present generation, unless told otherwise."""
    least, target, most = size
    seen = generation if observed is None else observed
    truth: Literal["True", "False"] = "True" if (ready == target if reached is None else reached) else "False"
    condition = Condition("TargetReached", truth, observed_generation=seen if reached_for is None else reached_for)
    return Training(
        Metadata("demo", uid="u", generation=generation, resource_version="7"),
        Spec(script="/train.py", world_size=WorldSize(least, target, most)),
        Status(
            observed_generation=seen,
            phase=phase,
            conditions=(condition,),
            world_size=WorldStatus(ready, target, least, most, below),
            rank_exits=exits,
            outcome=outcome,
        ),
    )


def judged(goal: Goal, training: Training, look: Look = EARLY, receipt: Receipt | None = None) -> Verdict:
    return waits.judge(Wait(goal, 10.0, receipt), training, look)


def raised(verdict: Verdict) -> Any:
    assert isinstance(verdict, Raise), verdict
    return verdict.error


trainings = st.builds(
    a_training,
    phase=st.sampled_from(get_args(Phase)),
    ready=st.integers(0, 5),
    size=st.tuples(st.integers(1, 2), st.integers(2, 3), st.integers(3, 5)),
    generation=st.integers(1, 4),
    observed=st.none() | st.integers(0, 4),
    reached=st.none() | st.booleans(),
    reached_for=st.none() | st.integers(0, 4),
    exits=st.none() | st.just(()) | st.just((RankExit(1, 137, "OOMKilled"),)),
    below=st.booleans(),
)
receipts = st.none() | st.builds(Receipt, target=st.integers(1, 4), generation=st.integers(1, 4))
looks = st.builds(Look, at=st.floats(0, 20), deadline=st.none() | st.just(10.0), first=st.booleans())


# Never early -------------------------------------------------------------------------------------


@given(st.sampled_from(GOALS), trainings, looks, receipts)
def test_old_status_is_never_enough_for_a_training_that_runs(
    goal: Goal, training: Training, look: Look, receipt: Receipt | None
) -> None:
    verdict = judged(goal, training, look, receipt)
    if isinstance(verdict, Done) and not training.is_terminal:
        assert training.status.observed_generation >= training.generation
        assert receipt is None or training.generation >= receipt.generation


@given(trainings, looks, receipts)
def test_the_target_is_reached_only_when_the_condition_says_so_for_this_generation(
    training: Training, look: Look, receipt: Receipt | None
) -> None:
    if isinstance(judged("target", training, look, receipt), Done) and not training.is_terminal:
        condition = training.status.condition("TargetReached")
        assert condition is not None and condition.status == "True"
        assert condition.observed_generation >= training.generation
        assert training.status.world_size.ready == training.spec.world_size.target
        assert receipt is None or training.spec.world_size.target == receipt.target


@given(trainings, looks)
def test_the_minimum_is_reached_only_when_that_many_are_ready(training: Training, look: Look) -> None:
    if isinstance(judged("min", training, look), Done) and not training.is_terminal:
        assert training.status.world_size.ready >= training.spec.world_size.min


@given(st.sampled_from(GOALS), trainings, receipts)
def test_a_wait_without_a_deadline_never_times_out(goal: Goal, training: Training, receipt: Receipt | None) -> None:
    verdict = judged(goal, training, Look(at=1e9), receipt)
    assert not (isinstance(verdict, Raise) and isinstance(verdict.error, WaitTimeout))


@given(st.sampled_from(GOALS), trainings, receipts)
def test_a_last_look_always_ends_the_wait(goal: Goal, training: Training, receipt: Receipt | None) -> None:
    assert not isinstance(judged(goal, training, LAST, receipt), NotYet)


@given(st.sampled_from(GOALS), trainings, receipts)
def test_only_what_is_not_yet_there_becomes_a_timeout(goal: Goal, training: Training, receipt: Receipt | None) -> None:
    before, at_the_end = judged(goal, training, EARLY, receipt), judged(goal, training, LAST, receipt)
    if isinstance(before, NotYet):
        assert isinstance(raised(at_the_end), WaitTimeout)
        assert before.reason in str(raised(at_the_end))
    else:
        assert type(before) is type(at_the_end)
        assert not isinstance(getattr(at_the_end, "error", None), WaitTimeout)


def test_a_scale_up_is_not_reached_by_the_status_from_before_it() -> None:
    old = a_training(ready=2, size=(1, 3, 4), generation=2, observed=1, reached=True)
    assert isinstance(judged("target", old, receipt=Receipt(3, 2)), NotYet)


def test_a_scale_down_is_not_reached_while_the_condition_is_about_the_former_target() -> None:
    turning = a_training(ready=2, size=(1, 2, 4), generation=2, observed=2, reached=True, reached_for=1)
    assert isinstance(judged("target", turning, receipt=Receipt(2, 2)), NotYet)


def test_a_read_that_is_older_than_the_handle_s_own_scale_does_not_count() -> None:
    stale = a_training(ready=2, size=(1, 2, 4), generation=1)
    assert isinstance(judged("target", stale, receipt=Receipt(3, 2)), NotYet)


def test_a_reached_target_is_done_with_the_world_as_reported() -> None:
    there = a_training(ready=3, size=(1, 3, 4), generation=2)
    assert judged("target", there, receipt=Receipt(3, 2)) == Done(WorldStatus(3, 3, 1, 4))


def test_a_minimum_that_is_reached_ends_the_wait_below_the_target() -> None:
    assert judged("min", a_training(ready=2, size=(2, 3, 4))) == Done(WorldStatus(2, 3, 2, 4))


def test_a_world_below_its_minimum_says_how_many_are_missing() -> None:
    assert judged("min", a_training(ready=1, size=(2, 3, 4))) == NotYet("1 of at least 2 workers are ready")


# Terminal phases ---------------------------------------------------------------------------------


@given(st.sampled_from(GOALS), trainings.filter(lambda one: one.is_terminal), looks, receipts)
def test_a_terminal_phase_always_wins_over_the_clock(
    goal: Goal, training: Training, look: Look, receipt: Receipt | None
) -> None:
    verdict = judged(goal, training, look, receipt)
    if goal == "complete" and look.first:
        assert isinstance(raised(verdict), UDTerminalState)
    elif training.status.phase == "succeeded":
        assert isinstance(verdict, Done)
    else:
        kind = TrainingFailed if training.status.phase == "failed" else TrainingCancelled
        assert type(raised(verdict)) is kind


@pytest.mark.parametrize("goal", GOALS)
def test_success_is_an_answer_also_when_nobody_is_ready_any_more(goal: Goal) -> None:
    ended = a_training("succeeded", ready=0, exits=())
    assert judged(goal, ended, LAST) == Done(WorldStatus(0, 2, 1, 4))


@pytest.mark.parametrize("phase", TERMINAL_PHASES)
def test_completing_what_had_ended_at_entry_is_refused_and_its_idempotent_form_answers(phase: Phase) -> None:
    ended = a_training(phase, ready=0, exits=())
    entry = Look(at=0.0, deadline=10.0, first=True)
    assert raised(judged("complete", ended, entry)).phase == phase
    assert not isinstance(getattr(judged("result", ended, entry), "error", None), UDTerminalState)


def test_a_failure_has_one_clause_per_rank_that_failed_and_none_for_those_that_were_stopped() -> None:
    exits = (
        RankExit(0, 143, "Stopped", "SIGTERM"),
        RankExit(1, 137, "OOMKilled", "SIGKILL"),
        RankExit(2, None, "NodeLost"),
        RankExit(3, 143, "Cancelled", "SIGTERM"),
        RankExit(4, 0, "Exit 0"),
    )
    error = raised(judged("complete", a_training("failed", ready=0, exits=exits)))
    assert str(error) == (
        "training default/demo failed: "
        "rank 1: exit_code=137 reason=OOMKilled; rank 2: exit_code=unknown reason=NodeLost"
    )
    assert error.rank_exits == exits


def test_a_failure_says_why_before_it_says_which_ranks() -> None:
    outcome = Outcome("failed", "rank_failed", "ValueError: no data at train.py:3 (rank 1); worker w-1, round 0")
    error = raised(judged("result", a_training("failed", ready=0, exits=(RankExit(1, 1, "Exit 1"),), outcome=outcome)))
    assert str(error) == f"training default/demo failed: {outcome.message}; rank 1: exit_code=1 reason=Exit 1"


@pytest.mark.parametrize(("phase", "words"), [("failed", "failed"), ("cancelled", "was cancelled")])
def test_an_end_without_failed_ranks_is_told_in_the_outcome_s_words(phase: Phase, words: str) -> None:
    outcome = Outcome("failed" if phase == "failed" else "cancelled", message="no worker came for 300 s")
    error = raised(judged("result", a_training(phase, ready=0, exits=(), outcome=outcome)))
    assert str(error) == f"training default/demo {words}: no worker came for 300 s"


# Another writer ----------------------------------------------------------------------------------


def test_a_target_that_another_writer_moved_is_superseded() -> None:
    error = raised(judged("target", a_training(size=(1, 4, 4), generation=3), receipt=Receipt(3, 2)))
    assert isinstance(error, ScaleSuperseded)
    assert (error.requested, error.target) == (3, 4)


def test_an_edit_that_leaves_the_target_alone_supersedes_nothing() -> None:
    edited = a_training(ready=3, size=(1, 3, 4), generation=5, observed=4)
    assert isinstance(judged("target", edited, receipt=Receipt(3, 2)), NotYet)


def test_what_moves_the_target_after_it_was_reached_supersedes_nothing() -> None:
    over = waits.after_look(Receipt(3, 2), a_training(ready=3, size=(1, 3, 4), generation=2))
    assert over == Receipt(3, 2, over=True)
    moved = a_training(ready=3, size=(1, 4, 4), generation=3, observed=2)
    assert isinstance(judged("target", moved, receipt=over), NotYet)
    assert raised(judged("target", moved, LAST, over)).required_min == 4, "the target of now is what was required"


def test_a_target_that_was_reached_and_moved_before_anybody_acted_on_that_was_reached_all_the_same() -> None:
    moved = a_training(ready=3, size=(1, 4, 4), generation=3, observed=2)
    status = replace(moved.status, world_size=replace(moved.status.world_size, target=3))
    condition = Condition("TargetReached", "True", observed_generation=2)
    moved = replace(moved, status=replace(status, conditions=(condition,)))
    assert waits.after_look(Receipt(3, 2), moved) == Receipt(3, 2, over=True)


@given(trainings, receipts)
def test_a_receipt_is_not_over_by_a_status_that_is_older_or_about_another_target(
    training: Training, receipt: Receipt | None
) -> None:
    over = waits.after_look(receipt, training)
    if receipt is not None and over is not None and over.over:
        condition = training.status.condition("TargetReached")
        assert condition is not None and condition.status == "True"
        assert condition.observed_generation >= receipt.generation
        assert training.status.world_size.ready == training.status.world_size.target == receipt.target
    else:
        assert over is receipt


@given(st.sampled_from(GOALS), trainings, looks, receipts)
def test_a_receipt_that_is_over_still_keeps_older_status_out(
    goal: Goal, training: Training, look: Look, receipt: Receipt | None
) -> None:
    over = None if receipt is None else replace(receipt, over=True)
    verdict = judged(goal, training, look, over)
    assert not (isinstance(verdict, Raise) and isinstance(verdict.error, ScaleSuperseded))
    if isinstance(verdict, Done) and not training.is_terminal:
        assert over is None or training.generation >= over.generation


@pytest.mark.parametrize("goal", ["min", "complete", "result"])
def test_only_a_wait_for_the_target_cares_who_moved_it(goal: Goal) -> None:
    moved = a_training(ready=2, size=(1, 4, 4), generation=3)
    assert not isinstance(judged(goal, moved, receipt=Receipt(3, 2)), Raise)


def test_a_training_that_ended_is_not_superseded() -> None:
    ended = a_training("succeeded", ready=0, size=(1, 4, 4), generation=3)
    assert isinstance(judged("target", ended, receipt=Receipt(3, 2)), Done)


# What errors carry -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("goal", "receipt", "required"),
    [("min", None, 2), ("min", Receipt(4, 1), 2), ("target", None, 3), ("target", Receipt(4, 9), 4)],
)
def test_a_timeout_carries_what_was_required(goal: Goal, receipt: Receipt | None, required: int) -> None:
    error = raised(judged(goal, a_training(ready=1, size=(2, 3, 4)), LAST, receipt))
    assert isinstance(error, WaitTimeout) and isinstance(error, TimeoutError) and isinstance(error, BelowMinimumWorld)
    assert (error.ready, error.required_min, error.timeout) == (1, required, 10.0)


def test_a_failure_carries_the_requested_target_too() -> None:
    error = raised(judged("target", a_training("failed", ready=0, exits=()), receipt=Receipt(3, 2)))
    assert (error.ready, error.required_min, error.timeout) == (0, 3, 10.0)


def test_before_the_first_report_the_world_has_the_sizes_of_the_spec_and_is_below_its_minimum() -> None:
    fresh = Training(Metadata("demo", generation=1), Spec(script="/t.py", world_size=WorldSize(2, 3, 4)))
    below = WorldStatus(ready=0, target=3, min=2, max=4, below_minimum=True)
    assert waits.world_of(fresh) == below
    assert waits.world_of(fresh, target=4) == replace(below, target=4)


def test_a_scale_answers_with_the_requested_target_and_the_ready_of_now() -> None:
    assert waits.world_of(a_training(ready=2, size=(2, 2, 4)), target=3) == WorldStatus(2, 3, 2, 4, False)

"""When a failure is put down to the size that was asked for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from muster.core.world import sizes
from muster.core.world.run import Run
from muster.types.world import Cause, Progress, Round, TakenBack
from tests.core.builders import NOW, a_recall, a_round, a_run, an_exit


def resized(*, best: int | None = None, told: int | None = None, up_s: float = 5.0, proven: int | None = 2) -> Run:
    """Three workers, where two had trained before."""
    progress = {} if told is None else {0: Progress(told, NOW)}
    closed = a_round("a b c", 1, recall=a_recall(Cause.FAILURE, NOW), up_at=NOW - up_s, progress=progress)
    return replace(a_run("a b c", last=closed, target=3), best_step=best, proven=proven)


def round_of(run: Run) -> Round:
    assert run.round is not None
    return run.round


FIRST = an_exit(2, worker="c", exception="ValueError: no", place="train.py:3")
BACK = TakenBack(3, 2, "3 workers failed without progress: ValueError: no at train.py:3 (rank 2); worker c")


@pytest.mark.parametrize(
    ("run", "taken"),
    [
        (resized(), BACK),
        (resized(best=7), BACK),
        (resized(best=7, told=7), BACK),
        (resized(best=7, told=8), None),
        (resized(told=0), None),
        (resized(up_s=sizes.TRIAL_S), None),
        (resized(best=7, up_s=sizes.TRIAL_S), BACK),
        (resized(proven=None), None),
        (resized(proven=3), None),
        (resized(proven=9), None),
    ],
)
def test_a_failure_is_the_sizes_only_if_nothing_was_done_at_it(run: Run, taken: TakenBack | None) -> None:
    assert sizes.taken_back(run, round_of(run), FIRST) == taken


def test_a_size_that_works_is_the_one_to_come_back_to() -> None:
    run = resized(best=7, told=8)
    assert sizes.proven_after(run, round_of(run)) is None
    further = replace(run, target=4)
    assert sizes.proven_after(further, round_of(run)) == 3
    assert sizes.proven_after(resized(), round_of(resized())) == 2


def test_to_ask_again_forgets_what_was_taken_back() -> None:
    run = replace(resized(), taken_back=BACK, proven=None)
    assert run.aim == 2
    again = sizes.asked(run, 3)
    assert (again.aim, again.taken_back, again.proven) == (3, None, 3)

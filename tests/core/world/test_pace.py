"""Steps that stop coming are unusual only beside the pauses that the run had before."""

from __future__ import annotations

import pytest

from muster.core.world import pace
from muster.types.world import Pace, Progress


def paced(*marks: tuple[int, float], number: int = 0, known: Pace | None = None) -> Pace:
    known = known or Pace()
    last: Progress | None = None
    for step, at in marks:
        known = pace.advanced(known, number, [(last, mark := Progress(step, at))])
        last = mark
    return known


QUICK = tuple((step * 5, step * 0.5) for step in range(20))  # ten steps a second, told twice a second


@pytest.mark.parametrize(
    ("marks", "limit_s"),
    [
        ((), None),
        (((0, 0.0),), None),
        (((0, 0.0), (1, 1.0), (2, 2.0)), None),
        (QUICK, 40.0),
        ((*QUICK, (96, 30.0)), 3 * 20.5),  # an evaluation of 20 s came before
        (tuple((step, step * 5.0) for step in range(9)), 500.0),
        (((3, 0.0), (2, 1.0), (3, 2.0), (3, 3.0)), None),
    ],
)
def test_a_stall_is_many_times_what_was_usual(marks: tuple[tuple[int, float], ...], limit_s: float | None) -> None:
    assert pace.limit_s(paced(*marks)) == (limit_s if limit_s is None else pytest.approx(limit_s))


def test_the_time_between_rounds_is_no_pause() -> None:
    known = paced(*QUICK)
    assert pace.limit_s(paced((90, 500.0), (95, 500.5), number=1, known=known)) == 40.0


def test_an_old_report_changes_nothing() -> None:
    known = paced(*QUICK)
    assert paced((7, 3.0), known=known) == known


def test_ranks_that_are_not_in_step_do_not_change_what_is_usual() -> None:
    known, last = Pace(), [Progress(0, 0.0), Progress(40, 0.0)]
    for report in range(1, 20):
        new = Progress(last[report % 2].step + 10, report * 0.5)
        known, last[report % 2] = pace.advanced(known, 0, [(last[report % 2], new)]), new
    assert pace.usual_s(known) == pytest.approx(0.1)


def test_the_warning_says_what_is_usual() -> None:
    assert pace.warning(paced(*QUICK)) == "no step for more than 40 s, usually 0.1 s per step"

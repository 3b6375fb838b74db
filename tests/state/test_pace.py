"""How often a copy is taken: within its share of the time, and the same steps on all ranks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from muster.state.pace import MOST_SKIPPED, RELAXED, Pace


def run(pace: Pace, step_s: float, copy_s: float, copies: int = 60) -> int:
    for _ in range(copies):
        pace.stepped(step_s * pace.every, pace.every)
        pace.copied(copy_s)
    return pace.every


@given(st.floats(0.01, 10), st.floats(0.0001, 10), st.floats(0.01, 0.99))
def test_copies_take_no_more_than_their_share_and_not_much_less(step_s: float, copy_s: float, overhead: float) -> None:
    every = run(Pace(overhead), step_s, copy_s)
    assert every & (every - 1) == 0  # steps of before stay among those of after
    assert copy_s <= overhead * every * step_s * 1.001
    assert every == 1 or copy_s >= overhead * every * step_s / 6.1


def test_all_of_the_time_is_a_copy_at_each_step() -> None:
    assert run(Pace(1.0), 0.001, 10) == 1


def test_what_copies_leave_may_be_spent_on_waiting() -> None:
    pace = Pace(0.03)
    assert pace.left_s == 0  # nothing is known yet
    run(pace, 1.0, 0.01)
    assert abs(pace.left_s - 0.02) < 1e-6


def test_for_lack_of_memory_fewer_are_taken_until_there_is_enough() -> None:
    pace = Pace(1.0)
    run(pace, 1.0, 0.001)
    for _ in range(100):
        pace.skipped()
    assert pace.every == MOST_SKIPPED
    run(pace, 1.0, 0.001, RELAXED - 1)
    assert pace.every == MOST_SKIPPED
    assert run(pace, 1.0, 0.001) == 1

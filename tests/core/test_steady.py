"""How much time has gone by: over restarts, reboots and moves, whatever the time of day was set to."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.clock import SystemClock
from muster.core.keeping import CONTROL, last_alive, problem_with
from muster.core.steady import MOST_UNSEEN, Mark, resumed
from muster.types.codec import to_wire

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
TWO_DAYS = timedelta(days=2)
JUMPS = st.timedeltas(-timedelta(days=3000), timedelta(days=3000))


def kept(boot: str = "one", uptime_s: float = 1000.0) -> Mark:
    return Mark(NOON, NOON - TWO_DAYS, boot, uptime_s)


@given(set_by=JUMPS, away_s=st.floats(0, 1e7))
def test_a_restart_on_one_boot_counts_what_the_machine_counted(set_by: timedelta, away_s: float) -> None:
    away = timedelta(seconds=away_s)
    found = resumed(kept(), NOON + away + set_by, "one", 1000.0 + away_s)
    assert abs(found - (NOON - TWO_DAYS + away)) < timedelta(seconds=0.001)


@given(set_by=JUMPS, boot=st.sampled_from(["one", "two", ""]), uptime_s=st.floats(0, 1e7), moves=st.booleans())
def test_it_never_goes_back_and_what_no_clock_saw_is_believed_only_so_far(
    set_by: timedelta, boot: str, uptime_s: float, moves: bool
) -> None:
    gone = resumed(kept(), NOON + set_by, boot, uptime_s, moves=moves) - (NOON - TWO_DAYS)
    assert timedelta() <= gone <= MOST_UNSEEN + timedelta(seconds=uptime_s)


@pytest.mark.parametrize(
    ("set_by", "uptime_s", "counted"),
    [
        (timedelta(minutes=3), 60.0, timedelta(minutes=3)),
        (TWO_DAYS, 60.0, MOST_UNSEEN + timedelta(seconds=60)),  # off for two days, or set: nobody knows
        (timedelta(hours=5), 5 * 3600.0, timedelta(hours=5)),  # it was up for most of it
        (-TWO_DAYS, 60.0, timedelta()),
    ],
)
def test_after_a_reboot(set_by: timedelta, uptime_s: float, counted: timedelta) -> None:
    assert resumed(kept(), NOON + set_by, "two", uptime_s) == NOON - TWO_DAYS + counted


def test_on_another_machine_its_count_says_nothing() -> None:
    assert resumed(kept(), NOON + TWO_DAYS, "two", 1e9, moves=True) == NOON - TWO_DAYS + MOST_UNSEEN


def test_a_home_of_0_1_begins_with_the_time_of_day() -> None:
    old = last_alive({"at": "2026-01-31T12:00:00+00:00"})
    assert old is not None and old.moment == NOON
    assert resumed(old, NOON + TWO_DAYS, "one", 5.0) == NOON + TWO_DAYS
    assert resumed(None, NOON, "one", 5.0) == NOON


def test_what_is_kept_can_be_read_again_and_believed() -> None:
    clock = SystemClock()
    mark = to_wire(clock.mark())
    assert problem_with(CONTROL, "alive", mark) == "" == problem_with(CONTROL, "alive", {"at": "2026-01-31T12:00:00Z"})
    later = SystemClock()
    later.resume(last_alive(mark), moves=False)
    assert abs(later.steady() - clock.steady()) < timedelta(seconds=0.1)

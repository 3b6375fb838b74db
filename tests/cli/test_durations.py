from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.cli import durations

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("90", 90),
        ("90s", 90),
        ("5m", 300),
        ("1h30m", 5400),
        ("0", 0),
        ("1.5h", 5400),
        ("250ms", 0.25),
        (" 2D ", 172_800),
    ],
)
def test_a_duration_is_a_number_or_parts_with_units(text: str, seconds: float) -> None:
    assert durations.seconds(text) == seconds


@pytest.mark.parametrize(
    "text", ["", "m", "-5", "-5m", "5 m", "30m1h", "5m5m", "5x", "1h30", "nan", "inf", "1e3", "99999w"]
)
def test_anything_else_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a duration|is longer"):
        durations.seconds(text)


@given(st.integers(0, 9999), st.integers(0, 23), st.integers(0, 59), st.integers(0, 59))
def test_parts_add_up(days: int, hours: int, minutes: int, seconds: int) -> None:
    whole = timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds).total_seconds()

    if whole <= 10 * 365 * 86_400:
        assert durations.seconds(f"{days}d{hours}h{minutes}m{seconds}s") == whole


@given(st.text(max_size=12))
def test_no_text_breaks_the_reader(text: str) -> None:
    try:
        assert durations.seconds(text) >= 0
    except ValueError as error:
        assert str(error)


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("24h", NOW - timedelta(days=1)),
        ("2026-01-01T00:00:00Z", datetime(2026, 1, 1, tzinfo=UTC)),
        ("2026-01-01", datetime(2026, 1, 1, tzinfo=UTC)),
        ("2026-01-01T01:00:00+01:00", datetime(2026, 1, 1, tzinfo=UTC)),
    ],
)
def test_a_moment_is_a_time_or_how_long_ago(text: str, moment: datetime) -> None:
    assert durations.moment(text, NOW) == moment


def test_a_moment_that_is_neither_is_refused() -> None:
    with pytest.raises(ValueError, match="neither a duration like 24h nor a time"):
        durations.moment("yesterday", NOW)

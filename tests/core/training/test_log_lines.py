"""Which lines of a log are shown."""

from __future__ import annotations

from muster.core.training.log_lines import LINE_COSTS, Newest, RoundMarkers, matching


def test_a_round_is_marked_once() -> None:
    markers = RoundMarkers(True)
    assert [markers.before(number) for number in (0, 0, 2, 1)] == [
        b"(muster: round 0)\n",
        b"",
        b"(muster: round 2)\n",
        b"",
    ]
    assert RoundMarkers(False).before(0) == b""
    assert RoundMarkers(True, timestamps=True).before(3, b"12:00Z [0] text\n") == b"12:00Z (muster: round 3)\n"


def test_the_time_before_a_line_is_not_looked_through() -> None:
    lines = b"2026Z [0] a\n- [0] in 2026\n"
    assert list(matching(lines, b"2026", timestamps=True)) == [b"- [0] in 2026\n"]
    assert list(matching(lines, b"2026")) == [b"2026Z [0] a\n", b"- [0] in 2026\n"]


def test_the_newest_lines_are_kept_within_their_room() -> None:
    newest = Newest(most=3, room=10 + 3 * LINE_COSTS)
    newest.take(matching(b"a1\na22\nb\na3\na4\n", b"a"))
    assert list(newest.lines) == [b"a22\n", b"a3\n", b"a4\n"]
    newest.take([b"x" * (11 + 3 * LINE_COSTS)])
    assert list(newest.lines) == []


def test_very_short_lines_take_no_more_memory_than_long_ones() -> None:
    newest = Newest(most=1 << 53, room=1 << 16)
    newest.take(b"a\n" for _ in range(1 << 15))
    assert len(newest.lines) == (1 << 16) // (LINE_COSTS + 2)

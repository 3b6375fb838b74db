"""Do pauses grow, and stay within their bound?"""

from __future__ import annotations

from muster.backoff import Backoff


def test_each_failure_doubles_the_pause_up_to_the_longest() -> None:
    retry = Backoff(0.1, 0.5)
    assert [retry.after(failures) for failures in (0, 1, 2, 3, 4, 10_000)] == [0.0, 0.1, 0.2, 0.4, 0.5, 0.5]

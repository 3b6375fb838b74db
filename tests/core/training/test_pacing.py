"""How many workers a machine starts at once, and whose turn it is."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from hypothesis import given
from hypothesis import strategies as st

from muster.core.training import pacing
from muster.core.training.pacing import StartAllowance, StartRequest, allow
from muster.types.training import Uid

NOW = datetime(2026, 1, 31, 12, tzinfo=UTC)


def a_request(name: str, actives: int, spares: int = 0, *, after_s: float = 0.0) -> StartRequest:
    return StartRequest(Uid(name), NOW + timedelta(seconds=after_s), actives, spares)


def test_the_pace_is_that_of_the_cores() -> None:
    assert [pacing.most_at_once(cores) for cores in (0, 1, 2, 64)] == [2, 2, 4, 128]


def test_whoever_has_waited_longest_starts_first() -> None:
    early, late = a_request("early", 3), a_request("late", 3, after_s=1)
    assert allow(Uid("early"), [late, early], 0, 4) == StartAllowance(3)
    allowed = allow(Uid("late"), [late, early], 0, 4)
    assert allowed.count == 1
    assert (
        allowed.reason
        == "2 of its workers wait for their turn to start: this machine starts 4 at once; 1 other training waits too"
    )


def test_spares_start_after_the_workers_of_all_worlds() -> None:
    early, late = a_request("early", 1, spares=3), a_request("late", 2, after_s=1)
    assert allow(Uid("early"), [early, late], 0, 4).count == 2
    assert allow(Uid("late"), [early, late], 0, 4) == StartAllowance(2)


def test_nothing_starts_while_the_machine_is_busy_with_starts() -> None:
    allowed = allow(Uid("a"), [a_request("a", 2)], 5, 4)
    assert allowed.count == 0 and "2 of its workers wait" in allowed.reason


requests = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.floats(0, 100)), min_size=1, max_size=20)


@given(requests, st.integers(0, 20), st.integers(2, 16))
def test_slots_are_never_exceeded_and_never_left_free(
    wanted: list[tuple[int, int, float]], starting: int, most: int
) -> None:
    queue = [a_request(f"t{i}", actives, spares, after_s=s) for i, (actives, spares, s) in enumerate(wanted)]
    given_out = [allow(one.uid, queue, starting, most).count or 0 for one in queue]
    lacking = sum(one.actives + one.spares for one in queue)
    assert sum(given_out) == min(lacking, max(0, most - starting))


@given(requests)
def test_no_training_starves(wanted: list[tuple[int, int, float]]) -> None:
    """Each round of starts ends, and newcomers come after those that wait."""
    queue = {f"t{i}": [a + s, x] for i, (a, s, x) in enumerate(wanted)}
    rounds = 0
    while any(left for left, _ in queue.values()):
        now = [a_request(name, int(left), after_s=s) for name, (left, s) in queue.items()]
        for one in now:
            queue[one.uid][0] -= allow(one.uid, now, 0, 4).count or 0
        rounds += 1
        assert rounds <= sum(a + s for a, s, _ in wanted) // 4 + 1

"""What is answered about output that cannot be there."""

from __future__ import annotations

import time

import pytest

from muster.core.training import outputs
from muster.types.training import WorldSize
from tests.training_builders import a_training


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [([0], "rank 0"), ([1, 0], "ranks 0, 1"), (range(4), "ranks 0 to 3"), ([0, 2, 5, 6, 7], "ranks 0, 2, 5 to 7")],
)
def test_ranks_are_named_as_people_would(ranks: list[int], expected: str) -> None:
    assert outputs.shown(ranks) == expected


def test_of_the_largest_training_it_is_known_at_once_which_ranks_it_can_have() -> None:
    """It is said by the loop that serves everybody."""
    huge = a_training(world_size=WorldSize(1, 1, 10_000), procs_per_worker=999)
    began = time.process_time()
    why = outputs.why_never(huge, 10_000_000)
    assert why is not None and why.endswith("can have ranks 0 to 9989999, and never rank 10000000")
    assert time.process_time() - began < 0.1

"""Agents, ranks and spares are killed at random; the world must be whole again each time, and nothing may be left."""

from __future__ import annotations

import pytest

from tests.fleet import Fleet
from tests.node.kills import random_kills


@pytest.mark.parametrize("seed", [1, 2])
def test_a_few_random_kills(fleet: Fleet, seed: int) -> None:
    tally = random_kills(fleet, seed=seed, kills=6)
    assert not tally.broken and not tally.left, "\n".join([*tally.broken, *tally.left, *tally.story])


@pytest.mark.soak
def test_two_hundred_random_kills(fleet: Fleet) -> None:
    tally = random_kills(fleet, seed=7, kills=200)
    assert not tally.broken and not tally.left, "\n".join([*tally.broken, *tally.left, *tally.story])


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(5))
def test_random_kills_with_a_coordinator_that_dies_too(fleet: Fleet, seed: int) -> None:
    tally = random_kills(fleet, seed=seed, kills=20, coordinator_too=True)
    assert not tally.broken and not tally.left, "\n".join([*tally.broken, *tally.left, *tally.story])

"""What users are told that a pipeline should have: never more than there is, and nothing for who wants nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from muster.core.sharing.planner import dues
from muster.types.sharing import Shares
from tests.core.sharing.pools import NOW, states


def check_dues(shares: Shares) -> None:
    found = dues(shares, NOW)
    assert set(found) <= set(shares.rollouts)
    for name, due in found.items():
        assert 0 <= due <= len(shares.pipelines[name].infer.gpus) + 1e-6
    assert sum(found.values()) <= shares.pool.gpus + 1e-6


@pytest.mark.parametrize("examples", [100, pytest.param(2_000, marks=pytest.mark.soak)])
def test_dues_are_of_open_pipelines_and_within_the_pool(examples: int) -> None:
    settings(max_examples=examples)(given(states())(check_dues))()


@settings(max_examples=50)
@given(states())
def test_nobody_is_due_anything_while_no_rollout_is_open(shares: Shares) -> None:
    assert dues(replace(shares, rollouts={}), NOW) == {}

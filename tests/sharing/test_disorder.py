"""Random histories: what they find in the real scheduler, and that they can find something."""

from __future__ import annotations

from dataclasses import replace

import pytest

from muster.core.sharing.planner import plan
from muster.core.sharing.plans import SharePlan
from muster.types.sharing import Shares
from tests.sharing import disorder


@pytest.mark.parametrize("seed", range(1, 6))
def test_no_promise_is_broken_and_nobody_is_left_waiting(seed: int) -> None:
    history = disorder.run(seed, 400)
    assert history.broken == []
    assert history.unanswered == 0
    assert history.outcomes["done"] > 100


def test_hooks_do_fail_and_waiters_are_refused_in_a_history() -> None:
    outcomes = disorder.run(1, 1000).outcomes
    assert {"PipelineQuarantined", "GrantTimeout", "RequestRefused", "cancelled"} <= set(outcomes)


def test_the_same_seed_gives_the_same_history() -> None:
    assert disorder.run(3, 300) == disorder.run(3, 300)


def test_a_planner_that_lets_gpus_lie_idle_is_found_out() -> None:
    def lazy(shares: Shares, now: float) -> SharePlan:
        return replace(plan(shares, now), expands=())

    broken = disorder.run(1, 100, lazy).broken
    assert any("is idle, and" in text for text in broken)

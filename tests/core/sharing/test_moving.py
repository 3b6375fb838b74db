"""Which bundles move between pipelines that are at work? What a move has to be worth."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.core.sharing import planner
from muster.core.sharing.planner import plan
from muster.types.sharing import ClusterSpec, Shares
from tests.core.sharing import invariants
from tests.core.sharing.pools import NOW, a_lease, a_pipeline, a_state

SLOTS = 8


def dues(shares: Shares) -> dict[str, float]:
    return {str(name): due for name, due in planner.dues(shares, NOW).items()}


def busy(held: dict[str, int], remaining: dict[str, int], *, rate: float = 0.01, measured: bool = True) -> Shares:
    """Pipelines on one GPU for each bundle that they hold, with what remains for them. A switch takes 8 s."""
    total = sum(held.values())
    spec = ClusterSpec(range(total), slots_per_bundle=SLOTS)
    pipelines = [a_pipeline(name, spec) for name in held]
    if measured:
        pipelines = [replace(one, shrink_s=2.0, expand_s=6.0) for one in pipelines]
    owners = [one for one in pipelines for _ in range(held[one.pipeline_id])]
    leases = [a_lease(one, rank) for rank, one in enumerate(owners)]
    shares = a_state(total, pipelines, leases=leases, remaining=remaining)
    told = {name: replace(one, rate=rate, reported_at=NOW) for name, one in shares.rollouts.items()}
    return replace(shares, rollouts=told)


@pytest.mark.parametrize(("rate", "moves"), [(0.01, True), (0.35, True), (0.4, False)])
def test_a_bundle_moves_only_for_work_that_lasts_four_times_as_long_as_the_move(rate: float, moves: bool) -> None:
    """One with 40 left on two bundles needs a third until 16 are left: in 32 s each may do 12 at most."""
    shares = busy({"a": 6, "b": 2}, {"a": 48, "b": 40}, rate=rate)
    assert dues(shares)["b"] >= 3
    assert bool(plan(shares, NOW).shrinks) is moves


def test_until_it_is_measured_what_a_move_costs_it_is_worth_it() -> None:
    assert plan(busy({"a": 6, "b": 2}, {"a": 48, "b": 40}, rate=5.0, measured=False), NOW).shrinks


def test_of_those_above_their_dues_one_gives_that_is_as_near_to_it_afterwards() -> None:
    shares = busy({"a": 2, "b": 3, "c": 3}, {"a": 120, "b": 84, "c": 100})
    due = dues(shares)
    assert due["a"] >= 3 and 0.5 <= 3 - due["b"] < 1 and 0 < 3 - due["c"] < 0.5
    assert [bundle.pipeline for bundle in plan(shares, NOW).shrinks] == ["b"], "though the other has more left"


@settings(max_examples=200)
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 120)), min_size=2, max_size=5),
    st.sampled_from([0.001, 0.05, 0.5]),
)
def test_no_measured_plan_breaks_a_rule(pipelines: list[tuple[int, int]], rate: float) -> None:
    held = {f"p{at}": count for at, (count, _) in enumerate(pipelines)}
    remaining = {f"p{at}": left for at, (_, left) in enumerate(pipelines)}
    shares = busy(held, remaining, rate=rate)
    assert invariants.broken_by(shares, plan(shares, NOW)) == []

"""Whole runs: the baseline behaves as published, the real scheduler keeps its promises."""

from __future__ import annotations

import pytest

from muster.sim import results, scenarios
from muster.sim.policies import Policy, simulate
from tests.sim.builders import a_scenario, a_workload, two_pipelines

SEEDS = (1, 2, 3, 4, 5)


def summary(name: str, policy: Policy) -> results.Summary:
    return next(results.compare(scenarios.BUILT_IN[name], [policy], SEEDS))


@pytest.mark.parametrize(("name", "published"), [("tail", 1.16), ("mixed", 1.37), ("even", 1.15), ("skewed", 1.19)])
def test_the_baseline_is_about_as_fast_as_published(name: str, published: float) -> None:
    assert summary(name, Policy.GAP_RATIO).ratio == pytest.approx(published, abs=0.015)


@pytest.mark.parametrize("policy", Policy)
def test_the_same_seed_gives_the_same_history(policy: Policy) -> None:
    assert simulate(two_pipelines(), policy, 7) == simulate(two_pipelines(), policy, 7)


@pytest.mark.parametrize("policy", Policy)
def test_no_policy_beats_the_lower_bound(policy: Policy) -> None:
    for seed in range(1, 4):
        outcome = simulate(two_pipelines(), policy, seed)
        assert outcome.makespan > outcome.lower_bound


def test_a_pipeline_alone_takes_its_switches_its_longest_trajectory_and_its_training() -> None:
    scenario = a_scenario(a_workload(4, steps=1))
    longest = max(one.duration_s for one in scenario.draw(1)[0][0])
    outcome = simulate(scenario, Policy.MUSTER, 1)
    assert outcome.makespan == pytest.approx(6 + longest + 2 + 50)


def test_a_static_pipeline_never_leaves_its_own_gpus() -> None:
    recording = simulate(two_pipelines(), Policy.STATIC, 1).recording
    assert {(span.pipeline, span.gpu) for span in recording.spans} == {("p0", 0), ("p0", 1), ("p1", 2), ("p1", 3)}


def test_serial_pipelines_follow_one_another() -> None:
    recording = simulate(two_pipelines(), Policy.SERIAL, 1).recording
    first = max(span.end for span in recording.spans if span.pipeline == "p0")
    assert first <= min(span.start for span in recording.spans if span.pipeline == "p1")


def test_every_step_trains_on_both_gpus_for_fifty_seconds() -> None:
    recording = simulate(two_pipelines(steps=3), Policy.MUSTER, 1).recording
    trained = [span for span in recording.spans if span.use == "train" and span.pipeline == "p1"]
    assert {span.gpu for span in trained} == {2, 3}
    assert sum(span.end - span.start for span in trained) >= 3 * 2 * 50


def test_unequal_bundles_share_a_pool() -> None:
    wide = a_workload(8, steps=2, tp_size=2)
    outcome = simulate(a_scenario(wide, a_workload(8, steps=2, train=(2, 3))), Policy.MUSTER, 1)
    assert outcome.makespan < 3 * outcome.lower_bound


@pytest.mark.parametrize("name", scenarios.BUILT_IN)
def test_the_real_scheduler_is_faster_and_calmer_than_the_baseline(name: str) -> None:
    ours, theirs = summary(name, Policy.MUSTER), summary(name, Policy.GAP_RATIO)
    assert ours.ratio < theirs.ratio
    assert ours.resizes < theirs.resizes


def test_decisions_of_the_real_scheduler_have_reasons() -> None:
    recording = simulate(scenarios.BUILT_IN["tail"], Policy.MUSTER, 1).recording
    moved = [one for one in recording.decisions if one.what.startswith("shrinking")]
    assert any("due bundles" in one.reason for one in moved)
    assert any("gets its GPUs" in one.reason for one in moved)

"""A training that fills what the pipelines of a scenario leave, on virtual time."""

from __future__ import annotations

import pytest

from muster.sim import scenarios, useful
from muster.sim.policies import Policy, SimulationResult, simulate
from muster.sim.recording import Use
from muster.sim.scenarios import BUILT_IN, Scenario
from muster.sim.trainings import TrainingLoad


def a_small_one(**more: object) -> Scenario:
    workload = {"batch": 16, "median_s": 20, "sigma": 0.8, "cap_s": 100, "steps": 2, "count": 2}
    return scenarios.parse({"name": "small", "gpus": 4, "pipelines": [workload], **more})


def beside(scenario: Scenario, seed: int = 1) -> SimulationResult:
    return simulate(scenario, Policy.MUSTER, seed, TrainingLoad())  # raises where two are on one GPU


def filled(outcome: SimulationResult) -> list[tuple[int, float, float]]:
    return [(span.gpu, span.start, span.end) for span in outcome.recording.spans if span.use is Use.FILL]


def test_the_same_seed_gives_the_same_run() -> None:
    assert beside(a_small_one()) == beside(a_small_one())
    assert beside(a_small_one()) != beside(a_small_one(), seed=2)


def test_it_fills_gaps_gives_them_back_and_is_asked_to_more_than_once() -> None:
    outcome = beside(a_small_one())
    on = {gpu for gpu, _, _ in filled(outcome)}
    assert on > {4}, "its minimum is beside the GPUs of the scenario, and it has had some of them too"
    assert outcome.training_resizes > 2
    back = [
        span.gpu
        for span in outcome.recording.spans
        for gpu, _, end in filled(outcome)
        if span.gpu == gpu and span.pipeline != "training" and span.start >= end
    ]
    assert back, "a pipeline has what it filled before"


def test_no_gpu_is_in_two_uses_at_once() -> None:
    last: dict[int, float] = {}
    for span in beside(a_small_one()).recording.spans:
        assert span.start >= last.get(span.gpu, 0.0) - 1e-9
        last[span.gpu] = span.end


def test_without_it_nothing_fills() -> None:
    outcome = simulate(a_small_one(), Policy.MUSTER, 1)
    assert not filled(outcome) and outcome.training_resizes == 0


@pytest.mark.parametrize("name", ["tail", "skewed"])
def test_more_of_the_time_is_useful_and_the_pipelines_are_hardly_later(name: str) -> None:
    scenario = BUILT_IN[name]
    alone, both = simulate(scenario, Policy.MUSTER, 1), beside(scenario)
    gain = useful.by_slots(scenario, both) - useful.by_slots(scenario, alone)
    assert gain > {"tail": 0.15, "skewed": 0.03}[name]
    assert both.makespan < 1.03 * alone.makespan
    for outcome in (alone, both):
        assert useful.by_slots(scenario, outcome) < useful.by_gpus(scenario, outcome) < 1
    assert useful.by_slots(scenario, both) < useful.with_hindsight(scenario, both) < 1


def test_what_is_served_is_what_the_slots_say() -> None:
    """Of GPUs that serve anything: at least the slots that are busy, at most eight times that."""
    for outcome in (simulate(a_small_one(), Policy.MUSTER, 1), beside(a_small_one())):
        recording = outcome.recording
        assert recording.busy_slot_s / 8 <= recording.serving_gpu_s <= recording.busy_slot_s
        assert recording.serving_gpu_s <= recording.gpu_seconds()[Use.SERVE] + 1e-6


def test_with_hindsight_no_step_wastes_more_than_with_all_at_once() -> None:
    scenario = a_small_one()
    outcome = beside(scenario)
    assert useful.with_hindsight(scenario, outcome) >= useful.if_all_ran_at_once(scenario, outcome) - 1e-9
    even = scenarios.parse(
        {"gpus": 4, "pipelines": [{"batch": 32, "median_s": 20, "sigma": 0, "cap_s": 20, "steps": 1}]}
    )
    assert useful.if_all_ran_at_once(even, simulate(even, Policy.MUSTER, 1)) == 1.0, "four full GPUs that end together"

"""Workloads as the specification draws them."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from muster.sim import scenarios
from muster.types.codec import Invalid
from tests.sim.builders import a_scenario, a_workload

MINIMAL = {"gpus": 4, "pipelines": [{"batch": 8, "median_s": 10, "count": 2}]}


@pytest.mark.parametrize(("name", "bound"), [("tail", 2636), ("mixed", 3193), ("even", 2367), ("skewed", 2096)])
def test_the_mean_lower_bounds_are_those_of_the_specification(name: str, bound: int) -> None:
    scenario = scenarios.BUILT_IN[name]
    assert round(sum(scenario.lower_bound(seed) for seed in range(1, 6)) / 5) == bound


def test_each_trajectory_is_one_draw_in_step_then_index_order() -> None:
    drawn = scenarios.BUILT_IN["tail"].draw(seed=3)
    source = random.Random(302)
    expected = [min(600, 40 * math.exp(source.gauss(0, 1))) for _ in range(5 * 64)]
    assert [one.duration_s for step in drawn[2] for one in step] == expected


def test_a_trajectory_is_cut_into_equal_turns_of_at_most_ten_seconds() -> None:
    for trajectory in scenarios.BUILT_IN["mixed"].draw(seed=1)[0][0]:
        assert trajectory.turns == math.ceil(trajectory.duration_s / 10)
        assert trajectory.turn_s <= 10


def test_larger_batches_come_first_and_every_pipeline_trains_on_its_own_pair() -> None:
    mixed = scenarios.BUILT_IN["mixed"].workloads
    assert [one.batch for one in mixed] == [128, 128, 32, 32]
    assert [one.train for one in mixed] == [(0, 1), (2, 3), (4, 5), (6, 7)]


def test_the_bound_is_the_longest_pipeline_when_there_are_gpus_enough() -> None:
    scenario = a_scenario(a_workload(1, steps=3), gpus=4)
    alone = sum(max(one.duration_s for one in step) + 50 for step in scenario.draw(1)[0])
    assert scenario.lower_bound(1) == pytest.approx(alone)


def test_a_file_describes_a_scenario(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps({**MINIMAL, "shrink_s": 1}))
    found = scenarios.find(str(path))
    assert (found.name, found.gpus, found.shrink_s, found.expand_s) == ("mine", 4, 1.0, 6.0)
    assert [one.train for one in found.workloads] == [(0, 1), (2, 3)]
    assert found.workloads[0].infer == (0, 1, 2, 3)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"pipelines": []}, "pipelines"),
        ({"gpu": 3}, "scenario.gpu: is not known"),
        ({"gpus": 0}, "gpus: must be a whole number"),
        ({"pipelines": [{"batch": 8}]}, "median_s: must be a positive number"),
        ({"pipelines": [{"batch": 8, "median_s": 1, "train": [9]}]}, "train: must list GPUs from 0 to 3"),
        ({"pipelines": [{"batch": True, "median_s": 1}]}, "batch"),
    ],
)
def test_what_is_wrong_with_a_scenario_is_named(change: dict[str, object], told: str) -> None:
    with pytest.raises(Invalid, match=told.replace("(", r"\(")):
        scenarios.parse({**MINIMAL, **change})


def test_a_name_that_is_neither_built_in_nor_a_file_is_refused() -> None:
    with pytest.raises(Invalid, match="neither one of tail"):
        scenarios.find("tial")

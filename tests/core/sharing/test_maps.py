"""Which GPU maps are refused, and does each refusal name its rule?"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.core.sharing import maps
from muster.types.sharing import ClusterSpec, Pool

POOL = Pool(gpus=16, gpus_per_node=4)
GOOD = ClusterSpec([0, 1, 2, 3])

BAD_MAPS = [
    (ClusterSpec([0, 1, 2], tp_size=2), "divisible"),
    (ClusterSpec([0, 0, 1, 2]), "duplicates: GPU 0"),
    (ClusterSpec([0, 16]), "in range: GPU 16"),
    (ClusterSpec([-1, 0]), "in range: GPU -1"),
    (ClusterSpec([0, 1, 2], tp_size=3), "multiple of the node size"),
    (ClusterSpec([0, 1], tp_size=0), "at least 1"),
    (ClusterSpec([0, 2], tp_size=2), "contiguous: rank 0"),
    (ClusterSpec([3, 4], tp_size=2), "inside one node: rank 0"),
    (ClusterSpec(range(2, 10), tp_size=8), "on node boundaries: rank 0"),
    (ClusterSpec([0], slots_per_bundle=0), "slots_per_bundle"),
    (ClusterSpec([]), "needs GPUs"),
    (ClusterSpec([0.5, 1]), "whole numbers"),  # type: ignore[list-item]
]


@pytest.mark.parametrize(("spec", "rule"), BAD_MAPS, ids=[rule for _, rule in BAD_MAPS])
def test_a_bad_map_is_refused_with_the_rule_that_it_breaks(spec: ClusterSpec, rule: str) -> None:
    found = maps.problems(POOL, "p1", {"actor_infer": spec}, 1.0)
    assert [problem.field for problem in found] == ["clusters.actor_infer"]
    assert rule in found[0].message


@pytest.mark.parametrize(
    "spec",
    [
        ClusterSpec([0, 5, 9]),
        ClusterSpec([6, 7, 0, 1], tp_size=2),
        ClusterSpec(range(4, 8), tp_size=4),
        ClusterSpec(range(8), tp_size=8),
        ClusterSpec(range(4, 16), tp_size=12),
    ],
)
def test_a_good_map_is_taken(spec: ClusterSpec) -> None:
    assert maps.problems(POOL, "p1", {"actor_infer": spec, "reward": ClusterSpec()}, 0.5) == ()


@pytest.mark.parametrize(
    ("name", "clusters", "weight", "field"),
    [
        ("", {"actor_infer": GOOD}, 1.0, "pipeline"),
        ("a b", {"actor_infer": GOOD}, 1.0, "pipeline"),
        ("p1", {"actor_infer": GOOD}, 0, "weight"),
        ("p1", {"actor_infer": GOOD}, float("nan"), "weight"),
        ("p1", {"actor_train": GOOD}, 1.0, "clusters"),
        ("p1", {"actor_infer": GOOD, "actors": GOOD}, 1.0, "clusters.actors"),
        ("p1", {"actor_infer": [0, 1]}, 1.0, "clusters.actor_infer"),
        ("p1", {"actor_infer": GOOD, "reward": GOOD}, 1.0, "clusters.reward"),
    ],
)
def test_everything_else_of_a_registration_is_checked_too(
    name: str, clusters: dict[str, ClusterSpec], weight: float, field: str
) -> None:
    assert [problem.field for problem in maps.problems(POOL, name, clusters, weight)] == [field]


@given(gpus=st.lists(st.integers(-2, 18), max_size=12), size=st.integers(-1, 17), slots=st.none() | st.integers(-1, 3))
def test_a_map_that_is_taken_has_whole_bundles_of_neighbours(gpus: list[int], size: int, slots: int | None) -> None:
    spec = ClusterSpec(gpus, size, slots)
    if maps.map_problems(POOL, "actor_infer", spec):
        return
    assert sum(len(bundle) for bundle in spec.bundles) == len(gpus) == len(set(gpus)) > 0
    for bundle in spec.bundles:
        assert len(bundle) == size
        assert list(bundle) == list(range(bundle[0], bundle[0] + size)) or size == 1
        nodes = {POOL.node_of(gpu) for gpu in bundle}
        assert len(nodes) == max(1, size // POOL.gpus_per_node)

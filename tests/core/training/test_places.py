"""Who has which of a training's places, where they are only counted."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from muster.core.training.places import assigned

names = st.lists(st.sampled_from([f"w-{index}" for index in range(8)]), unique=True)
masks = st.sets(st.sampled_from([1 << index for index in range(8)]))


def test_who_has_a_place_keeps_it_and_who_is_lent_goes_from_one_that_is_left() -> None:
    assert assigned({"a": 4}, ["a", "b", "c"], {1, 4}, {2}, {"c"}) == {"a": 4, "b": 1, "c": 2}


def test_a_place_that_is_the_trainings_no_more_is_not_its_workers_either() -> None:
    assert assigned({"a": 8}, ["a"], {1}, (), ()) == {"a": 1}
    assert assigned({"a": 8}, ["a"], (), (), ()) == {}


@given(names, masks, masks, st.dictionaries(st.sampled_from(["w-0", "w-1", "w-2"]), st.sampled_from([1, 2, 4, 256])))
def test_no_place_has_two_workers_and_none_is_empty_while_somebody_has_none(
    workers: list[str], held: set[int], leaving: set[int], known: dict[str, int]
) -> None:
    before = {name: mask for name, mask in known.items() if list(known.values()).count(mask) == 1}
    found = assigned(before, workers, held, leaving - held, workers[:1])
    assert len(set(found.values())) == len(found) == min(len(workers), len(held | leaving))
    assert set(found.values()) <= held | leaving
    assert assigned(found, workers, held, leaving - held, ()) == found, "nobody moves for nothing"

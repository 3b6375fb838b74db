"""The key space: against a plain dictionary, whatever is ordered; and what waiters are told."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.mesh.keys import MOST_VALUE, NODE_COST, KeyChange, KeySpace, Refused, is_below, normal

names = st.sampled_from(["a", "b", "c"])
paths = st.lists(names, min_size=1, max_size=3).map(lambda parts: "/" + "/".join(parts))
orders = st.lists(st.tuples(st.sampled_from(["set", "delete", "clear"]), paths, st.text(max_size=3)), max_size=40)


def carry_out(space: KeySpace, verb: str, path: str, value: str) -> KeyChange | Refused:
    try:
        return space.set(path, value) if verb == "set" else space.delete(path, recursive=verb == "clear")
    except Refused as why:
        return why


def expected(model: dict[str, str], verb: str, path: str, value: str) -> None:
    """What the order does to a dictionary, were it carried out."""
    if verb == "set":
        model[path] = value
    else:
        for key in [key for key in model if key == path or is_below(key, path)]:
            del model[key]


@given(orders)
def test_it_holds_what_was_set_and_not_deleted(given: list[tuple[str, str, str]]) -> None:
    space = KeySpace()
    model: dict[str, str] = {}
    for verb, path, value in given:
        index = space.index
        done = carry_out(space, verb, path, value)
        if isinstance(done, KeyChange):
            expected(model, verb, path, value)
            assert done.index == space.index == index + 1
        else:
            assert space.index == index
        assert space.files("/") == model
    assert space.size == space.find("/").cost() - NODE_COST


def held(space: KeySpace, path: str, below: bool) -> dict[str, str]:
    return {key: value for key, value in space.files("/").items() if key == path or (below and is_below(key, path))}


@given(orders, paths, st.booleans())
def test_a_waiter_is_told_the_first_change_that_concerns_it(
    given: list[tuple[str, str, str]], path: str, recursive: bool
) -> None:
    space = KeySpace()
    told: list[KeyChange] = []
    for order in given:
        before = held(space, path, recursive)
        done = carry_out(space, *order)
        after = held(space, path, recursive)
        if isinstance(done, KeyChange) and done.concerns(path, recursive):
            told.append(done)
        else:
            assert before == after, "a change that nobody was told of"
    for event in told:
        assert space.since(event.index, path, recursive) == event
    assert space.since(1, path, recursive) == (told[0] if told else None)


def test_an_index_that_is_forgotten_is_told_apart_from_one_that_is_to_come() -> None:
    space = KeySpace(keep=3)
    for count in range(5):
        space.set("/a", str(count))
    assert space.since(6, "/a", False) is None
    assert space.since(3, "/a", False) is not None
    with pytest.raises(Refused) as caught:
        space.since(2, "/a", False)
    assert (caught.value.status, caught.value.code, caught.value.cause) == (
        400,
        401,
        "the requested history has been cleared [3/2]",
    )


@given(st.text(alphabet="a/.\0é%", max_size=20))
def test_a_path_has_one_way_to_be_written(text: str) -> None:
    try:
        path = normal(text)
    except Refused:
        return
    assert normal(path) == path and path.startswith("/") and "//" not in path
    assert path == "/" or not path.endswith("/")


def test_sizes_are_bounded() -> None:
    space = KeySpace()
    for path, value in (("/" + "x" * 5000, ""), ("/x" * 65, ""), ("/a", "x" * (MOST_VALUE + 1))):
        with pytest.raises(Refused):
            space.set(normal(path), value)
    assert space.index == 0

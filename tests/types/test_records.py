"""Is a record what a frozen dataclass is, though it is made in another way?"""

from __future__ import annotations

import copy
import dataclasses
import pickle
from dataclasses import dataclass, field
from typing import Any

import pytest

from muster.types.records import record


@record()
class Point:
    x: int
    y: int = 0
    names: list[str] = field(default_factory=list)


@record(kw_only=True)
class Named:
    label: str = ""

    def __post_init__(self) -> None:
        if self.label == "bad":
            raise ValueError("bad")


@record(kw_only=True)
class Spot(Named):
    """With what the base has."""

    at: Point


@dataclass(frozen=True)
class Frozen:
    x: int
    y: int = 0


def test_it_is_made_compared_shown_and_hashed_as_a_frozen_dataclass() -> None:
    assert (Point(1).x, Point(1).y, Point(1).names) == (1, 0, [])
    assert Point(1).names is not Point(1).names
    assert Point(1, 2) == Point(y=2, x=1) != Point(1, 3)
    others: list[Any] = [(1, 0, []), Named()]
    assert all(Point(1) != other for other in others)
    assert repr(Point(1)) == "Point(x=1, y=0, names=[])"
    assert hash(Named(label="a")) == hash(Named(label="a"))
    assert repr(Spot(at=Point(1))) == "Spot(label='', at=Point(x=1, y=0, names=[]))"


def test_what_works_on_dataclasses_works_on_it() -> None:
    spot = Spot(at=Point(1), label="here")
    assert [one.name for one in dataclasses.fields(spot)] == ["label", "at"]
    assert dataclasses.replace(spot, label="there").label == "there" and spot.label == "here"
    assert copy.copy(spot) == spot and pickle.loads(pickle.dumps(spot)) == spot
    match Point(3, 4):
        case Point(x, y):
            assert (x, y) == (3, 4)
    with pytest.raises(ValueError, match="bad"):
        Named(label="bad")


def test_it_does_not_change() -> None:
    point: Any = Point(1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        point.x = 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        del point.x


@pytest.mark.parametrize(
    "make",
    [
        lambda kind: kind(),
        lambda kind: kind(1, 2, 3, 4),
        lambda kind: kind(1, x=1),
        lambda kind: kind(1, z=1),
    ],
)
def test_what_a_dataclass_refuses_it_refuses(make: Any) -> None:
    for kind in (Point, Frozen):
        with pytest.raises(TypeError):
            make(kind)


def test_without_a_name_nothing_is_taken_where_names_are_needed() -> None:
    kind: Any = Named
    with pytest.raises(TypeError):
        kind("here")

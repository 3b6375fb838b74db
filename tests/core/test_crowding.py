"""Who goes when too many are there, and who may ask for more."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from muster.core.crowding import has_room, who_goes


@dataclass
class One:
    name: str
    address: str = "here"
    token: str = ""
    asking: bool = False
    since: float = 0.0


STRANGER = One("stranger")
SECOND = One("second", since=1)
ALONE = One("alone", "elsewhere")
RESTS = One("rests", token="admin", since=5)
RESTS_LONGER = One("rests longer", token="admin", since=4)
ASKS = One("asks", token="admin", asking=True, since=2)
FOLLOWS = tuple(One(f"follows {at}", token="viewer", asking=True, since=at) for at in (7, 3, 9))


@pytest.mark.parametrize(
    ("present", "goes"),
    [
        ((STRANGER,), STRANGER),
        ((ALONE, STRANGER, SECOND), STRANGER),  # of the address that has the most
        ((RESTS_LONGER, ASKS, SECOND), SECOND),  # before anyone who is known
        ((ASKS, RESTS, RESTS_LONGER, *FOLLOWS), RESTS_LONGER),  # before anyone who is answered
        ((ASKS, *FOLLOWS), FOLLOWS[1]),  # the eldest request of whoever has the most
        ((ASKS,), ASKS),
    ],
)
def test_strangers_go_first_then_who_wants_nothing_then_the_greediest(present: tuple[One, ...], goes: One) -> None:
    assert who_goes(present) == goes


@pytest.mark.parametrize(
    ("open_requests", "whose", "room"),
    [
        ({}, "a", True),
        ({"a": 3}, "a", True),
        ({"a": 4}, "a", False),
        ({"a": 4, "b": 4, "c": 4}, "d", True),  # it has nothing yet, though all is taken
        ({"a": 4, "b": 4, "c": 2, "d": 2}, "d", True),
        ({"a": 4, "b": 3, "c": 2, "d": 3}, "d", False),  # three is its part
        ({name: 1 for name in "abcdefghijkl"}, "a", False),
        ({name: 1 for name in "abcdefghijkl"}, "m", True),
    ],
)
def test_what_is_left_goes_to_those_who_have_less(open_requests: dict[str, int], whose: str, room: bool) -> None:
    assert has_room(open_requests, whose, 16) is room

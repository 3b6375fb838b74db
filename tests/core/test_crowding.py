"""Who goes when too many are there."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from muster.core.crowding import who_goes


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

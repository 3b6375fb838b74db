"""A machine that is lost, in each way that machines are, costs a round; when it is back it takes part again."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.netns.faults import EACH, LOSSES
from tests.netns.fleet import MachineFleet, a_machine_fleet
from tests.netns.machines import why_not

pytestmark = [pytest.mark.netns, pytest.mark.skipif(bool(why_not()), reason=why_not())]

# Well beyond a lease: whoever is away for longer is given up.
GIVEN_UP_S = 20.0


@pytest.mark.parametrize("spares", [0, 1])
@pytest.mark.parametrize("name", EACH)
def test_a_lost_machine_costs_a_round_and_is_taken_back(tmp_path: Path, name: str, spares: int) -> None:
    loss = LOSSES[name]
    with a_machine_fleet(tmp_path, workers=2, spares=spares) as fleet:
        fleet.begin()
        before, victim = fleet.whole()["round"], fleet.names[1]
        struck = fleet.strike(loss, 1)
        if loss.is_longer_than(GIVEN_UP_S) and spares:
            number = fleet.trains("a spare takes its place", lambda n, workers: n > before and victim not in workers)
            tell(f"{name}: the spare is at work after", fleet, number, struck)
        elif loss.is_longer_than(GIVEN_UP_S):
            seen = fleet.until("it is known to be lost", lambda v: v["state"] != "training")
            assert seen["round"] == before, "nobody trains without it"
        time.sleep(max(0.0, struck + (loss.lasts_s or 0.0) - time.monotonic()))
        back = time.monotonic()
        fleet.mend(loss, 1)
        number = fleet.whole()["round"]
        print(f"{name}: whole again {time.monotonic() - back:.2f} s after it is back")
        if number > before and not spares:
            tell(f"{name}: all are at work again, from its return,", fleet, number, back)
        fleet.finish()


def tell(what: str, fleet: MachineFleet, number: int, since: float) -> None:
    print(f"{what} {fleet.began(number) - since:.2f} s (round {number})")


def test_real_process_groups_lose_a_machine(tmp_path: Path) -> None:
    """With torch: an all-reduce that hangs on a lost machine, and one of the next round that does not."""
    loss = LOSSES["power"]
    with a_machine_fleet(tmp_path, workers=2, spares=1, program="fenced_torch.py") as fleet:
        fleet.begin()
        before = fleet.whole()["round"]
        struck = fleet.strike(loss, 1)
        number = fleet.trains("the spare is in the group", lambda n, workers: n > before)
        tell("power, with torch: the first all-reduce after", fleet, number, struck)
        fleet.mend(loss, 1)
        fleet.whole()
        fleet.finish()

"""The machine of a stand-alone coordinator is lost: another goes on, and takes it back as a worker like any other."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.netns.faults import EACH, LOSSES
from tests.netns.fleet import MachineFleet, a_machine_fleet
from tests.netns.machines import why_not
from tests.netns.test_lost_machines import GIVEN_UP_S, tell

pytestmark = [pytest.mark.netns, pytest.mark.skipif(bool(why_not()), reason=why_not())]


@pytest.mark.parametrize("name", EACH)
def test_another_goes_on(tmp_path: Path, name: str) -> None:
    loss = LOSSES[name]
    with a_machine_fleet(tmp_path, workers=3, spares=1, any_may_lead=True) as fleet:
        fleet.begin()
        before, victim = fleet.whole()["round"], fleet.names[0]
        struck = fleet.strike(loss, 0)
        if loss.is_longer_than(GIVEN_UP_S):
            number = fleet.trains("the others train", lambda n, workers: n > before and victim not in workers)
            tell(f"{name}: the others are at work after", fleet, number, struck)
            shows(fleet, number)
        time.sleep(max(0.0, struck + (loss.lasts_s or 0.0) - time.monotonic()))
        back = time.monotonic()
        fleet.mend(loss, 0)
        fleet.whole()
        print(f"{name}: whole again {time.monotonic() - back:.2f} s after it is back")
        fleet.finish()


def without(fleet: MachineFleet, victim: str) -> None:
    fleet.trains("the others train", lambda _, workers: victim not in workers)


def shows(fleet: MachineFleet, number: int) -> None:
    """Whoever asks a living machine finds who goes on."""
    fleet.until("the successor can be asked", lambda v: v["round"] == number and v["world"] == 3)


def test_one_after_the_other_until_nobody_of_the_first_is_left(tmp_path: Path) -> None:
    """Machines are replaced one by one, whoever leads then; the run never begins anew."""
    loss = LOSSES["power"]
    with a_machine_fleet(tmp_path, workers=3, spares=1, any_may_lead=True) as fleet:
        fleet.begin()
        for machine in range(4):
            fleet.whole()
            fleet.strike(loss, machine)
            without(fleet, fleet.names[machine])
            fleet.mend(loss, machine)
        assert fleet.whole()["restarts_used"] == 0
        fleet.finish()


def test_real_process_groups_lose_the_coordinator_of_their_store(tmp_path: Path) -> None:
    """With torch: rank 0, its store and the coordinator are on the machine that is lost."""
    loss = LOSSES["killed whole"]
    with a_machine_fleet(tmp_path, workers=3, spares=1, program="fenced_torch.py", any_may_lead=True) as fleet:
        fleet.begin()
        before, victim = fleet.whole()["round"], fleet.names[0]
        struck = fleet.strike(loss, 0)
        number = fleet.trains("a new group", lambda n, workers: n > before and victim not in workers)
        tell("killed whole, with torch: the first all-reduce after", fleet, number, struck)
        fleet.mend(loss, 0)
        fleet.whole()
        fleet.finish()

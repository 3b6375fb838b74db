"""Machines are lost at random, the coordinator's included; the world must be whole again each time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.netns.fleet import a_machine_fleet
from tests.netns.losses import SPARES, WORKERS, random_losses
from tests.netns.machines import why_not

pytestmark = [pytest.mark.netns, pytest.mark.skipif(bool(why_not()), reason=why_not())]


@pytest.mark.parametrize("coordinator_too", [False, True])
def test_a_few_random_losses(tmp_path: Path, coordinator_too: bool) -> None:
    lose(tmp_path, seed=1, losses=6, coordinator_too=coordinator_too)


@pytest.mark.soak
@pytest.mark.parametrize("coordinator_too", [False, True])
def test_two_hundred_random_losses(tmp_path: Path, coordinator_too: bool) -> None:
    lose(tmp_path, seed=7, losses=200, coordinator_too=coordinator_too)


def lose(folder: Path, *, seed: int, losses: int, coordinator_too: bool) -> None:
    with a_machine_fleet(folder, workers=WORKERS, spares=SPARES, any_may_lead=coordinator_too) as fleet:
        tally = random_losses(fleet, seed=seed, losses=losses, coordinator_too=coordinator_too)
    print(tally)
    assert not tally.broken, "\n".join([*tally.broken, str(tally)])
    assert tally.lost.total() == losses

"""Trainings and pipelines on one pool, on virtual time: no GPU has two users, none is forgotten, nobody starves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import pytest

from muster.control.pool_claims import PoolClaims
from muster.core.sharing import workers
from muster.sharing.trainings import Trainings
from muster.sim import virtual
from muster.types.sharing import LeaseState, Shares
from muster.types.training import Resources, Uid
from tests.control.pool_history import History
from tests.training_builders import a_training


def lived(seed: int, events: int = 60) -> Counter[str]:
    async def story() -> Counter[str]:
        history = History(seed)
        await history.run(events)
        return history.counts

    return virtual.run(story())


def test_nobody_shares_a_gpu_and_nobody_starves_whatever_happens() -> None:
    counts = sum((lived(seed) for seed in range(1, 13)), Counter[str]())
    assert (
        counts["crashes"] > 30 and counts["records lost"] > 5 and counts["killed"] > 50 and counts["lent or back"] > 100
    )
    assert counts["trained"] > 30 and counts["suspended or resumed"] > 20 and counts["ended"] > 30


@pytest.mark.soak
@pytest.mark.parametrize("hundred", range(1, 11))
def test_nobody_shares_a_gpu_in_hundreds_of_histories(hundred: int) -> None:
    counts = sum((lived(seed, 120) for seed in range(100 * hundred, 100 * hundred + 100)), Counter[str]())
    assert counts["crashes"] > 100 and counts["trained"] > 100 and counts["lent or back"] > 100


def test_the_same_seed_gives_the_same_history() -> None:
    assert lived(3) == lived(3)


def test_a_place_that_a_training_is_told_of_is_in_use_before_its_worker_is_there() -> None:
    """It may be starting one at this moment: whoever wants the GPU waits until it has said that nothing is on it."""

    async def story() -> None:
        history = History(1)
        await history.serve()
        training = a_training("t", uid="t", world=(1, 2, 2), elasticity="lend", resources=Resources(gpus=1))
        places = history.claims.grant(training).places
        assert places and len(places) == 2
        crew = history.scheduler.shares.crews["t"]
        assert all(crew.using >> gpu & 1 for place in places for gpu in place)
        asked = workers.leaving(history.scheduler.shares, {f"t/{places[1][0]}": "p needs it"}, 0.0)
        assert asked.workers[f"t/{places[1][0]}"].state is LeaseState.DRAINING
        await history.scheduler.stop()

    virtual.run(story())


# What a history would find -----------------------------------------------------------------------


def found_out() -> bool:
    try:
        for seed in range(1, 13):
            lived(seed)
    except (AssertionError, TimeoutError):
        return True
    return False


def test_one_that_frees_a_gpu_before_its_worker_has_left_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def hasty(shares: Shares, leaves: dict[str, str], now: float) -> Shares:
        asked = before(shares, leaves, now)
        for key in leaves:
            if key in asked.workers:
                asked = workers.left(asked, asked.workers[key].training, asked.workers[key].mask, now)
        return asked

    before = workers.leaving
    monkeypatch.setattr(workers, "leaving", hasty)
    assert found_out()


def test_one_that_adopts_nobody_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(self: Trainings, training: str, masks: Iterable[int]) -> None:
        """Forget them."""

    monkeypatch.setattr(Trainings, "adopt", none)
    assert found_out()


def test_one_that_forgets_what_a_dead_worker_left_running_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def hasty(self: PoolClaims, uid: Uid) -> bool:
        if any(one.alive for one in self._backend.workers(uid)):
            return False
        self._pool.withdraw(uid)
        return True

    monkeypatch.setattr(PoolClaims, "forget", hasty)
    assert found_out()

"""Launches that follow each other under one run id, on virtual time.

The checker of the simulator demands that no rank of the last run is alive when the next one begins, and that a worker
that was never a member exits with 0 only if it is a late worker of the same launch.
"""

from __future__ import annotations

from random import Random

import pytest

from muster.types.world import OutcomeState
from tests.simulator.fleet import SimulatedFleet
from tests.simulator.worker import SimulatedWorker
from tests.simulator.worlds import a_training, codes, everyone_leaves

ALONE: dict[str, object] = {"min": 1, "max": 1}


def ran(fleet: SimulatedFleet) -> set[str]:
    """Record the machines on which ranks start."""
    machines: set[str] = set()
    before = fleet.rank_started

    def started(rank: object) -> None:
        machines.add(rank.machine.name)  # type: ignore[attr-defined]
        before(rank)  # type: ignore[arg-type]

    fleet.rank_started = started  # type: ignore[method-assign]
    return machines


def an_ended_world(names: str = "a", *, size: int = 1, **settings: object) -> SimulatedFleet:
    fleet = a_training(names, size=size, min=size, max=size, **settings)
    fleet.finish_work()
    everyone_leaves(fleet)
    return fleet


@pytest.mark.parametrize("launch", ["", "another launch"])
def test_a_new_launch_begins_a_run_of_its_own(launch: str) -> None:
    fleet = an_ended_world()
    epoch, machines = fleet.coordinator.protocol.at.epoch, ran(fleet)
    new = fleet.join("b", settings={"min": 1, "max": 1, "max_restarts": 9}, launch=launch)
    everyone_leaves(fleet)
    assert new.code == 0 and new.machine.name in machines
    assert fleet.run.settings.max_restarts == 9 and fleet.coordinator.protocol.at.epoch == epoch + 1


def test_a_spare_that_reconnects_before_its_farewell_was_a_member() -> None:
    fleet = a_training("a b", size=1, min=1, max=1, spares=1)
    spare = fleet.agent("b")
    fleet.cut(spare)
    fleet.finish_work()
    fleet.until("the outcome", lambda: fleet.outcome)
    fleet.heal(spare)
    everyone_leaves(fleet)
    assert codes(fleet) == {"a": 0, "b": 0}


def test_a_spare_that_comes_back_after_the_next_run_began_gets_its_own_runs_outcome() -> None:
    fleet = a_training("a b", size=1, min=1, max=1, spares=1)
    spare, machines = fleet.agent("b"), ran(fleet)
    fleet.cut(spare)
    fleet.finish_work()
    fleet.until("the first run has ended", lambda: fleet.agent("a").code is not None)
    fleet.work_done = False
    new = fleet.join("n", settings=ALONE, launch="another")
    fleet.until("the next run trains", lambda: fleet.trains(0, 1), within_s=20.0)
    fleet.heal(spare)
    fleet.until("the spare leaves", lambda: spare.code is not None)
    assert spare.code == 0 and spare.machine.name not in machines and not spare.state.late
    assert fleet.trains(0, 1) and [seat.name for seat in fleet.run.round.seats] == ["n"]  # type: ignore[union-attr]
    fleet.finish_work()
    everyone_leaves(fleet)
    assert new.code == 0


def test_the_next_run_waits_while_ranks_of_the_last_one_are_stopped() -> None:
    fleet = SimulatedFleet(1)
    fleet.join_all("a", "b", settings={"min": 2, "max": 2, "stop_grace_s": 3.0}, stubborn=True)
    fleet.until("round 0", lambda: fleet.trains(0, 2))
    fleet.cancel()
    new = fleet.join("n", settings=ALONE, launch="another")
    fleet.advance(2.0)
    assert new.code is None and not new.machine.ranks and new.alive
    fleet.until("the next run trains", lambda: fleet.trains(0, 1))
    fleet.finish_work()
    everyone_leaves(fleet)
    assert codes(fleet) == {"a": 1, "b": 1, "n": 0}


def test_one_that_waits_for_a_name_at_the_end_begins_the_next_run_if_it_is_of_another_launch() -> None:
    fleet = a_training("a b", size=1, min=1, max=1, spares=1)
    fleet.agent("b").power_off()
    machines = ran(fleet)
    waiting = fleet.join("b", settings={"min": 1, "max": 1, "spares": 1}, launch="another")
    fleet.advance(0.2)
    fleet.finish_work()
    everyone_leaves(fleet, 20.0)
    assert waiting.code == 0 and waiting.machine.name in machines


def test_an_outcome_of_the_last_run_does_not_end_a_run_that_was_opened_elsewhere() -> None:
    """The coordinator is lost with its record; a new launch opens a run before an old member is back."""
    fleet = SimulatedFleet(1)
    fleet.join_all("a", "b", settings={"min": 2, "max": 2, "farewell_s": 30.0}, stubborn=True)
    fleet.until("round 0", lambda: fleet.trains(0, 2))
    fleet.cut(fleet.agent("b"), directions=frozenset({"up"}))
    fleet.cancel()
    fleet.until("a member has the outcome", lambda: fleet.agent("a").outcome is not None)
    fleet.crash(keep_record=False)
    fleet.network.cut(fleet.agent("a").machine.name)
    fleet.until("no rank is left", lambda: not fleet.census.alive, within_s=40.0)
    fleet.restart()
    fleet.checker.next_run()
    new = fleet.join("n", settings={"min": 1, "max": 1, "max_restarts": 0}, launch="another")
    fleet.until("the new run trains", lambda: fleet.trains(0, 1))
    fleet.network.heal(fleet.agent("a").machine.name)
    fleet.advance(1.0)
    assert fleet.outcome is None and fleet.trains(0, 1), "the old outcome ended the new run"
    fleet.finish_work()
    fleet.until("it succeeds", lambda: new.code is not None)
    assert new.code == 0


@pytest.mark.parametrize("seed", range(60))
def test_random_launches_follow_each_other(seed: int) -> None:
    """For each outcome, fault and order of arrival, a new launch trains and a late worker does not."""
    rng = Random(seed)
    fleet = SimulatedFleet(seed)
    shared = {"min": 2, "max": 2, "spares": 1, "max_restarts": 0, "stop_grace_s": 2.0}
    old = [fleet.join(n, settings=shared, launch="A", stubborn=rng.random() < 0.3) for n in "abc"]
    fleet.until("the first run trains", lambda: fleet.trains(0, 2))
    machines = ran(fleet)
    if rng.random() < 0.3:
        fleet.cut(old[2], for_s=rng.uniform(0.1, 3.0))
    state = rng.choice(list(OutcomeState))
    if state is OutcomeState.SUCCEEDED:
        fleet.finish_work()
    elif state is OutcomeState.CANCELLED:
        fleet.cancel()
    else:
        fleet.fail(fleet.seats[0])
    fleet.until("the first outcome", lambda: fleet.outcome)
    assert fleet.outcome is not None and fleet.outcome.state is state
    fleet.finish_work()
    if rng.random() < 0.4:
        fleet.clock.after(rng.uniform(0.0, 2.0), lambda: fleet.crash(back_after_s=rng.uniform(0.05, 1.0)))
    size, launch = rng.choice([1, 2]), rng.choice(["", "B"])
    begins = rng.uniform(0.0, 2.0)
    new: list[SimulatedWorker] = []
    late: list[SimulatedWorker] = []

    def join_new(name: str) -> None:
        new.append(fleet.join(name, settings={"min": size, "max": size}, launch=launch))

    for index in range(size):
        fleet.clock.after(begins + 0.02 * index, lambda index=index: join_new(f"n{index}"))
    fleet.clock.after(rng.uniform(0.0, 4.0), lambda: late.append(fleet.join("late", settings=shared, launch="A")))
    fleet.advance(4.5)
    fleet.until("everyone is out", lambda: not fleet.present, within_s=60.0)
    assert [worker.code for worker in new] == [0] * size
    assert all(worker.machine.name in machines for worker in new), "a new launch ended without a rank"
    expected = 0 if state is OutcomeState.SUCCEEDED else 1
    assert [worker.code for worker in late] == [expected] and late[0].state.late
    assert late[0].machine.name not in machines
    assert all(worker.code == expected for worker in old)

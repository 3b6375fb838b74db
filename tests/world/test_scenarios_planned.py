"""What is planned is told to ranks first, and a size that cannot work is taken back; on virtual time."""

from __future__ import annotations

import pytest

from muster.core.world import notices
from muster.types.world import Role
from tests.simulator.fleet import SimulatedFleet
from tests.simulator.processes import STEP_S
from tests.simulator.worlds import by_role, told


def a_fleet(
    names: str, size: int, *, asks: bool = True, takes_notice: bool = True, **settings: object
) -> SimulatedFleet:
    fleet = SimulatedFleet(1)
    given = {"min": 1, "max": 4, "target": size, **settings}
    fleet.join_all(*names.split(), settings=given, asks=asks, takes_notice=takes_notice)
    fleet.until("round 0", lambda: fleet.trains(0, size))
    return fleet


def is_told(fleet: SimulatedFleet) -> bool:
    return fleet.run.round is not None and fleet.run.round.notice is not None


def test_a_resize_waits_until_ranks_that_ask_have_saved_and_gone_on() -> None:
    fleet = a_fleet("a b c", 2)
    fleet.set_target(3)
    fleet.until("ranks are told", lambda: fleet.run.round and fleet.run.round.notice and fleet.run.round.notice.call)
    assert fleet.trains(0, 2), "they go on meanwhile"
    took = fleet.until("round 1", lambda: fleet.trains(1, 3))
    assert notices.AHEAD * STEP_S <= took < 5.0


def test_where_nobody_asks_nothing_is_waited_for() -> None:
    fleet = a_fleet("a b c", 2, asks=False)
    fleet.set_target(3)
    assert fleet.until("round 1", lambda: fleet.trains(1, 3)) < 0.2


def test_a_worker_that_cannot_be_told_is_not_waited_for() -> None:
    fleet = a_fleet("a b c", 2, takes_notice=False)
    fleet.set_target(3)
    assert fleet.until("round 1", lambda: fleet.trains(1, 3)) < 0.2


def test_ranks_that_never_go_on_hold_a_resize_for_the_stop_grace() -> None:
    fleet = a_fleet("a b", 2, stop_grace_s=3.0)
    for agent in fleet.agents:
        agent.processes._noticed = lambda *_: None  # type: ignore[method-assign]
    fleet.set_target(1)
    assert fleet.until("round 1", lambda: fleet.trains(1, 1)) == pytest.approx(3.0, abs=0.5)


def test_a_loss_is_not_held_up_by_what_was_planned() -> None:
    fleet = a_fleet("a b c d", 3)
    fleet.set_target(2)
    fleet.until("ranks are told", lambda: is_told(fleet))
    lost = fleet.seats[0]
    fleet.agent(lost).kill()
    assert fleet.until("round 1", lambda: fleet.trains(1, 2)) < 0.5
    assert told(fleet, "recall") == [f"lost {lost}: its connection closed"]


def test_a_target_that_is_set_back_in_time_disturbs_nobody() -> None:
    fleet = a_fleet("a b c", 3)
    fleet.set_target(2)
    fleet.until("ranks are told", lambda: is_told(fleet))
    fleet.set_target(3)
    fleet.advance(5.0)
    assert fleet.trains(0, 3) and not is_told(fleet)


def test_a_worker_that_is_asked_to_go_waits_for_the_others() -> None:
    fleet = a_fleet("a b c", 2)
    leaver, stays = fleet.seats
    fleet.agent(leaver).leave()
    fleet.until("ranks are told", lambda: is_told(fleet))
    assert by_role(fleet, Role.LEAVING) == [leaver] and fleet.agent(leaver).machine.ranks
    fleet.until("round 1", lambda: fleet.trains(1, 2))
    assert stays in fleet.seats and leaver not in fleet.seats and fleet.run.restarts_used == 0
    assert fleet.agent(leaver).code == 143


def test_a_worker_that_is_asked_to_go_and_hears_nothing_ends_its_ranks_in_its_grace() -> None:
    fleet = a_fleet("a b c", 2, stop_grace_s=4.0, lease_s=60.0)
    leaver = fleet.agent(fleet.seats[0])
    fleet.network.cut(leaver.machine.name, frozenset({"down"}))
    leaver.leave()
    assert fleet.until("it is gone", lambda: leaver.code == 143) <= 4.1


# A size that cannot work


def fails_with(fleet: SimulatedFleet, size: int) -> None:
    """Every round of that size fails at once."""

    def fail() -> None:
        if fleet.trains() and len(fleet.seats) == size:
            rank = fleet.agent(fleet.seats[-1]).machine.ranks
            if rank:
                rank[0].machine.end(rank[0], 1)
        fleet.clock.after(0.05, fail)

    fleet.clock.after(0.05, fail)


def test_a_size_that_fails_without_progress_is_taken_back_once() -> None:
    fleet = a_fleet("a b c", 2, max_restarts=0)
    fails_with(fleet, 3)
    fleet.set_target(3)
    fleet.until("two train again", lambda: fleet.run.taken_back is not None and fleet.trains(2, 2))
    assert (fleet.run.target, fleet.run.aim, fleet.run.restarts_used) == (3, 2, 0)
    fleet.advance(30.0)
    assert fleet.trains(2, 2), "it is not tried again"
    reason = fleet.coordinator.protocol.at.reason
    assert "taken back to 2: 3 workers failed without progress: exited with code 1 (rank 2)" in reason
    fleet.crash(back_after_s=0.2)
    fleet.until("it goes on", lambda: fleet.trains(2, 2))
    fleet.advance(10.0)
    assert fleet.trains(2, 2) and fleet.run.aim == 2, "nor by another coordinator"
    fleet.set_target(3)
    fleet.until("it is tried again", lambda: fleet.run.next_round > 3)


def test_a_smaller_size_that_fails_waits_for_the_workers_of_the_larger_one() -> None:
    fleet = a_fleet("a b c", 3, max_restarts=0, spares=0)
    fails_with(fleet, 2)
    fleet.set_target(2)
    fleet.until("it is taken back", lambda: fleet.run.taken_back is not None)
    fleet.advance(10.0)
    assert "last call for 1 more" in fleet.coordinator.protocol.at.reason
    fleet.join("d", settings={})
    fleet.until("three train again", lambda: fleet.trains(2, 3))

"""Workers lend their GPUs and get them back, and coordinators die meanwhile: on virtual time."""

from __future__ import annotations

from random import Random

import pytest

from muster.core.world import lending
from muster.types.frames import AnswerFrame, AskFrame
from tests.simulator.director import SimulatedDirector
from tests.simulator.fleet import SimulatedFleet
from tests.simulator.worlds import a_training, told


def directed(names: str, *, size: int, **settings: int) -> tuple[SimulatedFleet, SimulatedDirector]:
    fleet = a_training(names, size=size, **settings)
    return fleet, SimulatedDirector(fleet, Random(1))


def test_a_gpu_goes_and_comes_back_in_a_moment() -> None:
    fleet, director = directed("a b c", size=3, min=1, max=3)
    director.lend("b", target=2)
    assert fleet.until("b has no rank", lambda: director.given) < 0.3
    fleet.until("two train", lambda: fleet.trains(1, 2))
    assert fleet.seats == ["a", "c"]
    director.give_back("b", target=3)
    assert fleet.until("three train", lambda: fleet.trains(2, 3)) < 0.5
    assert fleet.seats == ["a", "c", "b"]
    assert len(told(fleet, "recall")) == 2, "one for each order"


def test_a_worker_that_has_no_rank_is_given_away_at_once() -> None:
    fleet, director = directed("a b x", size=2, min=2, max=2, spares=1)
    director.lend("x")
    fleet.until("x is free", lambda: director.given, 0.01)
    fleet.advance(1.0)
    assert fleet.trains(0, 2)


def test_its_agent_stays_and_is_shown_as_lent() -> None:
    fleet, director = directed("a b", size=2, min=1, max=2)
    director.lend("b", target=1)
    fleet.until("one trains", lambda: fleet.trains(1, 1))
    fleet.advance(3 * fleet.lease_s)
    answer = fleet.coordinator.ask(AskFrame(ask="show"))
    assert isinstance(answer, AnswerFrame)
    shown = {member["name"]: (member["role"], member["note"]) for member in answer.view["members"]}
    assert shown["b"] == ("lent", "GPU of b is with p2")
    assert answer.view["spares"] == 0 and fleet.agent("b").alive


@pytest.mark.parametrize("keep_record", [True, False])
def test_a_coordinator_that_comes_back_seats_nobody_that_is_lent(keep_record: bool) -> None:
    """Nobody tells it: what it has kept, or what members have, is enough."""
    fleet = a_training("a b c", size=3, min=2, max=3)
    run = fleet.run
    fleet.coordinator.protocol.orders.reconfigure(run.settings, 2, fleet.clock.now, {"b": "GPU 1 is with p2"})
    fleet.coordinator.settle_soon()
    fleet.until("two train", lambda: fleet.trains(1, 2))
    fleet.crash(keep_record=keep_record, back_after_s=0.1)
    fleet.until("they train on", lambda: fleet.trains(1, 2))
    assert fleet.run.lent == {"b": "GPU 1 is with p2"}
    fleet.until("it is sure", lambda: lending.vacated(fleet.run, "b", fleet.clock.now))
    fleet.agent("c").kill_both()
    fleet.until("c is lost", lambda: "c" not in [member.name for member in fleet.run.members.values()])
    fleet.advance(2 * fleet.lease_s)
    assert fleet.coordinator.protocol.at.reason.startswith("1 of at least 2 workers: 1 missing; left: c; lent: b")


def test_what_the_director_says_goes_before_what_records_say() -> None:
    fleet, director = directed("a b c", size=3, min=2, max=3)
    director.lend("b", target=2)
    fleet.until("two train", lambda: fleet.trains(1, 2))
    stale = fleet.agent("b")
    fleet.cut(stale, 2 * fleet.lease_s)
    director.give_back("b", target=3)
    fleet.crash(keep_record=False, back_after_s=0.0)
    fleet.until("they train on", lambda: fleet.trains(1, 2))
    director.give_back(target=3)
    fleet.until("all train again", lambda: fleet.trains(size=3))
    assert fleet.run.lent == {}


def test_an_order_that_comes_while_ranks_wait_for_the_next_round_costs_no_recall() -> None:
    fleet, director = directed("a b c", size=3, min=1, max=3)
    fleet.fail("c")
    fleet.until("it is called back", lambda: fleet.run.running is None)
    director.lend("b", target=2)
    fleet.until("two train", lambda: fleet.trains(1, 2))
    assert fleet.seats == ["a", "c"] and len(told(fleet, "recall")) == 1

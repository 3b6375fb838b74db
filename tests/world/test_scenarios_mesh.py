"""The mesh gate on virtual time: who holds ranks back, for how long, and what opens them."""

from __future__ import annotations

from typing import Any

import pytest

from muster.types.world import GateState
from tests.simulator.fleet import SimulatedFleet
from tests.simulator.worlds import a_training, a_world, told

GATE: dict[str, Any] = {"gate_timeout_s": 10.0}


def part(fleet: SimulatedFleet, one: str, other: str) -> None:
    fleet.network.part(fleet.agent(one).machine.name, fleet.agent(other).machine.name)


def join(fleet: SimulatedFleet, one: str, other: str) -> None:
    fleet.network.join(fleet.agent(one).machine.name, fleet.agent(other).machine.name)


def test_members_that_reach_each_other_start_at_once() -> None:
    fleet = a_world("a b c", min=1, max=3, **GATE)
    assert fleet.until("training", lambda: fleet.trains(0, 3)) < 0.2
    assert told(fleet, "mesh-ready") == ["all 3 workers reach each other"]


def test_ranks_start_when_the_last_way_opens() -> None:
    fleet = a_world("a b", min=2, max=2, **GATE)
    part(fleet, "a", "b")
    fleet.advance(4.0)
    assert fleet.run.round is None
    assert fleet.coordinator.protocol.at.reason == "the mesh converges: a → b (refused); ranks start anyway after 10 s"
    join(fleet, "a", "b")
    assert fleet.until("training", lambda: fleet.trains(0, 2)) < 1.0
    assert fleet.run.gate is not None and fleet.run.gate.state is GateState.READY


def test_the_gate_fails_open_and_heals_under_the_running_round() -> None:
    fleet = a_world("a b c", min=3, max=3, **GATE)
    part(fleet, "c", "a")
    assert fleet.until("training", lambda: fleet.trains(0, 3), 20) == pytest.approx(10.0, abs=0.3)
    assert fleet.run.gate is not None and fleet.run.gate.named == "c → a (refused)"
    join(fleet, "c", "a")
    fleet.until("healed", lambda: fleet.run.gate is not None and fleet.run.gate.state is GateState.READY, 2.0)
    assert fleet.trains(0, 3), "its ranks went on"


def test_a_spare_that_is_known_takes_over_as_fast_as_without_a_gate() -> None:
    times = []
    for settings in ({}, GATE):
        fleet = a_training("a b c", size=2, min=2, max=3, target=2, spares=1, **settings)
        fleet.advance(1.0)
        fleet.agent("b").kill()
        times.append(fleet.until("round 1", lambda fleet=fleet: fleet.trains(1, 2)))  # type: ignore[misc]
    assert times[1] < times[0] + 0.05


def test_a_newcomer_is_reached_before_the_world_grows() -> None:
    fleet = a_training("a b", size=2, min=2, max=3, target=3, last_call_s=0.5, **GATE)
    part(fleet, "a", "b")  # of those that train already: it bars the next round, not this one
    fleet.advance(1.0)
    fleet.join("c", settings={"min": 2, "max": 3, "target": 3, "last_call_s": 0.5, **GATE})
    fleet.advance(5.0)
    assert fleet.trains(0, 2) and "a → b" in fleet.coordinator.protocol.at.reason
    join(fleet, "a", "b")
    fleet.until("the world grows", lambda: fleet.trains(1, 3), 3.0)


@pytest.mark.parametrize("keep_record", [True, False])
def test_a_coordinator_that_dies_while_the_mesh_converges_asks_again(keep_record: bool) -> None:
    fleet = a_world("a b", min=2, max=2, **GATE)
    part(fleet, "a", "b")
    fleet.advance(2.0)
    fleet.coordinator.crash(keep_record=keep_record)
    fleet.advance(0.5)
    fleet.restart()
    fleet.advance(2.0)
    assert fleet.run.round is None
    join(fleet, "a", "b")
    fleet.until("training", lambda: fleet.trains(0, 2), 5.0)


def test_a_new_coordinator_knows_how_the_mesh_was() -> None:
    fleet = a_world("a b", min=2, max=2, **GATE)
    part(fleet, "b", "a")
    fleet.until("training", lambda: fleet.trains(0, 2), 20)
    fleet.coordinator.crash()
    fleet.restart()
    fleet.until("recovered", lambda: fleet.trains(0, 2), 10)
    assert fleet.run.gate is not None and fleet.run.gate.named == "b → a (refused)"

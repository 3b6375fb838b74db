"""Builders for scenarios: a fleet that has joined, or one that already trains."""

from __future__ import annotations

from typing import Any

from muster.types.world import Role
from tests.simulator.fleet import SimulatedFleet


def a_world(names: str, *, seed: int = 1, collateral: float = 0.0, **settings: object) -> SimulatedFleet:
    """Everyone named joins at once, with the same settings."""
    fleet = SimulatedFleet(seed, collateral=collateral)
    fleet.join_all(*names.split(), settings=settings)
    return fleet


def a_training(names: str, *, size: int, **config: Any) -> SimulatedFleet:
    """The same, after round 0 has formed with that many workers."""
    fleet = a_world(names, **config)
    fleet.until("round 0 trains", lambda: fleet.trains(0, size))
    return fleet


def by_role(fleet: SimulatedFleet, role: Role) -> list[str]:
    return sorted(member.name for member in fleet.run.members.values() if member.role is role)


def codes(fleet: SimulatedFleet) -> dict[str, int | None]:
    return {agent.name: agent.code for agent in fleet.agents}


def everyone_leaves(fleet: SimulatedFleet, within_s: float = 10.0) -> float:
    return fleet.until("everyone is out", lambda: not fleet.present, within_s)


def told(fleet: SimulatedFleet, kind: str) -> list[str]:
    """The lines of that kind in the coordinator's story."""
    return [line.text for line in fleet.coordinator.protocol.at.story if line.kind == kind]

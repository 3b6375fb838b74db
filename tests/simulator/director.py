"""Whoever directs a run and lends its workers' GPUs: what it orders, and what it relies on.

It gives a GPU away when `lending.vacated` says so, and sees every rank that runs: none may run on a GPU that was given
away, whoever dies meanwhile, the coordinator with or without its record among them.
"""

from __future__ import annotations

from random import Random

from muster.core.world import lending
from muster.core.world.run import Run
from muster.types.world import Role
from tests.simulator.fleet import SimulatedFleet
from tests.simulator.invariants import Broken

NEWS_S = (0.0, 0.01, 0.3)  # after which a coordinator that came back hears again who is lent


class SimulatedDirector:
    def __init__(self, fleet: SimulatedFleet, rng: Random) -> None:
        self._fleet = fleet
        self._rng = rng
        self.lent: dict[str, str] = {}
        self.given: set[str] = set()  # whose GPUs somebody else has
        self._life = 0
        self._tells_at = 0.0
        self._check = fleet.clock.after_each
        fleet.clock.after_each = self._after_event

    @property
    def _run(self) -> Run | None:
        """As far as it can be seen now."""
        one = self._fleet.coordinator
        seen = one.alive and not one.process.stopped and one.leading is not None
        return one.leading.run if seen and one.leading is not None else None

    def lend(self, *names: str, target: int | None = None) -> None:
        self.lent |= {name: f"GPU of {name} is with p2" for name in names}
        self._order(target)

    def give_back(self, *names: str, target: int | None = None) -> None:
        """Whoever had the GPU is off it before the worker is told."""
        for name in names or tuple(self.lent):
            self.given.discard(name)
            self.lent.pop(name, None)
        self._order(target)

    def _order(self, target: int | None = None) -> None:
        if (run := self._run) is None or run.outcome is not None:
            return
        coordinator, wanted = self._fleet.coordinator, run.target if target is None else target
        self._fleet.say(f"--- the director: target {wanted}, lent: {' '.join(self.lent) or 'nobody'}")
        coordinator.protocol.orders.reconfigure(run.settings, wanted, self._fleet.clock.now, dict(self.lent))
        coordinator.settle_soon()

    # At random

    def lend_someone(self) -> None:
        """Never so many that too few are left; mostly with a target that fits."""
        run, rng = self._run, self._rng
        if run is None or run.outcome is not None or run.recovery_until is not None:
            return
        able = (Role.ACTIVE, Role.SPARE)
        here = sorted(one.name for one in run.members.values() if one.role in able and one.name not in self.lent)
        size = run.settings.segment or 1
        if len(here) - 1 < run.settings.min:
            return
        name = rng.choice(here)
        seated = run.round is not None and any(seat.name == name for seat in run.round.seats)
        lower = max(run.settings.min, run.target - size) if seated and rng.random() < 0.8 else run.target
        self.lend(name, target=lower)

    def give_someone_back(self) -> None:
        run = self._run
        if run is None or not self.lent:
            return
        raised = min(run.settings.max, run.target + (run.settings.segment or 1))
        self.give_back(self._rng.choice(sorted(self.lent)), target=raised if self._rng.random() < 0.8 else None)

    # After every event

    def _after_event(self) -> None:
        if self._check is not None:
            self._check()
        self._look_after_coordinator()
        run = self._run
        if run is not None and run.outcome is None:
            self.given |= {name for name in self.lent if lending.vacated(run, name, self._fleet.clock.now)}
        if self.given:
            self._demand_nobody_runs()

    def _look_after_coordinator(self) -> None:
        """What is lent is ordered again where another coordinator leads, or one that has heard otherwise."""
        run, now = self._run, self._fleet.clock.now
        if run is None or run.outcome is not None:
            return
        one = self._fleet.coordinator
        if one.lives != self._life:
            self._life = one.lives
            kept = one.saved is not None
            self._tells_at = now + (self._rng.choice(NEWS_S) if kept else 0.0)
        if run.lent != self.lent and now >= self._tells_at:
            self._order()

    def _demand_nobody_runs(self) -> None:
        for ranks in self._fleet.census.alive.values():
            for rank in ranks:
                name = self._fleet.name_of(rank.member_id)
                if name in self.given:
                    at = self._fleet.clock.now
                    raise Broken(
                        f"at {at:.4f} s: rank {rank.rank} of round {rank.round} runs on a GPU that {name} lent"
                    )

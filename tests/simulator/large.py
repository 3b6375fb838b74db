"""How do very many workers form, and form again without some of them?

The real decisions and frames of everybody, on virtual time. Where ten thousand are looked at after each of a million
events nothing ever ends, so promises are looked at with every decision and every few milliseconds of virtual time.
`bench.large` tells what it costs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.simulator.fleet import SimulatedFleet
from tests.simulator.worker import SimulatedWorker

LEASE_S = 2.0
SETTLE_S = 0.005  # so long a service takes to read what many have sent
LOOK_S = 0.02


@dataclass(frozen=True)
class Took:
    """Seconds on the clock of the simulation, and of a real core: for the coordinator, and for everybody together."""

    virtual_s: float
    coordinator_s: float
    all_s: float

    def __str__(self) -> str:
        cpu = f"{self.coordinator_s:.1f} s of a core for the coordinator, {self.all_s:.1f} s for all"
        return f"{self.virtual_s:.2f} s of virtual time, {cpu}"


class LargeFleet:
    """So many workers, and a hundredth of them as spares for each of two losses."""

    def __init__(self, workers: int, *, spent: Callable[[], float] = lambda: 0.0) -> None:
        """`spent` tells how long a core has worked for this process."""
        self.workers = workers
        self._spent = spent
        self.some = max(1, workers // 100)
        self.fleet = SimulatedFleet(1)
        self.fleet.clock.after_each = None
        coordinator = self.fleet.coordinator
        coordinator.settle_s = SETTLE_S
        self._coordinator_s = 0.0
        coordinator.hear = self._timed(coordinator.hear)  # type: ignore[method-assign]
        coordinator._settle = self._timed(coordinator._settle)  # type: ignore[method-assign]
        self._settings: dict[str, object] = {"min": workers, "max": workers, "spares": 2 * self.some, "max_restarts": 0}
        self._settings |= {"lease_s": LEASE_S, "last_call_s": 60.0}

    def form(self) -> Took:
        names = [f"w{index}" for index in range(self.workers + 2 * self.some)]
        return self._measured(0, lambda: self.fleet.join_all(*names, settings=self._settings))

    def lose_some(self, number: int, lose: Callable[[SimulatedWorker], None]) -> Took:
        """Spread over the world, in one instant; the time until the round after it trains."""
        active = [agent for agent in self.fleet.present if agent.round is not None and agent.round.running]
        lost = active[:: len(active) // self.some][: self.some]

        def strike() -> None:
            for agent in lost:
                lose(agent)

        return self._measured(number, strike)

    def _timed(self, call: Callable[..., None]) -> Callable[..., None]:
        def timed(*args: Any) -> None:
            began = self._spent()
            call(*args)
            self._coordinator_s += self._spent() - began

        return timed

    def _measured(self, number: int, act: Callable[[], object]) -> Took:
        began, cpu, mine = self.fleet.clock.now, self._spent(), self._coordinator_s
        act()
        self.until_trains(number)
        return Took(self.fleet.clock.now - began, self._coordinator_s - mine, self._spent() - cpu)

    def until_trains(self, number: int, within_s: float = 60.0) -> None:
        until = self.fleet.clock.now + within_s
        while not self.fleet.trains(number, self.workers):
            assert self.fleet.clock.now < until, self.fleet.coordinator.protocol.at.reason
            self.fleet.advance(LOOK_S)
            self.fleet.checker.after_event()

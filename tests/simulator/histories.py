"""One random history: a run with random settings, some faults, then calm; it must go on or end, and end well.

Everything follows from the seed.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random

from muster.core.world import notices, sizes
from muster.types.world import OutcomeState, Settings
from tests.simulator import faults
from tests.simulator.director import SimulatedDirector
from tests.simulator.fleet import SimulatedFleet
from tests.simulator.invariants import Broken
from tests.simulator.processes import WorkerConfig
from tests.simulator.worker import SimulatedWorker

FAULTS_UNTIL_S = 3.5


@dataclass(frozen=True)
class Ending:
    """What came of a history."""

    state: OutcomeState | None
    rounds: int
    events: int
    seconds: float


def a_setting(rng: Random) -> Settings:
    segment = rng.choice((None, None, None, None, 2))
    least = rng.randint(1, 3) if segment is None else segment * rng.randint(1, 2)
    most = least + (segment or 1) * rng.randint(0, 2)
    spares = rng.randint(0, 2)
    target = rng.randrange(least, most + 1, segment or 1) if segment or rng.random() < 0.5 else None
    return Settings(
        min=least,
        max=most,
        target=target,
        spares=spares,
        segment=segment,
        max_restarts=rng.choice((0, 1, 3)),
        last_call_s=rng.choice((0.3, 1.0)),
        lease_s=rng.choice((1.0, 1.5, 3.0)),
        below_min_timeout_s=8.0,
        recovery_s=rng.choice((1.0, 3.0)),
        stop_grace_s=rng.choice((0.5, 3.0)),
        farewell_s=6.0,
        hang_timeout_s=rng.choice((None, None, None, 4.0)),
        no_progress_rounds=rng.choice((None, None, None, None, 3)),
    )


def _now(call: Callable[[], None]) -> None:
    call()


def _worker(rng: Random, index: int, settings: Settings, given: dict[str, object]) -> WorkerConfig:
    return WorkerConfig(
        name=f"w{index}",
        settings=given,
        procs=1 if settings.segment or rng.random() < 0.8 else 2,
        infra_rank=index if settings.min % 2 else None,
        domain=f"d{index % 2}" if settings.segment or rng.random() < 0.2 else None,
        checks_health=settings.spares == 2,
        stubborn=rng.random() < 0.2,
        term_s=rng.uniform(0.002, 0.15),
        restart_s=rng.choice((0.02, 0.02, 0.8)),
        relayed=(index + settings.max) % 4 == 0,
        takes_notice=(index + settings.max) % 5 != 0,
        asks=settings.max_restarts == 1,
    )


class History:
    def __init__(self, seed: int, tell: Callable[[str], None] | None = None) -> None:
        self.seed = seed
        self._rng = Random(seed)
        self._mesh = Random(seed ^ 0x6A7E)
        self._lifelines = Random(seed ^ 0x11FE)
        self.settings = replace(a_setting(self._rng), gate_timeout_s=self._mesh.choice((None, None, 0.5, 2.0)))
        self.fleet = SimulatedFleet(seed ^ 0x5EED, collateral=self._rng.choice((0.0, 0.7)), tell=tell)
        self._lending = Random(seed ^ 0x1E4D)
        self.director = SimulatedDirector(self.fleet, self._lending)
        self._calm = False
        self._to_bid_farewell: list[SimulatedWorker] = []
        self._given: dict[str, object] = {
            name: value for name, value in vars(self.settings).items() if value is not None
        }

    def play(self) -> Ending:
        """Raises Broken where a promise is not kept."""
        fleet, rng = self.fleet, self._rng
        fleet.say(f"seed {self.seed}: {self.settings}")
        wanted = self.settings.first_target + self.settings.spares
        for index in range(max(1, wanted + rng.randint(-1, 1))):
            config = _worker(rng, index, self.settings, self._given)
            fleet.expected += 1
            fleet.clock.after(rng.uniform(0.0, 0.5), self._join, config)
        at = rng.uniform(0.05, 0.7 * FAULTS_UNTIL_S)
        for fault in faults.draw(rng, rng.randint(1, 5)):
            fleet.clock.at(at, self._befall if rng.random() < 0.6 else self._befall_at_turn, fault)
            at = rng.uniform(at, at + 0.6) if rng.random() < 0.5 else rng.uniform(0.05, FAULTS_UNTIL_S)
        for _ in range(self._mesh.randint(0, 3) if self.settings.gate_timeout_s is not None else 0):
            fleet.clock.at(self._mesh.uniform(0.0, FAULTS_UNTIL_S), self._part)
        for _ in range(self._lifelines.choice((0, 0, 1, 2))):
            at, fault = self._lifelines.uniform(0.05, FAULTS_UNTIL_S), self._lifelines.choice(faults.OF_LIFELINES)
            fleet.clock.at(at, self._befall, fault, self._lifelines)
        self._plan_to_lend()
        fleet.advance(FAULTS_UNTIL_S + 0.01)
        self._calm_down()
        fleet.until("training or an outcome", self._decided, self._patience_s)
        self._finish()
        return self._look_back()

    def _join(self, config: WorkerConfig) -> None:
        self.fleet.say(f"{config.name} starts")
        self.fleet.expected -= 1
        values = {name: value for name, value in vars(config).items() if name != "name"}
        self.fleet.join(config.name, **values)

    def _part(self) -> None:
        """One worker does not reach another for a while."""
        names = sorted({agent.machine.name for agent in self.fleet.agents})
        if len(names) > 1:
            source, target = self._mesh.sample(names, 2)
            self.fleet.say(f"--- {source} does not reach {target}")
            self.fleet.network.part(source, target)
            self.fleet.clock.after(self._mesh.uniform(0.2, 4.0), self.fleet.network.join, source, target)

    def _plan_to_lend(self) -> None:
        """GPUs go to somebody else and come back."""
        rng, director = self._lending, self.director
        for _ in range(rng.choice((0, 0, 2, 4, 7))):
            order = director.lend_someone if rng.random() < 0.6 else director.give_someone_back
            at_turn = rng.random() < 0.4
            self.fleet.clock.at(rng.uniform(0.1, FAULTS_UNTIL_S), self.fleet.at_turn if at_turn else _now, order)

    def _befall_at_turn(self, fault: faults.Fault) -> None:
        self.fleet.at_turn(lambda: self._befall(fault))

    def _befall(self, fault: faults.Fault, rng: Random | None = None) -> None:
        if not self.fleet.agents or self._calm or self.fleet.clock.now < self.fleet.calm_until:
            return
        self.fleet.say(f"--- {fault.__name__}")
        told = fault(self.fleet, rng or self._rng)
        self.fleet.say(f"--- {told or 'nothing'}")

    def _calm_down(self) -> None:
        """No more faults. Where too few are left, others may come."""
        fleet = self.fleet
        fleet.say("=== calm")
        self._calm = True
        fleet.coordinator.crash_mid_send = None
        fleet.coordinator.process.go_on()
        fleet.restart()
        for agent in fleet.agents:
            fleet.heal(agent)
            agent.process.go_on()
            agent.healthy = True
        if self._lending.random() < 0.7:
            self.director.give_back()
        self._to_bid_farewell = fleet.present if fleet.outcome is None else []
        short = self.settings.min - len(fleet.present)
        if short > 0 and self._rng.random() < 0.6:
            for _ in range(short):
                faults.newcomer(fleet, self._rng)

    def _decided(self) -> bool:
        fleet = self.fleet
        return (fleet.trains() and not self._lent_train()) or fleet.outcome is not None or self._nothing_left()

    def _lent_train(self) -> bool:
        current = self.fleet.run.running
        return current is not None and any(seat.name in self.director.lent for seat in current.seats)

    def _nothing_left(self) -> bool:
        """A coordinator that never heard of the run, and nobody to tell it."""
        return self.fleet.coordinator.protocol.run is None and not self.fleet.present

    @property
    def _patience_s(self) -> float:
        """Every wait that the settings allow, one after the other, and the agents' own timeouts."""
        one = self.settings
        fence = one.lease_s + one.kill_margin_s
        waits = max(one.recovery_s, fence) + 3 * (fence + one.last_call_s) + one.stop_grace_s + one.below_min_timeout_s
        waits += (
            sizes.back_s(one) + notices.HOLD_S + one.stop_grace_s
        )  # a size that is taken back, and ranks that are told
        return waits + 10.0 + 3 * (one.gate_timeout_s or 0.0) + (35.0 if one.spares == 2 else 0.0)

    def _finish(self) -> None:
        fleet, rng = self.fleet, self._rng
        if self._nothing_left():
            return
        if fleet.outcome is None:
            fleet.say("=== the work is done")
            fleet.finish_work()
            if rng.random() < 0.1:
                fleet.clock.after(rng.uniform(0.0, 0.3), self._cancel)
        fleet.until("an outcome", lambda: fleet.outcome, self._patience_s)
        fleet.until("everyone is out", lambda: not fleet.present, self._patience_s)

    def _cancel(self) -> None:
        if self.fleet.coordinator.alive:
            self.fleet.cancel()

    def _look_back(self) -> Ending:
        fleet = self.fleet
        outcome = fleet.outcome
        for agent in fleet.agents:
            if agent.code is None or agent.leaving or agent.refusal:
                continue
            fine = agent.code == 0 or (outcome is not None and outcome.state is not OutcomeState.SUCCEEDED)
            if not fine:
                raise Broken(f"{agent.name} ended with {agent.code}, the outcome is {outcome}")
        for agent in self._to_bid_farewell:
            killed = agent.code is None
            if agent.outcome is not None and not (agent.state.farewell or agent.leaving or killed):
                raise Broken(f"{agent.name} has the outcome, and nobody bade it farewell")
        if any(fleet.census.alive.values()):
            raise Broken("ranks outlive their agents")
        rounds = fleet.run.next_round if fleet.coordinator.protocol.run is not None else 0
        return Ending(outcome.state if outcome else None, rounds, fleet.clock.events, fleet.clock.now)


def play(seed: int, tell: Callable[[str], None] | None = None) -> Ending:
    return History(seed, tell).play()


def story(seed: int, play: Callable[[int, Callable[[str], None]], object] = play) -> str:
    """The same history once more, told line by line, with what became of it."""
    lines: list[str] = []
    try:
        lines.append(f"ended: {play(seed, lines.append)}")
    except Exception:  # noqa: BLE001 - the story of a broken history ends with what broke it, whatever it is
        lines.append(traceback.format_exc())
    return "\n".join(lines)

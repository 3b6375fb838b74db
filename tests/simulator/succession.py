"""A world whose coordinator may be lost: what befalls it, and what must hold whoever leads.

One random history follows from its seed: machines lose their power, processes are killed or stand still, the network
falls apart, clocks run fast and slow. Afterwards there is calm, and where enough electors are left the run must go on.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any

from muster.core.succession import electorate
from muster.core.succession.leadership import DRIFT
from muster.core.world.run import Decision, Run
from muster.types.frames import OutcomeFrame, ReleaseFrame, RunRecord
from muster.types.world import OutcomeState, Seat, Settings
from tests.simulator import faults
from tests.simulator.clock import VirtualClock
from tests.simulator.coordinator import SimulatedCoordinator
from tests.simulator.fleet import SimulatedFleet
from tests.simulator.invariants import Broken, Checker
from tests.simulator.machine import SimulatedRank
from tests.simulator.network import BOTH, COORDINATOR, DOWN, UP, frame_of
from tests.simulator.worker import SimulatedWorker

FAULTS_UNTIL_S = 8.0


class DriftingClock(VirtualClock):
    """A machine's own: it runs faster or slower than the true one."""

    def __init__(self, true: VirtualClock, rate: float) -> None:
        self._true = true
        self._rate = rate

    @property
    def now(self) -> float:  # type: ignore[override]
        return self._true.now * self._rate

    def at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        self._true.at(when / self._rate, call, *args)

    def after(self, delay_s: float, call: Callable[..., None], *args: Any) -> None:
        self._true.after(delay_s / self._rate, call, *args)


class _Everything(set[int]):
    def __contains__(self, one: object) -> bool:
        return True


class SuccessionChecker(Checker):
    """What is said counts, by whomever: a decision that no elector has kept was never made."""

    def __init__(self, fleet: SuccessionFleet) -> None:
        super().__init__(fleet.clock, fleet.census, fleet.first)
        self._fleet = fleet
        self._term = 0  # the last in which something was said
        self._seats: dict[int, tuple[Seat, ...]] = {}
        self.chargeable = _Everything()  # who is to blame while coordinators come and go is not judged here
        self.terms: set[int] = set()

    def watch(self, coordinator: SimulatedCoordinator) -> None:
        super().watch(coordinator)
        coordinator.on_said = self._said

        def decided(before: Run, decision: Decision, after: Run) -> None:
            self._clock = coordinator.process.clock
            self.decided(before, decision, after)
            self._clock = self._fleet.clock

        coordinator.on_decision = decided

    def _said(self, coordinator: SimulatedCoordinator, data: bytes) -> None:
        if coordinator.post is None:
            return  # to a guard whose agent has not come yet
        assert coordinator.post.state.leadership is not None
        term = coordinator.post.state.leadership.term
        self._demand(term >= self._term, f"{coordinator.machine} speaks in term {term} after term {self._term}")
        self._term = term
        self.terms.add(term)
        match frame_of(data):
            case ReleaseFrame(record=record):
                seats = self._seats.setdefault(record.round, record.seats)
                self._demand(seats == record.seats, f"round {record.round} was released with other seats")
            case OutcomeFrame(outcome=outcome):
                self._same_outcome(outcome)

    def after_event(self) -> None:
        """What a coordinator holds that may not speak is not looked at."""

    def saved(self, record: RunRecord) -> None:
        """Nor what it writes down."""

    def decided(self, before: Run, decision: Decision, after: Run) -> None:
        self._highest, self._decisions = -1, 0
        super().decided(before, decision, after)

    def lease_renewed(self, agent: SimulatedWorker) -> None:
        """Clocks differ."""

    def ranks_stopped(self, agent: SimulatedWorker) -> None:
        """The death of a coordinator whom others may replace does not keep ranks alive."""

    def _counts_as_gone(self, rank: SimulatedRank) -> bool:
        self._coordinator = self._fleet.coordinator
        if self._coordinator.leading is None or self._coordinator.post is None:
            return False
        sure = self._coordinator.post.state.may_speak(self._coordinator.process.clock.now)
        return sure and self._gone_by(self._coordinator, rank)

    def _gone_by(self, leader: SimulatedCoordinator, rank: SimulatedRank) -> bool:
        run = leader.protocol.run
        if run is None or run.round is None or run.recovery_until is not None:
            return False
        if run.round.number == rank.round:
            fenced = run.round.fences.get(rank.member_id, math.inf) <= leader.process.clock.now
            return fenced or rank.member_id in run.round.gone
        return run.round.number > rank.round and not self._fleet.coordinator.protocol.at.unsaved


class SuccessionFleet(SimulatedFleet):
    def __init__(self, seed: int, *, drift: float = 0.0, tell: Callable[[str], None] | None = None) -> None:
        self._drift = Random(seed ^ 0xD71F7)
        self._most = drift
        self._clocks: dict[str, VirtualClock] = {}
        self.off: set[str] = set()  # machines without power
        super().__init__(seed, tell=tell, succession=True)

    def make_checker(self) -> Checker:
        return SuccessionChecker(self)

    def clock_of(self, machine: str) -> VirtualClock:
        if machine not in self._clocks:
            rate = 1.0 + self._drift.uniform(-self._most, self._most)
            self._clocks[machine] = DriftingClock(self.clock, rate) if self._most else self.clock
        return self._clocks[machine]

    def _agent_ended(self, agent: SimulatedWorker) -> None:
        super()._agent_ended(agent)
        if agent.machine.name == COORDINATOR and self.network.is_off(COORDINATOR):
            self.off.add(COORDINATOR)
            if self.first.alive:
                self.first.power_off()

    # What befalls the coordinator, wherever it is

    def _host(self, coordinator: SimulatedCoordinator) -> SimulatedWorker | None:
        return next((agent for agent in self.agents if agent.standby is coordinator), None)

    def lose_leader(self, *, silently: bool) -> str:
        """Its whole machine, with whatever else is there."""
        leader = self.coordinator
        host = self._host(leader)
        if host is None:
            host = next((one for one in self.present if one.member_id == leader.beside), None)
            if silently:
                self.off.add(COORDINATOR)
                self.network.power_off(COORDINATOR)
                leader.power_off()
            elif leader.alive:
                leader.crash()
        if host is not None:
            self.off.add(host.machine.name)
            host.power_off() if silently else host.kill_worker()
        return f"the machine of {leader.machine} is {'off' if silently else 'killed'}"

    def crash_leader(self, back_after_s: float) -> str:
        leader = self.coordinator
        host = self._host(leader)
        if host is not None:
            host.kill()
        elif leader.alive:
            leader.crash()
            self.clock.after(back_after_s, self.revive)
        return f"the process of {leader.machine} dies"

    def revive(self) -> None:
        """Whoever started it starts it again, on the same machine and with what it kept."""
        if not self.first.alive and COORDINATOR not in self.off:
            self.first.start()

    def pause_leader(self, for_s: float) -> str:
        leader = self.coordinator
        leader.process.stop()
        self.clock.after(for_s, leader.process.go_on)
        return f"SIGSTOP to {leader.machine} for {for_s:.2f} s"

    def cut_leader(self, for_s: float, directions: frozenset[str]) -> str:
        machine = self.coordinator.machine
        self.network.cut(machine, directions)
        self.clock.after(for_s, self.network.heal, machine)
        return f"{machine} is cut off ({', '.join(sorted(directions))}) for {for_s:.2f} s"

    def fall_apart(self, for_s: float, rng: Random) -> str:
        """Two parts that do not reach each other."""
        machines = sorted({one.machine for one in self.network.listeners.values()})
        part = rng.sample(machines, rng.randint(1, len(machines)))
        rest = [one for one in machines if one not in part]
        pairs = [(one, other) for one in part for other in rest] + [(other, one) for one in part for other in rest]
        for pair in pairs:
            self.network.part(*pair)
        self.clock.after(for_s, self._come_together, pairs)
        return f"{', '.join(part)} do not reach {', '.join(rest)} for {for_s:.2f} s"

    def fall_out(self, for_s: float, rng: Random) -> str:
        """The one that leads and another do not reach each other, and all the rest do."""
        leader = self.coordinator.machine
        others = sorted({one.machine for one in self.network.listeners.values()} - {leader})
        if not others:
            return "nobody else is there"
        far = rng.sample(others, min(len(others), rng.randint(1, 2)))
        pairs = [pair for one in far for pair in ((one, leader), (leader, one))]
        for pair in pairs:
            self.network.part(*pair)
        self.clock.after(for_s, self._come_together, pairs)
        return f"{leader} and {', '.join(far)} do not reach each other for {for_s:.2f} s"

    def lose_frames(self) -> str:
        """What the one that leads, or wants to, said last or would be answered."""
        for one in list(self.network.listeners.values()):
            if one.alive and one.post is not None:
                one.post.break_off()
        return "all connections between posts end"

    def repeat_frames(self, for_s: float) -> str:
        self.network.repeats_until = self.clock.now + for_s
        return f"what posts say comes again for {for_s:.2f} s"

    def _come_together(self, pairs: list[tuple[str, str]]) -> None:
        for pair in pairs:
            self.network.join(*pair)

    # Looking

    def can_go_on(self) -> bool:
        """Whether enough electors of the newest record are left."""
        kept = [
            (one.post.state.ballot.record, one)
            for one in self.network.listeners.values()
            if one.alive and one.post is not None and one.post.state.ballot.record is not None
        ]
        if not kept:
            return False
        newest = max((record for record, _ in kept), key=lambda one: (one.electorate.term, one.revision))
        alive = {one.post.state.me.member_id for _, one in kept if one.post is not None}
        return electorate.is_enough(newest.electorate.groups, alive)


class SuccessionHistory:
    def __init__(self, seed: int, tell: Callable[[str], None] | None = None) -> None:
        self._rng = rng = Random(seed)
        least = rng.randint(1, 3)
        self.settings = Settings(
            min=least,
            max=least + rng.randint(0, 2),
            spares=rng.randint(0, 2),
            max_restarts=10,
            last_call_s=0.3,
            lease_s=rng.choice((1.0, 1.0, 2.0)),
            kill_margin_s=0.5,
            below_min_timeout_s=20.0,
            recovery_s=rng.choice((1.0, 3.0)),
            stop_grace_s=0.5,
            farewell_s=4.0,
        )
        drift = rng.choice((0.0, DRIFT / 2.2))
        self.fleet = SuccessionFleet(seed ^ 0x5EED, drift=drift, tell=tell)
        self._given = {name: value for name, value in vars(self.settings).items() if value is not None}

    def play(self) -> str:
        fleet, rng = self.fleet, self._rng
        fleet.say(f"{self.settings}")
        count = max(2, self.settings.first_target + self.settings.spares + rng.randint(0, 2))
        for index in range(count):
            fleet.clock.after(rng.uniform(0.0, 0.5), self._join, index)
        for _ in range(rng.randint(1, 6)):
            at = rng.uniform(0.3, FAULTS_UNTIL_S)
            fleet.clock.at(at, self._befall if rng.random() < 0.6 else self._befall_at_turn)
        fleet.advance(FAULTS_UNTIL_S + 0.01)
        return self._come_to_rest()

    def _join(self, index: int) -> None:
        machine = COORDINATOR if index == 0 and self._rng.random() < 0.7 else None
        made = self.fleet.join(f"w{index}", machine=machine, settings=self._given, term_s=self._rng.uniform(0.002, 0.1))
        if machine is not None:
            self.fleet.first.beside = made.member_id

    def _befall_at_turn(self) -> None:
        self.fleet.at_turn(self._befall)

    def _befall(self) -> None:
        fleet, rng = self.fleet, self._rng
        lease = self.settings.lease_s
        what: list[tuple[int, Callable[[], str | None]]] = [
            (4, lambda: fleet.lose_leader(silently=True)),
            (4, lambda: fleet.lose_leader(silently=False)),
            (6, lambda: fleet.crash_leader(rng.choice((0.0, 0.3, 1.0, 4.0)))),
            (6, lambda: fleet.pause_leader(lease * rng.uniform(0.1, 4.0))),
            (
                5,
                lambda: fleet.cut_leader(lease * rng.uniform(0.1, 4.0), rng.choice(_WAYS)),
            ),
            (6, lambda: fleet.fall_apart(lease * rng.uniform(0.2, 4.0), rng)),
            (6, lambda: fleet.fall_out(lease * rng.uniform(0.5, 4.0), rng)),
            (3, fleet.lose_frames),
            (5, lambda: fleet.repeat_frames(lease * rng.uniform(1.0, 4.0))),
            *((1, lambda one=one: one(fleet, rng)) for one in _OTHERS),
        ]
        if not fleet.present:
            return
        weights = [weight for weight, _ in what]
        fleet.say(f"--- {rng.choices([call for _, call in what], weights)[0]()}")

    def _come_to_rest(self) -> str:
        fleet = self.fleet
        fleet.say("=== calm")
        for one in list(fleet.network.listeners.values()):
            fleet.network.heal(one.machine)
            one.process.go_on()
        for agent in fleet.agents:
            fleet.heal(agent)
            agent.process.go_on()
        machines = {one.machine for one in fleet.network.listeners.values()}
        for pair in [(one, other) for one in machines for other in machines]:
            fleet.network.join(*pair)
        fleet.revive()
        short = self.settings.min - len(fleet.present)
        for _ in range(short):
            faults.newcomer(fleet, self._rng)
        try:
            fleet.until("training or an outcome", self._is_decided, 60.0)
        except AssertionError:
            if fleet.can_go_on() and fleet.present:
                raise
            return "stranded"
        fleet.finish_work()
        fleet.until("everyone is out", lambda: not fleet.present or not fleet.can_go_on(), 60.0)
        return self._look_back()

    def _is_decided(self) -> bool:
        return self.fleet.trains() or self.fleet.outcome is not None or not self.fleet.present

    def _look_back(self) -> str:
        told = {agent.outcome.state for agent in self.fleet.agents if agent.outcome is not None}
        if len(told) > 1:
            raise Broken(f"members were told {sorted(told)}")
        for agent in self.fleet.agents:
            if agent.code is not None and agent.outcome is not None and not agent.leaving and not agent.refusal:
                fine = agent.code == 0 or agent.outcome.state is not OutcomeState.SUCCEEDED
                if not fine:
                    raise Broken(f"{agent.name} ended with {agent.code}, the outcome is {agent.outcome}")
        checker = self.fleet.checker
        assert isinstance(checker, SuccessionChecker)
        return f"{next(iter(told), 'nothing')} after {len(checker.terms)} terms"


_WAYS = (BOTH, frozenset({UP}), frozenset({DOWN}))
_OTHERS = (
    faults.kill_agent,
    faults.kill_guard,
    faults.kill_both,
    faults.kill_worker,
    faults.power_off,
    faults.stop_agent,
    faults.leave,
    faults.cut_off,
    faults.reset,
    faults.fail_rank,
    faults.finish_early,
    faults.set_target,
    faults.newcomer,
)


def play(seed: int, tell: Callable[[str], None] | None = None) -> str:
    return SuccessionHistory(seed, tell).play()

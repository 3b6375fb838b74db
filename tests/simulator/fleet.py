"""A whole world on virtual time: one coordinator, its members, the network between them, and what may befall them.

Scenarios and random histories both drive this. Every method is a thing that can happen to real machines.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any

from muster.core.world.run import Run
from muster.types.frames import AskFrame, Frame
from muster.types.run_event import Kind, RunEvent
from muster.types.world import MemberId, RunOutcome, Settings
from tests.simulator.clock import VirtualClock
from tests.simulator.coordinator import SimulatedCoordinator
from tests.simulator.invariants import Checker
from tests.simulator.machine import Census, Machine, SimulatedRank
from tests.simulator.network import BOTH, COORDINATOR, Network
from tests.simulator.processes import WorkerConfig
from tests.simulator.worker import SimulatedWorker

TURNS = frozenset({Kind.RELEASE, Kind.RECALL, Kind.RECOVERED, Kind.LOST})
MOMENTS_S = (0.0, 0.001, 0.003, 0.01, 0.05, 0.2)


class SimulatedFleet:
    def __init__(
        self,
        seed: int = 0,
        *,
        collateral: float = 0.0,
        settings: Settings | None = None,
        tell: Callable[[str], None] | None = None,
        succession: bool = False,
    ) -> None:
        self.rng = Random(seed)
        self.clock = VirtualClock()
        self.network = Network(self.clock, self.rng)
        self.census = Census()
        self.first = SimulatedCoordinator(self.clock_of(COORDINATOR), self.network, settings, succession=succession)
        self.checker = self.make_checker()
        self.agents: list[SimulatedWorker] = []
        self.collateral = collateral  # how likely a rank fails when a peer's rank ends
        self.work_done = False
        self.calm_until = 0.0
        self.expected = 0  # members that have yet to start
        self.last_hit: SimulatedWorker | None = None
        self._tell = tell
        self._doomed: set[SimulatedRank] = set()
        self._cut_at: dict[SimulatedWorker, float] = {}
        self._by_id: dict[MemberId, SimulatedWorker] = {}
        self.checker.on_event = self._event
        self.checker.watch(self.first)
        self.clock.after_each = self.checker.after_event
        self._at_turn: list[Callable[[], None]] = []
        self.given = [self.first]

    def make_checker(self) -> Checker:
        return Checker(self.clock, self.census, self.first)

    def _event(self, event: RunEvent) -> None:
        if self._tell is not None:
            self.say(f"coordinator: {event.kind}: {event.text}")
        if self._at_turn and event.kind in TURNS:
            waiting, self._at_turn = self._at_turn, []
            for call in waiting:
                self.clock.after(self.rng.choice(MOMENTS_S), call)

    def at_turn(self, call: Callable[[], None]) -> None:
        """Shortly after the next round is formed or called back: most mistakes are made while things change."""
        self._at_turn.append(call)

    def say(self, text: str) -> None:
        if self._tell is not None:
            self._tell(f"{self.clock.now:9.4f}  {text}")

    # Time

    def clock_of(self, machine: str) -> VirtualClock:
        return self.clock

    def advance(self, seconds: float) -> None:
        self.clock.run(self.clock.now + seconds)

    def until(self, what: str, seen: Callable[[], object], within_s: float = 60.0) -> float:
        """How long it took; an AssertionError if it took too long."""
        began = self.clock.now
        if not self.clock.run(began + within_s, lambda: bool(seen())):
            raise AssertionError(
                f"not in {within_s:g} s: {what}; the coordinator says: "
                f"{leading.at.reason if (leading := self.coordinator.leading) else 'nobody leads'}"
            )
        return self.clock.now - began

    # Looking

    @property
    def coordinator(self) -> SimulatedCoordinator:
        """The one that leads; if none does, the one that was there first."""
        elected = {
            one.post.state.leadership.term: one
            for one in self.network.listeners.values()
            if one.alive and one.leading is not None and one.post is not None and one.post.state.leadership is not None
        }
        return elected[max(elected)] if elected else self.first

    @property
    def run(self) -> Run:
        assert self.coordinator.protocol.run is not None
        return self.coordinator.protocol.run

    @property
    def lease_s(self) -> float:
        leading = self.coordinator.leading
        return Settings().lease_s if leading is None or leading.run is None else leading.run.settings.lease_s

    @property
    def outcome(self) -> RunOutcome | None:
        leading = self.coordinator.leading
        return leading.run.outcome if leading is not None and leading.run is not None else None

    @property
    def present(self) -> list[SimulatedWorker]:
        return [agent for agent in self.agents if agent.alive]

    def agent(self, name: str) -> SimulatedWorker:
        """The newest of that name."""
        return next(agent for agent in reversed(self.agents) if agent.name == name)

    def name_of(self, member_id: MemberId) -> str:
        return self._by_id[member_id].name

    @property
    def seats(self) -> list[str]:
        """Names by rank, in the last round that the coordinator formed."""
        return [seat.name for seat in self.run.round.seats] if self.run.round else []

    def trains(self, number: int | None = None, size: int | None = None) -> bool:
        """A round is out, and every seat of it really runs."""
        leading = self.coordinator.leading
        run = leading.run if leading is not None else None
        if not self.coordinator.alive or run is None or run.running is None or run.recovery_until is not None:
            return False
        current = run.running
        if (number is not None and current.number != number) or (size is not None and current.world_size != size):
            return False
        return all(
            seat.member_id in current.finished or self._runs(seat.member_id, current.number) for seat in current.seats
        )

    def _runs(self, member_id: MemberId, number: int) -> bool:
        agent = self._by_id[member_id]
        known = agent.alive and not agent.process.stopped and agent.connection.up and agent.round is not None
        return known and agent.round is not None and agent.round.number == number and agent.round.running

    # Members

    def join(self, name: str, *, machine: str | None = None, healthy: bool = True, **config: Any) -> SimulatedWorker:
        where = machine or f"{name}.{len(self.agents)}"
        host = Machine(where, self.clock_of(where), self.census, self)
        member_id = MemberId(f"m{len(self.agents)}")
        made = SimulatedWorker(
            WorkerConfig(name, **config),
            member_id,
            host,
            self.network,
            self.given,
            self.rng,
            self.checker,
            on_end=self._agent_ended,
        )
        made.healthy = healthy
        self.agents.append(made)
        self._by_id[member_id] = made
        made.start()
        return made

    def join_all(self, *names: str, **config: Any) -> list[SimulatedWorker]:
        return [self.join(name, **config) for name in names]

    def _agent_ended(self, agent: SimulatedWorker) -> None:
        self.checker.agent_ended(agent)
        self.say(f"{agent.name} ({agent.member_id}) ended with {'a kill' if agent.code is None else agent.code}")

    # What ranks do

    def rank_started(self, rank: SimulatedRank) -> None:
        self.checker.rank_started(rank)
        if self.work_done:
            self.clock.after(self.rng.uniform(0.02, 0.3), rank.machine.end, rank, 0)

    def rank_ended(self, rank: SimulatedRank, status: int) -> None:
        self._by_id[rank.member_id].rank_ended(rank, status)
        if status != 0:
            self._upset_peers(rank.round)

    def _upset_peers(self, number: int) -> None:
        """Peers of a rank that is gone fail in their collectives a moment later."""
        if not self.collateral:
            return
        for peer in sorted(self.census.alive.get(number, ()), key=lambda one: one.rank):
            if peer not in self._doomed and not peer.called_off and self.rng.random() < self.collateral:
                self._doomed.add(peer)
                self.clock.after(self.rng.uniform(0.01, 0.25), self._fail_too, peer)

    def _fail_too(self, rank: SimulatedRank) -> None:
        if rank.alive and not rank.called_off:
            self.say(f"rank {rank.rank} of round {rank.round} fails because a peer is gone")
            rank.machine.end(rank, 1)

    def fail_rank(self, rank: SimulatedRank, status: int = 1) -> None:
        """Its own fault."""
        if rank.alive:
            self.checker.chargeable.add(rank.round)
            rank.machine.end(rank, status)

    def fail(self, name: str, status: int = 1) -> None:
        self.fail_rank(self.agent(name).machine.ranks[0], status)

    def hang(self, name: str) -> None:
        for rank in self.agent(name).machine.ranks:
            self.checker.chargeable.add(rank.round)
            rank.hung_at = self.clock.now
            for peer in self.census.alive[rank.round]:
                if peer.hung_at is None:
                    peer.hung_at, peer.waiting = self.clock.now, True

    def finish(self, agent: SimulatedWorker) -> None:
        for rank in list(agent.machine.ranks):
            agent.machine.end(rank, 0)

    def finish_work(self) -> None:
        """From now on every rank ends well, soon after it starts."""
        self.work_done = True
        for ranks in list(self.census.alive.values()):
            for rank in sorted(ranks, key=lambda one: one.rank):
                self.clock.after(self.rng.uniform(0.02, 0.3), rank.machine.end, rank, 0)

    # What befalls machines and processes

    def excuse(self, agent: SimulatedWorker) -> None:
        """What follows may end its ranks without a loss being seen: a restart may be charged for it."""
        known = {agent.round.number} if agent.round is not None else set()
        if (leading := self.coordinator.leading) is not None and leading.run is not None:
            known |= {leading.run.next_round - 1, leading.run.next_round}
        self.checker.chargeable |= known

    def stop(self, agent: SimulatedWorker, for_s: float = math.inf) -> None:
        """SIGSTOP; the guard and the ranks go on."""
        self.excuse(agent)
        agent.process.stop()
        if for_s < math.inf:
            self.clock.after(for_s, agent.process.go_on)

    def cut(self, agent: SimulatedWorker, for_s: float = math.inf, directions: frozenset[str] = BOTH) -> None:
        """Neither the agent nor its guard is reached; ranks of others lose this peer too."""
        self._cut_at[agent] = self.clock.now
        self.network.cut(agent.machine.name, directions)
        if agent.machine.ranks:
            self._upset_peers(agent.machine.ranks[0].round)
        if directions != BOTH:
            self.excuse(agent)
        if for_s < math.inf:
            self.clock.after(for_s, self.heal, agent)

    def heal(self, agent: SimulatedWorker) -> None:
        """A cut that is shorter than a lease is no loss; if peers failed over it, that is a failure like any other."""
        began = self._cut_at.pop(agent, None)
        if began is not None and self.clock.now - began < 1.5 * self.lease_s:
            self.excuse(agent)
        self.network.heal(agent.machine.name)

    # What befalls the coordinator

    def crash(self, *, keep_record: bool = True, lose_sent: bool = False, back_after_s: float = math.inf) -> None:
        if self.coordinator.alive:
            self.coordinator.crash(keep_record=keep_record, lose_sent=lose_sent)
        if not keep_record:
            self.coordinator.saved = None
        if back_after_s < math.inf:
            self.clock.after(back_after_s, self.restart)

    def pause(self, for_s: float) -> None:
        """SIGSTOP to it. What a member sent before its death is then heard after it, so blame may go wrong."""
        for agent in self.present:
            self.excuse(agent)
        self.coordinator.process.stop()
        self.clock.after(for_s, self.coordinator.process.go_on)

    def restart(self) -> None:
        if not self.coordinator.alive:
            if self.coordinator.saved is None:
                self.checker.forget(self.known_round())
            self.coordinator.start()
            self.say("the coordinator is back")

    def leave_alone(self, for_s: float) -> None:
        """No random fault until then."""
        self.calm_until = self.clock.now + for_s

    def can_present(self) -> bool:
        """Can the last round be learnt from members alone: by whoever comes back first, from one that can come back?"""
        newest = [agent.record.round if agent.record else -1 for agent in self.present]
        return bool(newest) and min(newest) >= 0 and self.known_round() == max(newest)

    def known_round(self) -> int:
        """The highest round that a member which can come back at once would present."""
        return max(
            (
                agent.record.round
                for agent in self.present
                if agent.record and not agent.process.stopped and self.network.reaches(agent.machine.name)
            ),
            default=-1,
        )

    def set_target(self, target: int, *remove: str) -> Frame:
        return self.coordinator.ask(AskFrame(ask="set-target", target=target, remove=remove))

    def cancel(self, why: str = "enough") -> Frame:
        return self.coordinator.ask(AskFrame(ask="cancel", why=why))

"""What runs on one node below its agent: ranks, and the guard that outlives the agent by just long enough.

`Census` knows every rank that is alive anywhere, which no part of the real system can; the checker asks it.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Protocol

from muster.sim.clock import Clock, Process
from muster.sim.coordinator import SimulatedCoordinator
from muster.sim.link import Link
from muster.sim.network import Network
from muster.types.world import MemberId
from muster.world.wire import Frame

KILL_S = 0.003  # from SIGKILL to the end of a process
SWEEP_S = 0.002  # the guard looks for grandchildren
SLACK_S = 0.2  # the agent ends its ranks itself when its lease is over, unless it cannot
REPORT_S = 0.02  # a guard lets its last frame leave
REPORT_TIMEOUT_S = 10.0


@dataclass(eq=False)
class Rank:
    """One process that trains."""

    round: int
    rank: int
    member_id: MemberId
    machine: Machine
    born_at: float
    stubborn: bool = False  # ignores SIGTERM
    term_s: float = 0.01  # how long it takes to end after SIGTERM
    hung_at: float | None = None
    waiting: bool = False  # it hangs because it waits for others
    called_off: bool = False  # told to end: peers that fail now fail because of it
    alive: bool = True


class Observer(Protocol):
    """Who wants to know about ranks."""

    def rank_started(self, rank: Rank) -> None: ...
    def rank_ended(self, rank: Rank, status: int) -> None: ...


@dataclass
class Census:
    alive: dict[int, set[Rank]] = field(default_factory=dict)  # by round

    def start(self, rank: Rank) -> None:
        self.alive.setdefault(rank.round, set()).add(rank)

    def end(self, rank: Rank) -> None:
        ranks = self.alive[rank.round]
        ranks.discard(rank)
        if not ranks:
            del self.alive[rank.round]


class Machine:
    """Ranks live here, not in the agent: they go on when it is stopped and end when guard and agent are gone."""

    def __init__(self, name: str, clock: Clock, census: Census, observer: Observer) -> None:
        self.name = name
        self.clock = clock
        self.ranks: list[Rank] = []
        self.powered = True
        self._census = census
        self._observer = observer

    def start(self, rank: Rank) -> None:
        self.ranks.append(rank)
        self._observer.rank_started(rank)
        self._census.start(rank)

    def end(self, rank: Rank, status: int) -> None:
        if not rank.alive:
            return
        rank.alive = False
        self.ranks.remove(rank)
        self._census.end(rank)
        self._observer.rank_ended(rank, status)

    def signal(self, number: int) -> None:
        for rank in self.ranks:
            rank.called_off = True
            if number == signal.SIGKILL:
                self.clock.after(KILL_S, self.end, rank, -number)
            elif not rank.stubborn or number == signal.SIGABRT:
                self.clock.after(rank.term_s, self.end, rank, -number)

    def power_off(self) -> None:
        self.powered = False
        for rank in list(self.ranks):
            self.end(rank, -signal.SIGKILL)


class Guard:
    """Kills the ranks when its agent ends or is silent for a lease, and says `gone` on a connection of its own.

    Silent for a lease means two things: no sign of the agent itself, or none that it has heard from the coordinator.
    """

    def __init__(
        self,
        member_id: MemberId,
        machine: Machine,
        network: Network,
        coordinator: SimulatedCoordinator,
        rng: Random,
        *,
        name: str,
        lease_s: float,
        on_swept: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        self.process = Process(machine.clock)
        self.lease_s = lease_s
        self.round: int | None = None
        self._machine = machine
        self._on_swept = on_swept
        self._on_end = on_end
        self._beat_at = machine.clock.now
        self._until = math.inf
        self._cleared = self.standing_down = False
        hello = {"member": {"member_id": member_id, "name": name}}
        self.link = Link(
            self.process,
            network,
            coordinator,
            machine.name,
            rng,
            kind="guard",
            hello=lambda: hello,
            on_frame=self._hear,
            on_refused=lambda code, message: None,
        )
        self.link.connect()
        self._look_at(self._beat_at + lease_s)

    # Orders of the agent

    def beat(self, until: float) -> None:
        """The agent lives, and may have ranks until then."""
        self._beat_at = self._machine.clock.now
        self._until = until + SLACK_S
        if self._until < self._looks_at:
            self._look_at(self._until)

    def sweep(self) -> None:
        self.process.after(SWEEP_S, self._on_swept)

    def release(self) -> None:
        """The agent leaves in good order: end everything, report nothing."""
        self.standing_down = True
        self._machine.signal(signal.SIGKILL)
        self.process.after(KILL_S, self._exit)

    def agent_ended(self) -> None:
        self.process.read(self._stand_down)

    # Its own part

    def _look_at(self, when: float) -> None:
        self._looks_at = when
        self.process.after(when - self._machine.clock.now, self._watch, when)

    def _watch(self, when: float) -> None:
        if when != self._looks_at:
            return
        limit = self._beat_at + self.lease_s
        if self._machine.ranks:
            limit = min(limit, self._until)
        if limit > self._machine.clock.now:
            self._look_at(limit)
        else:
            self._stand_down()

    def _stand_down(self) -> None:
        if self.standing_down:
            return
        self.standing_down = True
        self._machine.signal(signal.SIGKILL)
        self.process.after(KILL_S, self._clear)

    def _clear(self) -> None:
        """The parent of the ranks went too, which the agent sees."""
        self._cleared = True
        self._on_end()
        if self.round is None:
            self._exit()
            return
        self._report()
        self.process.after(REPORT_TIMEOUT_S, self._exit)

    def _hear(self, frame: Frame) -> None:
        if frame["type"] == "welcome" and self._cleared:
            self._report()
        elif frame["type"] == "probe":
            if self._cleared:
                self._report()
            else:
                self.link.send("alive")

    def _report(self) -> None:
        if self.link.send("gone", round=self.round):
            self.process.after(REPORT_S, self._exit)

    def _exit(self) -> None:
        self.link.close()
        self.process.end()
        self._on_end()

    def kill(self) -> None:
        """Its ranks go with it: their parent dies, and they are told to die with their parent."""
        self.standing_down = True
        self._machine.signal(signal.SIGKILL)
        self._exit()

    def dismiss(self) -> None:
        """Whatever state it is in, another takes its place."""
        self.link.close()
        self.process.end()

    def vanish(self) -> None:
        self.link.vanish()
        self.process.end()

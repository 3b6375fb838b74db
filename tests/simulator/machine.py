"""What runs on one node below its agent: ranks, and the guard that outlives the agent by just long enough.

`Census` knows every rank that is alive anywhere, which no part of the real system can; the checker asks it.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Protocol

from muster.core.member.guard import GuardState
from muster.core.member.orders import Beat
from muster.types.frames import ChallengeFrame, Frame, GoneFrame, HelloFrame, Introduction, WelcomeFrame
from muster.types.world import MemberId
from muster.world.wire import encode
from tests.simulator.clock import Process, VirtualClock
from tests.simulator.connection import SimulatedConnection
from tests.simulator.coordinator import RUN, SimulatedCoordinator
from tests.simulator.network import RESET, Cable, Item, Network, frame_of

KILL_S = 0.003  # from SIGKILL to the end of a process
SWEEP_S = 0.002  # the guard looks for grandchildren
REPORT_S = 0.02  # a guard lets its last frame leave
REPORT_TIMEOUT_S = 10.0


@dataclass(eq=False)
class SimulatedRank:
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
    killed: bool = False  # SIGKILL was sent
    called_off: bool = False  # told to end: peers that fail now fail because of it
    alive: bool = True


class RankObserver(Protocol):
    """Who wants to know about ranks."""

    def rank_started(self, rank: SimulatedRank) -> None: ...
    def rank_ended(self, rank: SimulatedRank, status: int) -> None: ...


@dataclass
class Census:
    alive: dict[int, set[SimulatedRank]] = field(default_factory=dict)  # by round

    def start(self, rank: SimulatedRank) -> None:
        self.alive.setdefault(rank.round, set()).add(rank)

    def end(self, rank: SimulatedRank) -> None:
        ranks = self.alive[rank.round]
        ranks.discard(rank)
        if not ranks:
            del self.alive[rank.round]


class Machine:
    """Ranks live here, not in the agent: they go on when it is stopped and end when guard and agent are gone."""

    def __init__(self, name: str, clock: VirtualClock, census: Census, observer: RankObserver) -> None:
        self.name = name
        self.clock = clock
        self.ranks: list[SimulatedRank] = []
        self.processes: list[Process] = []  # the agent, and guards
        self.lifelines: list[SimulatedLifeline] = []
        self._census = census
        self._observer = observer

    def start(self, rank: SimulatedRank) -> None:
        self.ranks.append(rank)
        self._observer.rank_started(rank)
        self._census.start(rank)

    def end(self, rank: SimulatedRank, status: int) -> None:
        if not rank.alive:
            return
        rank.alive = False
        self.ranks.remove(rank)
        self._census.end(rank)
        self._observer.rank_ended(rank, status)
        self.let_go()

    def let_go(self) -> None:
        """Something has ended. The kernel closes what the last of all had open."""
        if not self.ranks and not any(one.alive for one in self.processes):
            for lifeline in self.lifelines:
                lifeline.end()

    def signal(self, number: int) -> None:
        for rank in self.ranks:
            rank.called_off = True
            if number == signal.SIGKILL:
                rank.killed = True
                self.clock.after(KILL_S, self.end, rank, -number)
            elif not rank.stubborn or number == signal.SIGABRT:
                self.clock.after(rank.term_s, self.end, rank, -number)

    def kill_ranks(self) -> None:
        for rank in list(self.ranks):
            self.end(rank, -signal.SIGKILL)

    def power_off(self) -> None:
        self.lifelines = []
        self.kill_ranks()


class SimulatedLifeline:
    """What `world.lifeline` opens: the agent speaks on it, and it is open as long as anything on its machine lives."""

    def __init__(self, agent: Process, machine: Machine, network: Network, hello: HelloFrame) -> None:
        self._agent = agent
        self._machine = machine
        self._network = network
        self._hello = replace(hello, kind="lifeline", low="1.0", high="1.0", run_id=RUN, here=machine.name)
        self._line: Cable | None = None
        self._rng = Random(machine.name)
        self._session = 0
        self._welcomed = False

    @property
    def relayed(self) -> bool:
        return self._hello.here != self._machine.name

    def relay(self) -> None:
        """From the next one on, somebody is between."""
        self._hello = replace(self._hello, here="an address behind a relay")

    def lead(self, target: SimulatedCoordinator) -> None:
        """The agent was welcomed there: it makes another, and the one before ends."""
        self.reset()
        self._session += 1
        self._agent.after(self._network.delay(self._rng), self._connect, self._session, target)

    def end(self) -> None:
        """Nobody holds it any more. What nobody has read makes that a reset."""
        self._hang_up(None if self._welcomed else RESET)

    def reset(self) -> None:
        """The living end it, or something between does: whoever relays it closes it as cleanly as the dead do."""
        self._hang_up(None if self.relayed else RESET)

    def _hang_up(self, item: Item) -> None:
        line, self._line, self._welcomed = self._line, None, False
        if line is not None:
            line.down.sink = None
            line.up.send(item)

    def _connect(self, session: int, target: SimulatedCoordinator) -> None:
        if session == self._session and self._network.reaches(self._machine.name, target.machine) and target.alive:
            self._line = line = Cable(self._network, self._machine.name, target.machine, self._rng)
            line.down.sink = lambda item: self._agent.read(self._arrives, session, item)
            target.accept(line)

    def _arrives(self, session: int, item: Item) -> None:
        if session != self._session or self._line is None:
            return
        match frame_of(item) if item else None:
            case ChallengeFrame():
                self._line.up.send(encode(self._hello))
            case WelcomeFrame():
                self._welcomed = True
            case _:  # it ended, or was refused; real ones are made again after a while
                self._hang_up(RESET)


class SimulatedGuard:
    """Does on virtual time what `node.guard` does: kills when `core.member.guard` says so, and tells of it."""

    def __init__(
        self,
        member_id: MemberId,
        machine: Machine,
        network: Network,
        places: Callable[[], list[SimulatedCoordinator]],
        rng: Random,
        *,
        name: str,
        lease_s: float,
        on_due: Callable[[], None],
        on_end: Callable[[], None],
    ) -> None:
        self.process = Process(machine.clock)
        machine.processes.append(self.process)
        self.lost = False  # the agent has seen that it is gone
        self.standing_down = False
        self._machine = machine
        self._on_due = on_due
        self._on_end = on_end
        self._state = GuardState(lease_s, machine.clock.now)
        self._timer = math.inf
        hello = HelloFrame(member=Introduction(member_id, name))
        self.connection = SimulatedConnection(
            self.process,
            network,
            places,
            machine.name,
            rng,
            kind="guard",
            hello=lambda: hello,
            on_frame=lambda frame: self._say(self._state.heard(frame)),
            on_refused=lambda code, message: None,
        )
        self.connection.connect()
        self._set_timer()

    # Orders of the agent

    def beat(self, beat: Beat) -> None:
        if not self.standing_down:
            self._state.beat(beat.until, beat.lease_s, beat.round, self._machine.clock.now)
            self._set_timer()

    def sweep(self, then: Callable[[], None]) -> None:
        self.process.after(SWEEP_S, then)

    def release(self) -> None:
        """The agent leaves in good order: end everything, report nothing."""
        self.standing_down = True
        self._machine.signal(signal.SIGKILL)
        self.process.after(KILL_S, self._exit)

    def agent_ended(self) -> None:
        self.process.read(self._stand_down)

    # Its own part

    def _set_timer(self) -> None:
        if (due := self._state.due_at) < self._timer:
            self._timer = due
            self.process.after(due - self._machine.clock.now, self._look, due)

    def _look(self, when: float) -> None:
        if when != self._timer:
            return
        self._timer = math.inf
        if self._machine.clock.now >= self._state.due_at:
            self._on_due()
            self._stand_down()
        else:
            self._set_timer()

    def _stand_down(self) -> None:
        if self.standing_down:
            return
        self.standing_down = True
        self._machine.signal(signal.SIGKILL)
        self.process.after(KILL_S, self._clear)

    def _clear(self) -> None:
        """The parent of the ranks went too, which the agent sees."""
        self._state.cleared = True
        self._on_end()
        if self._state.round is None:
            self._exit()
            return
        self._say(self._state.report())
        self.process.after(REPORT_TIMEOUT_S, self._exit)

    def _say(self, frame: Frame | None) -> None:
        if frame is not None and self.connection.send(frame) and isinstance(frame, GoneFrame):
            self.process.after(REPORT_S, self._exit)

    def _exit(self) -> None:
        self.connection.close()
        self.process.end()
        self._machine.let_go()
        self._on_end()

    def kill(self) -> None:
        """Its ranks go with it: their parent dies, and they are told to die with their parent."""
        self.standing_down = True
        self._machine.signal(signal.SIGKILL)
        self._exit()

    def dismiss(self) -> None:
        """Whatever state it is in, another takes its place."""
        self.connection.close()
        self.process.end()
        self._machine.let_go()

    def vanish(self) -> None:
        self.connection.vanish()
        self.process.end()

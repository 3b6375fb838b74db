"""A simulated worker: carries out on virtual time what `core.member` orders, on a machine without processes.

It decides nothing about the world: what it brings and what it obeys is what `muster-node` brings and obeys.
"""

from __future__ import annotations

import math
import signal
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import lru_cache
from random import Random

from muster.core.member.held_round import InRound
from muster.core.member.orders import (
    AwaitSaves,
    Beat,
    CheckOwnHealth,
    Drop,
    Exit,
    Hasten,
    KillRanks,
    Listen,
    Notify,
    Order,
    ReachPeers,
    Renew,
    RestartProcesses,
    Send,
    StartRanks,
    StopRanks,
)
from muster.core.member.state import MemberState
from muster.core.succession import electorate
from muster.types.frames import (
    ElectorsFrame,
    Frame,
    HelloFrame,
    Introduction,
    ListensFrame,
    PostFrame,
    RenewedFrame,
    RenewFrame,
    RunRecord,
    StoppedFrame,
    WelcomeFrame,
)
from muster.types.world import Elector, Electorate, MemberId, Place, RunOutcome, Settings
from tests.simulator.clock import Process
from tests.simulator.connection import SimulatedConnection
from tests.simulator.coordinator import RUN, SimulatedCoordinator
from tests.simulator.invariants import Checker
from tests.simulator.machine import Machine, SimulatedLifeline, SimulatedRank
from tests.simulator.network import Network
from tests.simulator.peers import SimulatedProbe
from tests.simulator.processes import SimulatedProcesses, WorkerConfig

DUMP_WAIT_S = 3.0
HEALTH_S = 0.05


@lru_cache(maxsize=16)
def parsed(given: tuple[tuple[str, object], ...]) -> Settings:
    """Members of a run give and get the same settings many times."""
    return Settings.parse(dict(given))


class SimulatedWorker:
    def __init__(
        self,
        config: WorkerConfig,
        member_id: MemberId,
        machine: Machine,
        network: Network,
        given: list[SimulatedCoordinator],
        rng: Random,
        checker: Checker,
        *,
        on_end: Callable[[SimulatedWorker], None],
    ) -> None:
        self.config = config
        self.member_id = member_id
        self.machine = machine
        self.process = Process(machine.clock)
        machine.processes.append(self.process)
        self.healthy = True
        self.code: int | None = None
        self.refusal = ""
        self.state = MemberState(member_id, RUN, parsed(tuple(config.settings.items())), self.now)
        self.network = network
        self._given = given  # where the user said that the coordinator is
        self.standby: SimulatedCoordinator | None = None
        self._on_end = on_end
        self._checker = checker
        self._orders: deque[Order] = deque()
        self._busy = False
        self._timer = math.inf
        self._ports = 0
        self._listening = False
        self.processes = SimulatedProcesses(
            config,
            self.state,
            self.process,
            machine,
            network,
            self._places,
            rng,
            handle=self._handle,
            on_guard_due=lambda: checker.guard_acts(self),
        )
        self.connection = SimulatedConnection(
            self.process,
            network,
            self._places,
            machine.name,
            rng,
            kind="agent",
            hello=self._hello,
            on_frame=self._heard,
            on_refused=self._refused,
            on_down=lambda why: self._handle(self.state.down(why, self.now)),
            on_dead=lambda: self.state.found_dead(self.now),
            on_gone=self._leader_gone,
        )
        introduction = HelloFrame(member=Introduction(member_id, config.name))
        self._introduction = introduction
        self.lifeline = SimulatedLifeline(self.process, machine, network, introduction)
        machine.lifelines.append(self.lifeline)
        self._to_electors: dict[SimulatedCoordinator, SimulatedLifeline] = {}
        if config.relayed:
            self.lifeline.relay()
        self._probe = SimulatedProbe(member_id, machine.name, self.process, network, self.connection)

    @property
    def name(self) -> str:
        return self.config.name

    @property
    def now(self) -> float:
        return self.process.clock.now

    @property
    def alive(self) -> bool:
        return self.process.alive

    @property
    def round(self) -> InRound | None:
        return self.state.held.current

    @property
    def record(self) -> RunRecord | None:
        return self.state.at.record

    @property
    def outcome(self) -> RunOutcome | None:
        return self.state.at.outcome

    @property
    def leaving(self) -> bool:
        return self.state.at.leaving

    # Going on with the run, as `world.membership` does it

    def _places(self) -> list[SimulatedCoordinator]:
        known = self.state.at.electorate
        posts = [one.post for one in electorate.everyone(known.groups) if one.member_id != self.member_id]
        leader = [known.leader.post] if known.leader is not None else []
        there = [self.network.listeners[post] for post in (*leader, *posts) if post in self.network.listeners]
        mine = [self.standby] if self.standby is not None and self.standby.leading is not None else []
        return list(dict.fromkeys([*mine, *there[: len(leader)], *self._given, *there]))

    def _stand_by(self, known: Electorate) -> None:
        if self.standby is None and known.leader is not None:
            self.standby = SimulatedCoordinator(
                self.machine.clock, self.network, succession=True, machine=self.machine.name, host=self.process
            )
            self._checker.watch(self.standby)
            me = Elector(self.member_id, self.name, self.standby.address)
            self.standby.follow(me, self.state.at.settings.lease_s, self._follow)
            self.connection.send(PostFrame(path=me.post))

    def _lead_to_electors(self, known: Electorate) -> None:
        """Where it is lost with the coordinator, as `node.agent` does it."""
        leader = self.network.listeners.get(known.leader.post) if known.leader is not None else None
        with_it = leader is not None and (leader.beside == self.member_id or leader is self.standby)
        electors = electorate.everyone(known.groups) if with_it else ()
        wanted = [one.post for one in electors if one != known.leader and one.member_id != self.member_id]
        places = [self.network.listeners[post] for post in wanted]
        for place in [one for one in self._to_electors if one not in places]:
            lifeline = self._to_electors.pop(place)
            lifeline.reset()
            if lifeline in self.machine.lifelines:
                self.machine.lifelines.remove(lifeline)
        for place in places:
            if place not in self._to_electors:
                made = SimulatedLifeline(self.process, self.machine, self.network, self._introduction)
                self._to_electors[place] = made
                self.machine.lifelines.append(made)
                made.lead(place)

    def _follow(self, leader: Elector) -> None:
        self.connection.seek(self.network.listeners[leader.post])

    def _leader_gone(self) -> None:
        known = self.state.at.electorate
        if self.standby is not None and self.standby.post is not None and known.leader is not None:
            self.standby.post.leader_gone(known.term)

    # Life

    def start(self) -> None:
        if self.config.checks_health and not self.healthy:
            self._handle(self.state.checked("health check failed with 1: bad", self.now))
        self.connection.connect()
        self._tick(self._timer)

    def _end(self, code: int) -> None:
        if self.code is None:
            self.code = code
            self.connection.close()
            self.processes.guard.release()
            self._see_off(self.now + self.state.at.settings.farewell_s)

    def _see_off(self, until: float) -> None:
        """One who leads waits until the others know the end, too."""
        busy = self.standby is not None and self.standby.connected > 0 and self.outcome is not None
        if busy and self.now < until:
            self.process.after(0.05, self._see_off, until)
            return
        if self.standby is not None:
            self.standby.crash()
        self.process.end()
        self.machine.let_go()
        self._on_end(self)

    def kill(self) -> None:
        """SIGKILL: the kernel closes what it had open."""
        if self.alive:
            self.connection.close()
            if self.standby is not None:
                self.standby.crash()
            self.process.end()
            self.processes.guard.agent_ended()
            self.machine.let_go()
            self._on_end(self)

    def kill_guard(self) -> None:
        if self.processes.guard.process.alive:
            self.processes.guard.kill()

    def kill_both(self) -> None:
        self.kill()
        self.kill_guard()

    def kill_worker(self) -> None:
        """SIGKILL to everything in one instant: nobody is left to say anything."""
        self.kill_both()
        self.machine.kill_ranks()

    def power_off(self) -> None:
        """The machine: everything on it ends, and nobody says so."""
        self.network.power_off(self.machine.name)
        if self.standby is not None:
            self.standby.power_off()
        self.connection.vanish()
        self.process.end()
        self.processes.guard.vanish()
        self.machine.power_off()
        self._on_end(self)

    def reset(self, *, guard: bool, half: bool) -> None:
        (self.processes.guard.connection if guard else self.connection).reset(half=half)

    def leave(self) -> None:
        """SIGTERM."""
        code = 128 + signal.SIGTERM
        self.process.read(lambda: self._handle(self.state.leave("SIGTERM", code, self.now)))

    # Driving the state

    def _handle(self, orders: Iterable[Order]) -> None:
        self._orders += orders
        if self._busy:
            return
        self._busy = True
        while self._orders and self.alive:
            self._carry_out(self._orders.popleft())
        self._busy = False
        self._set_timer()

    def _set_timer(self) -> None:
        if self.alive and (due := self.state.wake_at) < self._timer:
            self._timer = due
            self.process.after(due - self.now, self._tick, due)

    def _tick(self, when: float) -> None:
        if when == self._timer:
            self._timer = math.inf
            self._handle(self.state.tick(self.now))

    def _carry_out(self, order: Order) -> None:
        match order:
            case Send(frame=StoppedFrame() as frame):
                self.connection.send(replace(frame, store_port=self._store_port()))
            case Send(frame=frame):
                self.connection.send(frame)
            case Renew(round=number):
                steps = self.processes.fresh_steps()
                first = min((step for _, step, _ in steps), default=None)
                age = max((age for _, _, age in steps), default=None)
                self.connection.send(RenewFrame(round=number, steps=steps, first_step=first, first_step_age=age))
            case Drop():
                self.connection.drop()
            case Beat():
                self.processes.guard.beat(order)
            case StartRanks(place=place):
                self._take_listener(place)
                self.processes.start(place)
            case StopRanks(grace_s=grace_s, dump=dump):
                self._checker.ranks_stopped(self)
                self.processes.stop(DUMP_WAIT_S if dump else grace_s, signal.SIGABRT if dump else signal.SIGTERM)
            case Hasten(grace_s=grace_s):
                self.processes.kill_after(grace_s)
            case KillRanks():
                self.machine.signal(signal.SIGKILL)
            case Notify():
                self.processes.notify(order)
            case AwaitSaves(round=number, saving_s=most_s):
                self.process.after(min(self.config.save_s, most_s), self.processes.saved, number)
            case RestartProcesses():
                self.process.after(self.config.restart_s, self.processes.restart)
            case CheckOwnHealth(after_s=after_s):
                self.process.after(after_s + HEALTH_S, self._check_health)
            case Listen():
                self.connection.send(ListensFrame(paths=((self.machine.name, 1),)))
            case ReachPeers(peers=peers, gone=gone):
                self._probe.told(dict(peers), gone)
            case Exit(code=code):
                self._end(code)

    def rank_ended(self, rank: SimulatedRank, status: int) -> None:
        """Called on the machine; the agent reads it when it runs."""
        self.process.read(self.processes.exited, rank, status)

    def _check_health(self) -> None:
        unfit = None if self.healthy else "health check failed with 1: bad"
        self._handle(self.state.checked(unfit, self.now))

    # The connection

    def _heard(self, frame: Frame) -> None:
        orders = self.state.heard(frame, self.now)
        if isinstance(frame, WelcomeFrame):
            self.processes.tell_again()
        if isinstance(frame, WelcomeFrame) and self.connection.home is not None:
            self.lifeline.lead(self.connection.home)
        if isinstance(frame, RenewedFrame | WelcomeFrame):
            self._checker.lease_renewed(self)
        if isinstance(frame, WelcomeFrame):
            self._stand_by(frame.electorate)
        if isinstance(frame, WelcomeFrame | ElectorsFrame):
            self._lead_to_electors(frame.electorate)
        self._handle(orders)

    def _hello(self) -> HelloFrame:
        one = self.config
        member = Introduction(
            member_id=self.member_id,
            name=one.name,
            addr=one.name,
            procs=one.procs,
            infra_rank=one.infra_rank,
            domain=one.domain,
            store_port=self._store_port(),
            host=one.name,
            pid=1,
            checks_health=one.checks_health,
            unfit=self.state.unfit,
            post=self.standby.address if self.standby is not None else None,
            takes_outline=True,
            takes_notice=one.takes_notice,
            launch=one.launch,
        )
        present = replace(self.state.hello(self.now), epoch=self.connection.epoch, store_port=self._store_port())
        return HelloFrame(member=member, settings=one.settings, present=present)

    def _store_port(self) -> int:
        """A socket that it already listens on; each round's store takes it away."""
        if not self._listening:
            self._listening = True
            self._ports += 1
        return self._ports

    def _take_listener(self, place: Place) -> None:
        if place.hosts_store:
            fits = place.round.store_port == self._ports and self._listening
            assert fits, f"{self.name} does not listen for the store"
            self._listening = False

    def _refused(self, code: str, message: str) -> None:
        self.refusal = f"{message} [{code}]"
        self._handle(self.state.refused(message, self.now))

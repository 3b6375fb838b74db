"""A simulated worker: carries out on virtual time what `core.member` orders, on a machine without processes.

It decides nothing about the world: what it brings and what it obeys is what `muster-node` brings and obeys.
"""

from __future__ import annotations

import math
import signal
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import lru_cache
from random import Random
from typing import Any

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
    Order,
    ReachPeers,
    Renew,
    RestartProcesses,
    Send,
    StartRanks,
    StopRanks,
)
from muster.core.member.state import MemberState
from muster.types.frames import (
    HelloFrame,
    Introduction,
    ListensFrame,
    ReachedFrame,
    RenewFrame,
    RunRecord,
    StoppedFrame,
)
from muster.types.world import MemberId, Path, Place, RankEnd, RunOutcome, Settings
from tests.simulator.clock import Process
from tests.simulator.connection import SimulatedConnection
from tests.simulator.coordinator import RUN, SimulatedCoordinator
from tests.simulator.machine import Machine, Rank, SimulatedGuard
from tests.simulator.network import Network

DUMP_WAIT_S = 3.0
FORK_S = 0.005
RESTART_S = 0.02
HEALTH_S = 0.05
PROBE_S, PROBE_AGAIN_S = 0.01, 0.25
STEP_S = 0.5


@lru_cache(maxsize=16)
def parsed(given: tuple[tuple[str, object], ...]) -> Settings:
    """Members of a run give and get the same settings many times."""
    return Settings.parse(dict(given))


@dataclass(frozen=True)
class WorkerConfig:
    name: str
    settings: dict[str, object] = field(default_factory=dict)
    procs: int = 1
    infra_rank: int | None = None
    domain: str | None = None
    checks_health: bool = False
    stubborn: bool = False  # its ranks ignore SIGTERM
    term_s: float = 0.01  # how long they take to end after it
    save_s: float = 0.0  # how long one of them still saves when the round is called back


class SimulatedWorker:
    def __init__(
        self,
        config: WorkerConfig,
        member_id: MemberId,
        machine: Machine,
        network: Network,
        coordinator: SimulatedCoordinator,
        rng: Random,
        *,
        on_end: Callable[[SimulatedWorker], None],
    ) -> None:
        self.config = config
        self.member_id = member_id
        self.machine = machine
        self.process = Process(machine.clock)
        self.healthy = True
        self.code: int | None = None
        self.refusal = ""
        self.state = MemberState(member_id, RUN, parsed(tuple(config.settings.items())), self.now)
        self._network = network
        self._coordinator = coordinator
        self._rng = rng
        self._on_end = on_end
        self._orders: deque[Order] = deque()
        self._busy = False
        self._timer = math.inf
        self._ports = 0
        self._listening = False
        self._kill_at = math.inf
        self._clearing = False
        self._told_steps: dict[int, int] = {}
        self._peers: dict[MemberId, tuple[Path, ...]] = {}
        self._reached: list[Any] = []
        self._guard = self._start_guard()
        self.connection = SimulatedConnection(
            self.process,
            network,
            coordinator,
            machine.name,
            rng,
            kind="agent",
            hello=self._hello,
            on_frame=lambda frame: self._handle(self.state.heard(frame, self.now)),
            on_refused=self._refused,
            on_down=lambda why: self._handle(self.state.down(why, self.now)),
            on_dead=lambda: self.state.found_dead(self.now),
        )

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
            self._guard.release()
            self.process.end()
            self._on_end(self)

    def kill(self) -> None:
        """SIGKILL: the kernel closes what it had open."""
        if self.alive:
            self.connection.close()
            self.process.end()
            self._guard.agent_ended()
            self._on_end(self)

    def kill_guard(self) -> None:
        if self._guard.process.alive:
            self._guard.kill()

    def kill_both(self) -> None:
        self.kill()
        self.kill_guard()

    def power_off(self) -> None:
        """The machine: everything on it ends, and nobody says so."""
        self._network.power_off(self.machine.name)
        self.connection.vanish()
        self.process.end()
        self._guard.vanish()
        self.machine.power_off()
        self._on_end(self)

    def reset(self, *, guard: bool, half: bool) -> None:
        (self._guard.connection if guard else self.connection).reset(half=half)

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
                self.connection.send(RenewFrame(round=number, steps=self._fresh_steps()))
            case Drop():
                self.connection.drop()
            case Beat():
                self._guard.beat(order)
            case StartRanks(place=place):
                self._start(place)
            case StopRanks(grace_s=grace_s, dump=dump):
                self._stop(DUMP_WAIT_S if dump else grace_s, signal.SIGABRT if dump else signal.SIGTERM)
            case Hasten(grace_s=grace_s):
                self._kill_after(grace_s)
            case KillRanks():
                self.machine.signal(signal.SIGKILL)
            case AwaitSaves(round=number, saving_s=most_s):
                self.process.after(min(self.config.save_s, most_s), self._saved, number)
            case RestartProcesses():
                self.process.after(RESTART_S, self._restart)
            case CheckOwnHealth(after_s=after_s):
                self.process.after(after_s + HEALTH_S, self._check_health)
            case Listen():
                self.connection.send(ListensFrame(paths=((self.machine.name, 1),)))
            case ReachPeers(peers=peers, gone=gone):
                self._told_to_reach(dict(peers), gone)
            case Exit(code=code):
                self._end(code)

    # Ranks

    def _start(self, place: Place) -> None:
        if place.hosts_store:
            fits = place.round.store_port == self._ports and self._listening
            assert fits, f"{self.name} does not listen for the store"
            self._listening = False
        self._kill_at, self._clearing, self._told_steps = math.inf, False, {}
        for rank in place.ranks:
            one = self.config
            self.machine.start(
                Rank(place.number, rank, self.member_id, self.machine, self.now, one.stubborn, one.term_s)
            )
        if self._counts_steps:  # only then does anyone ask whether all ranks are up
            self.process.after(FORK_S, self._up, place.number)

    def _up(self, number: int) -> None:
        self._handle(self.state.held.up(number, self.now))

    def _saved(self, number: int) -> None:
        self._handle(self.state.held.saves_over(number, self.now))

    def _stop(self, grace_s: float, number: int) -> None:
        if grace_s > 0:
            self.machine.signal(number)
        self._kill_after(grace_s)
        self._clear_when_empty()

    def _kill_after(self, grace_s: float) -> None:
        if self.now + grace_s < self._kill_at:
            self._kill_at = self.now + grace_s
            self.process.after(grace_s, self._kill, self._kill_at)

    def _kill(self, when: float) -> None:
        if when == self._kill_at:  # else its ranks are gone, or go sooner
            self.machine.signal(signal.SIGKILL)

    def _clear_when_empty(self) -> None:
        """What ranks left behind is swept up by the guard, or went with it."""
        if self.round is not None and self.round.stopping and not self._clearing and not self.machine.ranks:
            self._clearing = True
            if self._guard.process.alive and not self._guard.standing_down:
                self._guard.sweep(lambda: self.process.read(self._cleared))
            else:
                self._cleared()

    def _cleared(self) -> None:
        if self._clearing and self.round is not None:
            self._clearing, self._kill_at = False, math.inf
            self._handle(self.state.held.cleared(self.round.number, self.now))

    def rank_ended(self, rank: Rank, status: int) -> None:
        """Called on the machine; the agent reads it when it runs."""
        self.process.read(self._rank_exited, rank, status)

    def _rank_exited(self, rank: Rank, status: int) -> None:
        current = self.round
        if current is not None and current.number == rank.round:
            self._handle(self.state.held.exited(self._describe(current, rank, status), self.now))
            self._clear_when_empty()

    def _describe(self, held: InRound, rank: Rank, status: int) -> RankEnd:
        known: dict[str, Any] = {"worker": self.name, "round": rank.round}
        if self._counts_steps and (held.hung or not held.stopping):
            idle = 0.0 if rank.hung_at is None else self.now - rank.hung_at
            known |= {"step": _step(rank, self.now), "idle_s": round(idle, 3)}
        if status != 0:
            known["stderr_tail"] = (f"rank {rank.rank} gives up",)
            if held.hung:
                known |= {"hung": True, "waiting": rank.waiting, "stack": "train.py:7 in step"}
            elif held.stopping:
                known["stopped"] = True
        return RankEnd.from_status(rank.rank, status, **known)

    @property
    def _counts_steps(self) -> bool:
        one = self.state.at.settings
        return one.hang_timeout_s is not None or one.no_progress_rounds is not None

    def _fresh_steps(self) -> tuple[tuple[int, int, float], ...]:
        if not self._counts_steps or not self.state.held.runs:
            return ()
        fresh = []
        for rank in self.machine.ranks:
            step = _step(rank, self.now)
            if rank.hung_at is None and self._told_steps.get(rank.rank) != step:
                self._told_steps[rank.rank] = step
                fresh.append((rank.rank, step, round(self.now - max(step * STEP_S, rank.born_at), 4)))
        return tuple(fresh)

    # The guard

    def _start_guard(self) -> SimulatedGuard:
        guard = SimulatedGuard(
            self.member_id,
            self.machine,
            self._network,
            self._coordinator,
            self._rng,
            name=self.name,
            lease_s=self.state.at.settings.lease_s,
            on_end=lambda: self.process.read(self._guard_ended, guard),
        )
        return guard

    def _guard_ended(self, guard: SimulatedGuard) -> None:
        """What runs ranks goes with its guard; the ends of ranks have been read before."""
        if guard is not self._guard or guard.lost:
            return
        guard.lost = True
        self._handle(self.state.held.processes_lost("its guard died", self.now))
        if self._clearing:
            self._cleared()

    def _restart(self) -> None:
        if self._guard.lost:
            self._guard.dismiss()
            self._guard = self._start_guard()
        self._handle(self.state.held.restarted(self.now))

    # Health and peers

    def _check_health(self) -> None:
        unfit = None if self.healthy else "health check failed with 1: bad"
        self._handle(self.state.checked(unfit, self.now))

    def _told_to_reach(self, peers: dict[MemberId, tuple[Path, ...]], gone: tuple[MemberId, ...] | None) -> None:
        kept = {} if gone is None else {peer: where for peer, where in self._peers.items() if peer not in gone}
        self._peers, self._reached = kept | peers, []
        self.process.after(PROBE_S, self._probe, self._peers)

    def _probe(self, peers: dict[MemberId, tuple[Path, ...]]) -> None:
        """Try to reach every peer, and tell what is new, until it is told of others."""
        if peers is not self._peers:
            return
        here = self.machine.name
        rows: list[tuple[MemberId, float | None, str]] = [
            (peer, 0.001, "") if self._network.joins(here, where[0][0]) else (peer, None, "refused")
            for peer, where in peers.items()
            if peer != self.member_id
        ]
        if rows != self._reached and self.connection.up:
            self._reached = rows
            self.connection.send(ReachedFrame(peers=tuple(rows)))
        self.process.after(PROBE_AGAIN_S, self._probe, peers)

    # The connection

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
        )
        present = replace(self.state.hello(self.now), epoch=self.connection.epoch, store_port=self._store_port())
        return HelloFrame(member=member, settings=one.settings, present=present)

    def _store_port(self) -> int:
        """A socket that it already listens on; each round's store takes it away."""
        if not self._listening:
            self._listening = True
            self._ports += 1
        return self._ports

    def _refused(self, code: str, message: str) -> None:
        self.refusal = f"{message} [{code}]"
        self._handle(self.state.refused(message, self.now))


def _step(rank: Rank, now: float) -> int:
    return int((now if rank.hung_at is None else rank.hung_at) / STEP_S)

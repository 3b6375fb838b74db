"""The ranks and the guard of one simulated worker: what `node.rank_processes` is to an agent, on virtual time."""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from muster.core.member.held_round import InRound
from muster.core.member.orders import Notify, Order
from muster.core.member.state import MemberState
from muster.types.world import Place, RankEnd
from tests.simulator.clock import Process
from tests.simulator.coordinator import SimulatedCoordinator
from tests.simulator.machine import Machine, SimulatedGuard, SimulatedRank
from tests.simulator.network import Network

FORK_S = 0.005
STEP_S = 0.5


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
    restart_s: float = 0.02  # how long it takes until another parent of ranks is there
    relayed: bool = False  # something between it and the coordinator ends connections by itself
    takes_notice: bool = True  # its ranks can be told before a planned recall; those of 0.1 cannot
    asks: bool = False  # its ranks ask at every step whether to save
    launch: str = "one launch"  # the identity of its launch, by which a worker that comes after the end is late
    save_s: float = 0.0  # how long one of them still saves when the round is called back


class SimulatedProcesses:
    def __init__(
        self,
        config: WorkerConfig,
        state: MemberState,
        agent: Process,
        machine: Machine,
        network: Network,
        places: Callable[[], list[SimulatedCoordinator]],
        rng: Random,
        *,
        handle: Callable[[Iterable[Order]], None],
        on_guard_due: Callable[[], None],
    ) -> None:
        self._config = config
        self._state = state
        self._process = agent
        self._machine = machine
        self._network = network
        self._places = places
        self._rng = rng
        self._handle = handle
        self._on_guard_due = on_guard_due
        self._kill_at = math.inf
        self._clearing = False
        self._told_steps: dict[int, int] = {}
        self.guard = self._start_guard()

    @property
    def _now(self) -> float:
        return self._process.clock.now

    @property
    def _round(self) -> InRound | None:
        return self._state.held.current

    def start(self, place: Place) -> None:
        self._kill_at, self._clearing, self._told_steps = math.inf, False, {}
        one, me = self._config, self._state.at.member_id
        for rank in place.ranks:
            self._machine.start(
                SimulatedRank(place.number, rank, me, self._machine, self._now, one.stubborn, one.term_s)
            )
        if self._counts_steps:  # only then does anyone ask whether all ranks are up
            self._process.after(FORK_S, self._up, place.number)

    def _up(self, number: int) -> None:
        self._handle(self._state.held.up(number, self._now))

    def notify(self, order: Notify) -> None:
        """Ranks ask at each step: they are told at the one that was named, and go on for another."""
        calls = self._calls if self._config.asks else 0
        if order.call is None and not order.withdrawn:
            self._handle(self._state.held.noticed(order.round, calls, self._now))
        elif order.call is not None and calls:
            for ahead, done in ((0, False), (1, True)):
                pause = max(0.0, (order.call + ahead) * STEP_S - self._now)
                self._process.after(pause, self._noticed, order.round, order.call + ahead, done)

    @property
    def _calls(self) -> int:
        return int(self._now / STEP_S) + 1

    def _noticed(self, number: int, calls: int, done: bool) -> None:
        if self._round is not None and self._round.number == number and not self._round.stopping:
            self._handle(self._state.held.noticed(number, calls, self._now, seen=True, done=done))

    def saved(self, number: int) -> None:
        self._handle(self._state.held.saves_over(number, self._now))

    def stop(self, grace_s: float, number: int) -> None:
        if grace_s > 0:
            self._machine.signal(number)
        self.kill_after(grace_s)
        self._clear_when_empty()

    def kill_after(self, grace_s: float) -> None:
        if self._now + grace_s < self._kill_at:
            self._kill_at = self._now + grace_s
            self._process.after(grace_s, self._kill, self._kill_at)

    def _kill(self, when: float) -> None:
        if when == self._kill_at:  # else its ranks are gone, or go sooner
            self._machine.signal(signal.SIGKILL)

    def _clear_when_empty(self) -> None:
        """What ranks left behind is swept up by the guard, or went with it."""
        if self._round is not None and self._round.stopping and not self._clearing and not self._machine.ranks:
            self._clearing = True
            if self.guard.process.alive and not self.guard.standing_down:
                self.guard.sweep(lambda: self._process.read(self._cleared))
            else:
                self._cleared()

    def _cleared(self) -> None:
        if self._clearing and self._round is not None:
            self._clearing, self._kill_at = False, math.inf
            self._handle(self._state.held.cleared(self._round.number, self._now))

    def exited(self, rank: SimulatedRank, status: int) -> None:
        current = self._round
        if current is not None and current.number == rank.round:
            self._handle(self._state.held.exited(self._describe(current, rank, status), self._now))
            self._clear_when_empty()

    def _describe(self, held: InRound, rank: SimulatedRank, status: int) -> RankEnd:
        known: dict[str, Any] = {"worker": self._config.name, "round": rank.round}
        if self._counts_steps and (held.hung or not held.stopping):
            idle = 0.0 if rank.hung_at is None else self._now - rank.hung_at
            known |= {"step": _step(rank, self._now), "idle_s": round(idle, 3)}
        if status != 0:
            known["stderr_tail"] = (f"rank {rank.rank} gives up",)
            if held.hung:
                known |= {"hung": True, "waiting": rank.waiting, "stack": "train.py:7 in step"}
            elif held.stopping:
                known["stopped"] = True
        return RankEnd.from_status(rank.rank, status, **known)

    @property
    def _counts_steps(self) -> bool:
        one = self._state.at.settings
        return one.hang_timeout_s is not None or one.no_progress_rounds is not None

    def fresh_steps(self) -> tuple[tuple[int, int, float], ...]:
        if not self._counts_steps or not self._state.held.runs:
            return ()
        fresh = []
        for rank in self._machine.ranks:
            step = _step(rank, self._now)
            if self._told_steps.get(rank.rank) != step:
                self._told_steps[rank.rank] = step
                fresh.append((rank.rank, step, round(self._now - max(step * STEP_S, rank.born_at), 4)))
        return tuple(fresh)

    def tell_again(self) -> None:
        """Another coordinator may not know what was told."""
        self._told_steps.clear()

    # The guard

    def _start_guard(self) -> SimulatedGuard:
        guard = SimulatedGuard(
            self._state.at.member_id,
            self._machine,
            self._network,
            self._places,
            self._rng,
            name=self._config.name,
            lease_s=self._state.at.settings.lease_s,
            on_due=self._on_guard_due,
            on_end=lambda: self._process.read(self._guard_ended, guard),
        )
        return guard

    def _guard_ended(self, guard: SimulatedGuard) -> None:
        """What runs ranks goes with its guard; the ends of ranks have been read before."""
        if guard is not self.guard or guard.lost:
            return
        guard.lost = True
        self._handle(self._state.held.processes_lost("its guard died", self._now))
        if self._clearing:
            self._cleared()

    def restart(self) -> None:
        if self.guard.lost:
            self.guard.dismiss()
            self.guard = self._start_guard()
        self._handle(self._state.held.restarted(self._now))


def _step(rank: SimulatedRank, now: float) -> int:
    return int((now if rank.hung_at is None else rank.hung_at) / STEP_S)

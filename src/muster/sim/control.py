"""A backend and a coordinator for the control loop without a process: workers are there as soon as they are wanted.

They show how the control loop fares with a thousand trainings on a machine that could run a handful.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from muster.core import register, stages
from muster.core import roll as rolls
from muster.ports import Clock, LogQuery, Run
from muster.types.training import Training, Uid
from muster.types.worker import Capacity, Worker
from muster.types.world import Member, MemberId, Outcome, OutcomeState, Reach, Settings

MOST_DECISIONS = 100


class SimulatedBackend:
    patience = timedelta(seconds=90)

    def __init__(
        self, clock: Clock, *, gpus: int | None = 0, changed: Callable[[Worker], None] = lambda worker: None
    ) -> None:
        """`gpus` is None where somebody else places workers."""
        self._clock = clock
        self._gpus = gpus
        self._workers: dict[Uid, dict[str, Worker]] = {}
        self.changed = changed

    def workers(self, uid: Uid) -> Sequence[Worker]:
        return tuple(self._workers.get(uid, {}).values())

    def capacity(self) -> Capacity | None:
        if self._gpus is None:
            return None
        alive = [one for workers in self._workers.values() for one in workers.values() if one.alive and one.gpus]
        return Capacity(self._gpus, {index: worker.name for worker in alive for index in worker.gpus})

    def plan(self, training: Training) -> Mapping[str, Any]:
        return {"workers": training.spec.world_size.target + training.spec.spares}

    async def start(self, training: Training, name: str, gpus: tuple[int, ...], token: str) -> Worker:
        worker = Worker(name, training.uid, "simulated", self._clock.now(), gpus)
        self._workers.setdefault(training.uid, {})[name] = worker
        self.changed(worker)
        return worker

    async def stop(self, uid: Uid, name: str, *, why: str, kill: bool = False) -> None:
        worker = self._workers.get(uid, {}).get(name)
        if worker is not None and worker.alive:
            ended = replace(worker, stopping=True, ended_at=self._clock.now(), exit_code=0, why_ended=why)
            self._workers[uid][name] = ended
            self.changed(ended)

    async def logs(self, uid: Uid, query: LogQuery, ended: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
        yield b"a simulated rank says nothing\n"

    async def forget(self, uid: Uid) -> None:
        self._workers.pop(uid, None)


class SimulatedWorlds:
    """The real roll, whose members do at once what they are told."""

    def __init__(self, clock: Clock, settled: Callable[[Uid], None]) -> None:
        self._clock = clock
        self._settled = settled
        self._runs: dict[Uid, Run] = {}

    def look(self, uid: Uid) -> Run | None:
        return self._runs.get(uid)

    def worker_changed(self, worker: Worker) -> None:
        run = self._runs.get(worker.uid)
        if run is None:
            return
        if worker.alive:
            joined = register.join(run.roll, Member(MemberId(worker.name), worker.name, store_port=1), self._now)
            assert isinstance(joined, rolls.Roll)
            self._settle(worker.uid, replace(run, roll=joined))
        else:
            self._settle(
                worker.uid, replace(run, roll=register.disconnected(run.roll, MemberId(worker.name), self._now))
            )

    def open(self, uid: Uid, settings: Settings, target: int) -> None:
        run = self._runs.get(uid)
        roll = run.roll if run is not None else replace(register.open_roll(settings), holds_farewell=True)
        confirmed = run is not None and run.confirmed
        self._settle(uid, Run(register.reconfigure(roll, settings, target, self._now), "", confirmed))

    def end(self, uid: Uid, state: OutcomeState, reason: str, message: str) -> None:
        if (run := self._runs.get(uid)) is not None:
            self._settle(uid, replace(run, roll=register.order(run.roll, Outcome(state, reason, message))))

    def bury(self, uid: Uid, names: Sequence[str]) -> None:
        """Its members never have to be waited for."""

    def confirm(self, uid: Uid, outcome: Outcome) -> None:
        if (run := self._runs.get(uid)) is not None:
            roll = register.confirm(run.roll, outcome)
            for member_id in roll.members:
                roll = register.acknowledge(roll, member_id)
            self._settle(uid, Run(roll, run.reason, True))

    def let_go(self, uid: Uid) -> None:
        if (run := self._runs.get(uid)) is not None:
            self._settle(uid, replace(run, roll=register.let_go(run.roll)))

    def close(self, uid: Uid) -> None:
        self._runs.pop(uid, None)

    @property
    def _now(self) -> float:
        return self._clock.monotonic()

    def _settle(self, uid: Uid, run: Run) -> None:
        """Decide until there is only waiting left; ranks come up when they are released and stop when recalled."""
        roll, reason = run.roll, run.reason
        for _ in range(MOST_DECISIONS):
            roll = register.renew(roll, dict.fromkeys(roll.members, self._now))
            roll = register.tell_time(roll, self._now)
            if roll.settings.gate_timeout_s is not None:
                near = Reach(open=dict.fromkeys(roll.members, 0.0))
                roll = replace(roll, reach=dict.fromkeys(roll.members, near))
            decision = stages.decide(roll, self._now)
            roll, reason = stages.carry_out(roll, decision.action, self._now), decision.reason
            if isinstance(decision.action, rolls.Release):
                for seat in decision.action.round.seats:
                    roll = register.up(roll, seat.member_id, decision.action.round.number, self._now)
            elif isinstance(decision.action, rolls.CallBack) and roll.round is not None:
                for seat in roll.round.seats:
                    roll = register.gone(roll, seat.member_id, roll.round.number)
            elif isinstance(decision.action, rolls.Wait):
                break
        self._runs[uid] = Run(roll, reason, run.confirmed)
        self._settled(uid)

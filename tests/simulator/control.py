"""A backend and a coordinator for the control loop without a process: workers are there as soon as they are wanted.

They show how the control loop fares with a thousand trainings on a machine that could run a handful.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from muster.core.world import decisions, transitions
from muster.core.world import run as runs
from muster.ports import Clock, LogQuery, RunView
from muster.types.state import Holding
from muster.types.training import Training, Uid
from muster.types.worker import Capacity, Worker
from muster.types.world import Member, MemberId, OutcomeState, Reach, RunOutcome, Settings, Spot

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
        worker = Worker(name, training.uid, "simulated", self._clock.steady(), gpus)
        self._workers.setdefault(training.uid, {})[name] = worker
        self.changed(worker)
        return worker

    async def kill(self, training: Training, worker: str, rank: int | None) -> int:
        raise NotImplementedError

    async def stop(self, uid: Uid, name: str, *, why: str, kill: bool = False) -> None:
        worker = self._workers.get(uid, {}).get(name)
        if worker is not None and worker.alive:
            ended = replace(
                worker, stopping=True, ended_at=self._clock.steady(), exit_code=0, why_ended=why, cleared=True
            )
            self._workers[uid][name] = ended
            self.changed(ended)

    async def logs(self, uid: Uid, query: LogQuery, ended: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
        yield b"a simulated rank says nothing\n"

    async def log_bytes_taken(self, uid: Uid) -> int | None:
        return None

    async def forget(self, uid: Uid) -> None:
        self._workers.pop(uid, None)


class SimulatedWorlds:
    """The real run, whose members do at once what they are told."""

    def __init__(self, clock: Clock, settled: Callable[[Uid], None]) -> None:
        self._clock = clock
        self._settled = settled
        self._runs: dict[Uid, RunView] = {}

    def look(self, uid: Uid) -> RunView | None:
        return self._runs.get(uid)

    def worker_changed(self, worker: Worker) -> None:
        view = self._runs.get(worker.uid)
        if view is None:
            return
        if worker.alive:
            joined = transitions.join(view.run, Member(MemberId(worker.name), worker.name, store_port=1), self._now)
            assert isinstance(joined, runs.Run)
            self._settle(worker.uid, replace(view, run=joined))
        else:
            self._settle(
                worker.uid, replace(view, run=transitions.disconnected(view.run, MemberId(worker.name), self._now))
            )

    def holds(self, uid: Uid, holding: Holding) -> None:
        """All members have that state in memory."""
        view = self._runs[uid]
        run = view.run
        for member_id in run.members:
            run = transitions.holds(run, member_id, holding, self._now)
        self._settle(uid, replace(view, run=run))

    def open(self, uid: Uid, settings: Settings, target: int, lent: Mapping[str, str] | None = None) -> None:
        view = self._runs.get(uid)
        run = view.run if view is not None else replace(transitions.open_run(settings), holds_farewell=True)
        confirmed = view is not None and view.confirmed
        self._settle(uid, RunView(transitions.reconfigure(run, settings, target, self._now, lent), "", confirmed))

    def end(self, uid: Uid, state: OutcomeState, reason: str, message: str) -> None:
        if (view := self._runs.get(uid)) is not None:
            self._settle(uid, replace(view, run=transitions.order(view.run, RunOutcome(state, reason, message))))

    def mark_dead(self, uid: Uid, names: Sequence[str]) -> None:
        """Its members never have to be waited for."""

    def place(self, uid: Uid, spots: Mapping[str, Spot]) -> None:
        if (view := self._runs.get(uid)) is not None:
            self._settle(uid, replace(view, run=transitions.placed(view.run, spots)))

    def confirm(self, uid: Uid, outcome: RunOutcome) -> None:
        if (view := self._runs.get(uid)) is not None:
            run = transitions.confirm(view.run, outcome)
            for member_id in run.members:
                run = transitions.acknowledge(run, member_id)
            self._settle(uid, RunView(run, view.reason, True))

    def let_go(self, uid: Uid) -> None:
        if (view := self._runs.get(uid)) is not None:
            self._settle(uid, replace(view, run=transitions.let_go(view.run)))

    def close(self, uid: Uid) -> None:
        self._runs.pop(uid, None)

    @property
    def _now(self) -> float:
        return self._clock.monotonic()

    def _settle(self, uid: Uid, view: RunView) -> None:
        """Decide until there is only waiting left; ranks come up when they are released and stop when recalled."""
        run, reason = view.run, view.reason
        for _ in range(MOST_DECISIONS):
            run = transitions.renew(run, dict.fromkeys(run.members, self._now))
            run = transitions.tell_time(run, self._now)
            if run.settings.gate_timeout_s is not None:
                near = Reach(open=dict.fromkeys(run.members, 0.0))
                run = replace(run, reach=dict.fromkeys(run.members, near))
            decision = decisions.decide(run, self._now)
            run, reason = decisions.carry_out(run, decision.action, self._now), decision.reason
            if isinstance(decision.action, runs.Release):
                for seat in decision.action.round.seats:
                    run = transitions.up(run, seat.member_id, decision.action.round.number, self._now)
            elif isinstance(decision.action, runs.CallBack) and run.round is not None:
                for seat in run.round.seats:
                    run = transitions.gone(run, seat.member_id, run.round.number)
            elif isinstance(decision.action, runs.Stay):
                break
        self._runs[uid] = RunView(run, reason, view.confirmed)
        self._settled(uid)

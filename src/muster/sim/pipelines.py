"""What does an RL pipeline do, second by second? It asks for GPUs, generates, trains, and obeys its hooks.

`Engine` is its generation service: workers with slots, and trajectories that wait or run. `SimulatedPipeline` goes
through the steps and speaks to a scheduler; which one it is makes no difference to it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from muster.sharing.api import PipelineApi
from muster.sim.recording import Recorder, Use
from muster.sim.scenarios import Scenario, Steps, Trajectory, Workload
from muster.types.sharing import GENERATION_CLUSTER, ClusterSpec, Priority, ProgressReport

TRAIN = "actor_train"
REPORTS = 50  # one for every 2 %


@dataclass(eq=False)
class _RunningTrajectory:
    trajectory: Trajectory
    turns_done: int = 0
    started: float = 0.0
    timer: asyncio.TimerHandle | None = None


class Engine:
    """Workers by rank; a trajectory keeps its slot until it is done or aborted."""

    def __init__(self, slots: int, recorder: Recorder, gpus_each: int = 1) -> None:
        self._slots = slots
        self._gpus_each = gpus_each
        self._at_work_since: dict[int, float] = {}  # of the ranks that have something to do
        self._recorder = recorder
        self._loop = asyncio.get_running_loop()
        self._running: dict[int, list[_RunningTrajectory]] = {}  # of the ranks that serve
        self._queue: deque[_RunningTrajectory] = deque()
        self.completed = 0
        self.progressed = asyncio.Event()

    def begin(self, trajectories: Iterable[Trajectory]) -> None:
        self.completed = 0
        self._queue.extend(_RunningTrajectory(trajectory) for trajectory in trajectories)
        self._dispatch()

    def serve(self, rank: int) -> None:
        self._running.setdefault(rank, [])
        self._dispatch()

    def abort(self, ranks: Collection[int]) -> None:
        """Turns in flight are lost; their trajectories go to the front of the queue, the earliest first."""
        aborted = [job for rank in ranks for job in self._running.pop(rank, ())]
        now = self._loop.time()
        for rank in ranks:
            self._rests(rank)
        for job in aborted:
            assert job.timer is not None
            job.timer.cancel()
            turn_s = job.trajectory.turn_s
            whole = min(int((now - job.started) / turn_s + 1e-9), job.trajectory.turns - job.turns_done - 1)
            job.turns_done += whole
            self._recorder.busy_slot_s += now - job.started
            self._recorder.lost_slot_s += now - job.started - whole * turn_s
        aborted.sort(key=lambda job: job.started)
        self._queue.extendleft(reversed(aborted))
        self._dispatch()

    def _dispatch(self) -> None:
        while self._queue and self._running:
            rank = min(self._running, key=lambda rank: (len(self._running[rank]), rank))
            if len(self._running[rank]) >= self._slots:
                return
            job = self._queue.popleft()
            self._running[rank].append(job)
            job.started = self._loop.time()
            self._at_work_since.setdefault(rank, job.started)
            left_s = (job.trajectory.turns - job.turns_done) * job.trajectory.turn_s
            job.timer = self._loop.call_later(left_s, self._done, rank, job)

    def _done(self, rank: int, job: _RunningTrajectory) -> None:
        self._running[rank].remove(job)
        self._recorder.busy_slot_s += self._loop.time() - job.started
        self.completed += 1
        self.progressed.set()
        self._dispatch()
        if not self._running[rank]:
            self._rests(rank)

    def _rests(self, rank: int) -> None:
        since = self._at_work_since.pop(rank, None)
        if since is not None:
            self._recorder.serving_gpu_s += (self._loop.time() - since) * self._gpus_each


class SimulatedPipeline:
    """One pipeline: its hooks, and its life from the first request to the last release."""

    def __init__(self, name: str, scenario: Scenario, workload: Workload, steps: Steps, recorder: Recorder) -> None:
        self.name = name
        self.ended_at = 0.0
        self.clusters = {
            TRAIN: ClusterSpec(gpus=workload.train),
            GENERATION_CLUSTER: ClusterSpec(
                gpus=workload.infer, tp_size=workload.tp_size, slots_per_bundle=scenario.slots
            ),
        }
        self._scenario, self._workload, self._steps, self._recorder = scenario, workload, steps, recorder
        self._engine = Engine(scenario.slots, recorder, workload.tp_size)
        self._leaving = False  # it gives its workers back itself, so a shrink now is for nobody else
        self._awake: set[int] = set()

    async def shrink(self, ranks: Collection[int]) -> None:
        """Hook. Turns abort at the decision; the GPUs are free after the time that a shrink takes."""
        ranks = [rank for rank in ranks if rank in self._awake]
        gpus = self._gpus_of(ranks)
        self._engine.abort(ranks)
        self._recorder.resizes += len(ranks)
        self._awake.difference_update(ranks)
        self._recorder.use(gpus, self.name, Use.SHRINK)
        self._recorder.bundles(self.name, -len(ranks))
        if ranks:
            await asyncio.sleep(self._scenario.shrink_s)
            self._recorder.free(gpus, preempted=not self._leaving)

    async def expand(self, ranks: Mapping[int, Sequence[int]]) -> None:
        """Hook. A rank serves after the time that an expand takes."""
        self._recorder.resizes += len(ranks)
        self._recorder.use(self._gpus_of(ranks), self.name, Use.EXPAND)
        self._recorder.bundles(self.name, len(ranks))
        await asyncio.sleep(self._scenario.expand_s)
        self._recorder.use(self._gpus_of(ranks), self.name, Use.SERVE)
        self._awake.update(ranks)
        for rank in sorted(ranks):
            self._engine.serve(rank)

    async def enter(self, scheduler: PipelineApi) -> None:
        await scheduler.register_pipeline(self.name, clusters=self.clusters, hooks=self, weight=self._workload.weight)
        await scheduler.admit_pipeline(self.name)

    async def live(self, scheduler: PipelineApi) -> None:
        for trajectories in self._steps:
            await self._generate(scheduler, trajectories)
            await self._train(scheduler)

    async def _generate(self, scheduler: PipelineApi, trajectories: Sequence[Trajectory]) -> None:
        batch = len(trajectories)
        start = self._now()
        self._demand(batch)
        await scheduler.request_gpus(self.name, GENERATION_CLUSTER, Priority.GENERATION, step_target_estimate=batch)
        self._recorder.waited(self.name, GENERATION_CLUSTER, Priority.GENERATION.name, start)
        self._engine.begin(trajectories)
        reported = -1
        while self._engine.completed < batch:
            completed = self._engine.completed
            if completed * REPORTS // batch > reported:
                reported = completed * REPORTS // batch
                self._demand(batch - completed)
                await scheduler.report_progress(ProgressReport(self.name, completed=completed, target=batch))
            self._engine.progressed.clear()
            if self._engine.completed == completed:
                await self._engine.progressed.wait()
        self._demand(0)
        await scheduler.clear_progress(self.name)

    async def _train(self, scheduler: PipelineApi) -> None:
        gpus = self._workload.train
        start = self._now()
        self._recorder.reserve(gpus)
        await scheduler.request_gpus(self.name, TRAIN, Priority.OLD_LOG_PROBS)
        self._recorder.unreserve(gpus)
        self._recorder.waited(self.name, TRAIN, Priority.OLD_LOG_PROBS.name, start)
        self._recorder.use(gpus, self.name, Use.TRAIN)
        await asyncio.sleep(self._scenario.log_probs_s)
        start = self._now()
        self._recorder.free(gpus)
        self._recorder.reserve(gpus)
        await scheduler.notify_release_then_request_gpus(
            self.name, release=TRAIN, request=TRAIN, priority=Priority.ACTOR_TRAINING
        )
        self._recorder.unreserve(gpus)
        self._recorder.waited(self.name, TRAIN, Priority.ACTOR_TRAINING.name, start)
        self._recorder.use(gpus, self.name, Use.TRAIN)
        await asyncio.sleep(self._scenario.training_s)
        self.ended_at = self._now()
        await self._leave(scheduler)
        self._recorder.free(gpus)
        await scheduler.notify_release_gpus(self.name, TRAIN)

    async def _leave(self, scheduler: PipelineApi) -> None:
        self._leaving = True
        await scheduler.await_release_gpus(self.name, GENERATION_CLUSTER)
        self._leaving = False

    def _demand(self, remaining: int) -> None:
        reach = self.clusters[GENERATION_CLUSTER].bundles
        self._recorder.demand(self.name, remaining, self._scenario.slots, reach)

    def _gpus_of(self, ranks: Iterable[int]) -> list[int]:
        bundles = self.clusters[GENERATION_CLUSTER].bundles
        return [gpu for rank in ranks for gpu in bundles[rank]]

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

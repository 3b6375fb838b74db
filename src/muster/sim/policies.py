"""How long does a scenario take under a policy?

`muster` is the real scheduler on virtual time, `gap-ratio` the published baseline. `static` gives every pipeline its
own training GPUs and nothing else; `serial` runs the pipelines one after the other on everything. Those two need no
decisions, so the real scheduler carries them out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from muster.sharing.api import PipelineApi
from muster.sharing.scheduler import Scheduler
from muster.sim import events, virtual
from muster.sim.gap_ratio import GapRatioScheduler
from muster.sim.pipelines import SimulatedPipeline
from muster.sim.recording import Recorder, Recording
from muster.sim.scenarios import Scenario
from muster.sim.trainings import SimulatedTraining, TrainingLoad
from muster.types.sharing import Pool, SharingEvent


class Policy(StrEnum):
    MUSTER = "muster"
    GAP_RATIO = "gap-ratio"
    STATIC = "static"
    SERIAL = "serial"


@dataclass(frozen=True)
class SimulationResult:
    scenario: str
    policy: Policy
    seed: int
    makespan: float
    lower_bound: float
    recording: Recording
    training_resizes: int = 0  # of the training beside it


def simulate(scenario: Scenario, policy: Policy, seed: int, beside: TrainingLoad | None = None) -> SimulationResult:
    """One run, from the first request to the end of the last training; with an elastic training beside it or not."""
    return virtual.run(_simulate(scenario, policy, seed, beside))


async def _simulate(scenario: Scenario, policy: Policy, seed: int, beside: TrainingLoad | None) -> SimulationResult:
    drawn = scenario.draw(seed)
    if policy is Policy.STATIC:
        scenario = replace(scenario, workloads=tuple(replace(one, infer=one.train) for one in scenario.workloads))
    one_switch = scenario.shrink_s + scenario.expand_s
    recorder = Recorder(scenario.gpus, asyncio.get_running_loop().time, one_switch)
    pipelines = [
        SimulatedPipeline(f"p{at}", scenario, workload, steps, recorder)
        for at, (workload, steps) in enumerate(zip(scenario.workloads, drawn, strict=True))
    ]
    scheduler = _scheduler(scenario, policy, recorder, 0 if beside is None else 1)
    await scheduler.start()
    training = None
    try:
        if beside is not None and isinstance(scheduler, Scheduler):
            training = SimulatedTraining("training", scenario.gpus + 1, beside, recorder)
            training.enter(scheduler)
        for pipeline in pipelines:
            await pipeline.enter(scheduler)
        if policy is Policy.SERIAL:
            for pipeline in pipelines:
                await pipeline.live(scheduler)
        else:
            await _together(pipelines, scheduler)
    finally:
        if training is not None:
            training.leave()
        await scheduler.stop()
    resized = 0 if training is None else training.resizes
    makespan = max(pipeline.ended_at for pipeline in pipelines)
    return SimulationResult(
        scenario.name, policy, seed, makespan, scenario.lower_bound(seed), recorder.finish(), resized
    )


def _scheduler(scenario: Scenario, policy: Policy, recorder: Recorder, more: int) -> PipelineApi:
    def heard(event: SharingEvent) -> None:
        if event.kind not in events.SILENT:
            recorder.decided(events.decision(event, event.at))

    pool = Pool(gpus=scenario.gpus + more, gpus_per_node=scenario.gpus_per_node)
    if policy is Policy.GAP_RATIO:
        return GapRatioScheduler(pool, heard)
    return Scheduler(pool, on_event=heard, logs_grants=False)


async def _together(pipelines: Iterable[SimulatedPipeline], scheduler: PipelineApi) -> None:
    async with asyncio.TaskGroup() as group:
        for pipeline in pipelines:
            group.create_task(pipeline.live(scheduler), name=pipeline.name)

"""What is it worth to have trainings and pipelines on the same GPUs, and what does a change of hands cost?

python -m bench.pool [--json] [--only PART] [--repeat N]
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import cast

from bench import handovers, report
from bench.report import Figure, Goal, Sample, compared, p50, p99, spread
from bench.sharing import a_pool, at_most
from muster.core.sharing.planner import plan
from muster.sharing import Priority
from muster.sim import scenarios, useful
from muster.sim.policies import Policy, SimulationResult, simulate
from muster.sim.scenarios import Scenario
from muster.sim.trainings import TrainingLoad
from muster.types.sharing import (
    ClusterSpec,
    Crew,
    Elasticity,
    LeaseState,
    PipelineId,
    Request,
    Shares,
    WorkerLease,
    mask_of,
)

SEEDS = (range(1, 6), range(6, 26))
USEFUL_PERCENT = 92.0
LATER = 1.02
SIZES = ((64, 64, 512, 20.0), (64, 64, 2048, 100.0))  # pipelines, trainings, GPUs, ms
HANDOVERS = 20
ELASTICITIES = ("fixed", "lend", "fill")


# A training that fills what pipelines leave ------------------------------------------------------


def fill(given: argparse.Namespace) -> Iterator[Figure]:
    """The built-in scenarios on virtual time with the real scheduler, each alone and with one training beside it."""
    note = f"{_CONDITIONS}; {_COULD_BE}"  # said once
    for scenario in scenarios.BUILT_IN.values():
        for usual in SEEDS:
            seeds = report.share(usual, given.repeat)
            alone = [simulate(scenario, Policy.MUSTER, seed) for seed in seeds]
            beside = [simulate(scenario, Policy.MUSTER, seed, TrainingLoad()) for seed in seeds]
            for figure in _filled(f"{scenario.name}, seeds {seeds[0]}–{seeds[-1]}", scenario, alone, beside):
                yield _noted(figure, note)
                note = ""


def _filled(
    name: str, scenario: Scenario, alone: Sequence[SimulationResult], beside: Sequence[SimulationResult]
) -> Iterator[Figure]:
    def percent(share: object, outcomes: Sequence[SimulationResult]) -> list[float]:
        assert callable(share)
        return [100 * share(scenario, outcome) for outcome in outcomes]

    slots = percent(useful.by_slots, beside)
    peers = {
        "without": _mean(percent(useful.by_slots, alone)),
        "all at once": _mean(percent(useful.if_all_ran_at_once, beside)),
        "with hindsight": _mean(percent(useful.with_hindsight, beside)),
    }
    yield Figure(
        f"{name}: GPU time that does useful work, by slots",
        _mean(slots),
        "%",
        f"≥ {USEFUL_PERCENT:g} %",
        _mean(slots) >= USEFUL_PERCENT,
        {who: round(value, 1) for who, value in peers.items()},
        "",
        len(slots),
        round(min(slots), 1),
    )
    gpus = percent(useful.by_gpus, beside)
    yield Figure(
        f"{name}: GPUs that serve something, train or fill",
        _mean(gpus),
        "%",
        "none, told beside",
        True,
        {"without": round(_mean(percent(useful.by_gpus, alone)), 1)},
        "",
        len(gpus),
        round(min(gpus), 1),
    )
    ratio = sum(one.makespan for one in beside) / sum(one.makespan for one in alone)
    each = [one.makespan / other.makespan for one, other in zip(beside, alone, strict=True)]
    makespan = at_most(f"{name}: makespan of the pipelines, beside it ÷ without", ratio, LATER, "", {})
    yield replace(makespan, samples=len(each), worst=round(max(each), 3))
    resized = _mean([one.recording.resizes for one in beside])
    yield Figure(
        f"{name}: resizes of pipelines",
        resized,
        "",
        "none, told beside",
        True,
        {"without": round(_mean([one.recording.resizes for one in alone]), 1)},
        f"the training changed its size {_mean([one.training_resizes for one in beside]):.1f} times",
        len(each),
    )


_LOAD = TrainingLoad()
_CONDITIONS = (
    "the training's minimum sits on a ninth GPU of its own, which is not counted; each of its changes stops all its "
    f"workers for {_LOAD.vacate_s + _LOAD.return_s:g} s"
)
_COULD_BE = (
    "'all at once': every unfinished trajectory runs, on just the GPUs that it takes, and changes are free; "
    "'with hindsight': the best fixed number of GPUs for each step by somebody who knows all durations, changes free"
)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


# The planner -------------------------------------------------------------------------------------


def planner(given: argparse.Namespace) -> Iterator[Figure]:
    """One decision about a pool of which half is in the hands of trainings, with claims of everybody."""
    for pipelines, trainings, gpus, limit in SIZES:
        shares = a_shared_pool(pipelines, trainings, gpus)
        samples = []
        for _ in range(report.times(20, given.repeat)):
            gc.collect()
            begun = time.perf_counter()
            made = plan(shares, 1000.0)
            samples.append(1000 * (time.perf_counter() - begun))
        name = f"plan() for {pipelines} pipelines and {trainings} trainings on {gpus:,} GPUs"
        moved = f"shrinks {len(made.shrinks)}, workers leave {len(made.leaves)}, expands {len(made.expands)}"
        note = f"{moved}, grants {len(made.grants)}, seats {len(made.seats)}"
        figure = at_most(name, p50(samples), limit, "ms", {}, note)
        yield replace(figure, p99=round(p99(samples), 2), **spread(samples))


def a_shared_pool(pipelines: int, trainings: int, gpus: int) -> Shares:
    """Even pipelines hold a quarter of the pool and odd ones have just opened; some ask for a stage. Trainings of every
    kind hold a half; one in eight lacks a worker of its minimum, and one in eight has a worker on its way out."""
    shares = a_pool(pipelines, gpus)
    part = gpus // trainings
    theirs = mask_of(gpu for gpu in range(gpus) if gpu % part >= part // 2)
    leases = {bundle: lease for bundle, lease in shares.leases.items() if not lease.mask & theirs}
    members = {}
    for at, (name, one) in enumerate(shares.pipelines.items()):  # its stage is on its own half and one worker's GPU
        stage = ClusterSpec(gpus=range(at * part, at * part + part // 2 + 1))
        members[name] = replace(one, clusters={**one.clusters, "actor_train": stage})
    crews: dict[str, Crew] = {}
    workers: dict[str, WorkerLease] = {}
    for at in range(trainings):
        uid, each = f"t{at:03}", 1 + at // 3 % 2
        places = [range(gpu, gpu + each) for gpu in range(at * part + part // 2, (at + 1) * part, each)]
        for place in places:
            state = LeaseState.DRAINING if at % 8 == 5 and place is places[0] else LeaseState.HELD
            lease = WorkerLease(uid, mask_of(place), state, 900.0, 900.0)
            workers[lease.key] = lease
        crews[uid] = _a_crew(uid, at, each, len(places))
    requests = tuple(
        Request(at + 1, PipelineId(f"p{at:03}"), "actor_train", Priority.ACTOR_TRAINING, 999.0)
        for at in range(0, pipelines, 8)
    )
    return replace(shares, pipelines=members, leases=leases, crews=crews, workers=workers, requests=requests)


def _a_crew(uid: str, at: int, each: int, has: int) -> Crew:
    elasticity = cast(Elasticity, ELASTICITIES[at % 3])
    wanted = has if elasticity == "fixed" else has + 2 if elasticity == "lend" else max(1, has // 2)
    least = has + 1 if at % 8 == 7 else max(1, has // 4)
    wanted = max(least, wanted)
    return Crew(
        training=uid,
        name=f"default/{uid}",
        gpus_each=each,
        min=least,
        wanted=wanted,
        most=2 * wanted if elasticity == "fill" else wanted,
        elasticity=elasticity,
        created=float(at),
        asked_at=900.0 + at,
        admitted=True,
        vacate_s=0.3,
        return_s=0.5,
    )


# Hand-overs --------------------------------------------------------------------------------------


def handover(given: argparse.Namespace) -> Iterator[Figure]:
    """A real training gives one of its GPUs to a pipeline and gets it back, again and again, also between kills."""
    found = handovers.measure(report.times(HANDOVERS, given.repeat))
    stopped: list[Sample] = [found.failed] if found.failed else []
    kept = f"it had kept the GPU for {p50([one.kept_s for one in found.done]):.1f} s (p50)" if found.done else ""
    done = f"{len(found.done)} hand-overs"
    vacated = [*found.vacating(), *stopped]
    yield _noted(compared("request → granted, from a training that fills", vacated, {}, "ms", Goal(p50=300)), kept)
    returned = [*found.returning(), *stopped]
    name = "release → a step of the training at its old size"
    yield _noted(compared(name, returned, {}, "ms", Goal(p50=500)), "from the log of its ranks")
    again = "steps whose commit had returned on rank 0, and that the next round did again"
    yield at_most(f"committed steps lost in {done}", found.lost_to_handovers, 0, "", {}, f"of {found.steps}: {again}")
    peers = {"committed and done again": found.lost_to_kills}
    note = "a commit returns at once and is safe a moment later; state.saved says so"
    yield at_most(
        f"steps known to be safe lost, {found.kills} workers killed", found.lost_though_safe, 0, "", peers, note
    )
    note = "by what its ranks say of the devices that they see"
    yield at_most(f"{done}: steps on the GPU while it was lent", found.steps_on_lent, 0, "", {}, note)
    shown = f"training {found.training_gpu_s:.1f} and pipeline {found.pipeline_gpu_s:.1f} GPU s"
    there = found.wall_s * handovers.GPUS
    note = f"{shown} of {there:.1f}"
    twice = max(found.counted_twice_s, found.training_gpu_s + found.pipeline_gpu_s - there)
    yield at_most(f"{done}: GPU-seconds counted twice", max(0.0, twice), 0, "s", {}, note)


def _noted(figure: Figure, note: str) -> Figure:
    return replace(figure, note="; ".join(part for part in (note, figure.note) if part))


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeat", type=float, default=1.0, help=report.REPEAT)


PARTS = {"fill": fill, "planner": planner, "handover": handover}

if __name__ == "__main__":
    sys.exit(report.run(__doc__ or "", PARTS, _options))

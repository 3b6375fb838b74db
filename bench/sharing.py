"""How well and how fast does the scheduler share GPUs? With the published baseline and two simpler ones beside it.

python -m bench.sharing [--json] [--only PART] [--repeat N]
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from bench import report
from bench.report import Figure, below, p50
from muster.core.sharing.planner import plan
from muster.sharing import ClusterSpec, Pool, Priority, Scheduler
from muster.sim import results, scenarios
from muster.sim.policies import Policy
from muster.sim.results import Summary
from muster.sim.scenarios import Scenario
from muster.types.sharing import (
    GENERATION_CLUSTER,
    Bundle,
    Lease,
    LeaseState,
    Pipeline,
    PipelineId,
    Rollout,
    Shares,
    Stream,
)
from tests.sharing import disorder

SEEDS = (1, 2, 3, 4, 5)
OTHERS = tuple(range(6, 26))  # whether it holds elsewhere, too
RATIOS = {"tail": (1.11, 1.16), "mixed": (1.32, 1.37), "even": (1.11, 1.15), "skewed": (1.16, 1.19)}  # goal, published
RESIZES_PERCENT = 55
SIZES = ((8, 64, 2.0, "100 ms"), (64, 512, 20.0, "33 s"), (64, 2048, 100.0, "fails"), (256, 8192, 800.0, "-"))


def at_most(name: str, value: float, limit: float, unit: str, peers: Mapping[str, object], note: str = "") -> Figure:
    return Figure(name, value, unit, f"≤ {limit:g} {unit}".rstrip(), value <= limit + 1e-9, dict(peers), note)


# Makespan and resizes ----------------------------------------------------------------------------


def makespan(given: argparse.Namespace) -> Iterator[Figure]:
    for scenario in scenarios.BUILT_IN.values():
        seeds = report.share(SEEDS, given.repeat)
        found = {summary.policy: summary for summary in results.compare(scenario, Policy, seeds)}
        ours = found[Policy.MUSTER]
        goal, published = RATIOS[scenario.name]
        peers = {policy: round(one.ratio, 3) for policy, one in found.items() if policy != Policy.MUSTER}
        yield at_most(
            f"{scenario.name}: makespan ÷ lower bound", ours.ratio, goal, "", peers, f"published about {published}"
        )
        yield from _calm(scenario.name, ours, found[Policy.GAP_RATIO])
        yield from _elsewhere(scenario, goal, report.share(OTHERS, given.repeat))


def _elsewhere(scenario: Scenario, goal: float, seeds: Sequence[int]) -> Iterator[Figure]:
    """With other seeds than those that the goals are about."""
    ours, theirs = results.compare(scenario, (Policy.MUSTER, Policy.GAP_RATIO), seeds)
    told = f"{scenario.name}, seeds {seeds[0]}–{seeds[-1]}"
    yield at_most(f"{told}: makespan ÷ lower bound", ours.ratio, goal, "", {"gap-ratio": round(theirs.ratio, 3)})
    yield _resizes(told, ours, theirs)


def _calm(name: str, ours: Summary, theirs: Summary) -> Iterator[Figure]:
    yield _resizes(name, ours, theirs)
    peers = {"gap-ratio": theirs.vain_shrinks}
    yield at_most(f"{name}: shrinks without a grant", ours.vain_shrinks, 0, "", peers)
    peers = {"gap-ratio": round(theirs.idle_wanted_gpu_s)}
    yield at_most(f"{name}: idle GPU reachable by unmet demand", ours.idle_wanted_gpu_s, 0, "GPU s", peers)


def _resizes(name: str, ours: Summary, theirs: Summary) -> Figure:
    share = 100 * ours.resizes / theirs.resizes
    counts = {"muster": round(ours.resizes, 1), "gap-ratio": round(theirs.resizes, 1)}
    return at_most(f"{name}: resizes against gap-ratio", share, RESIZES_PERCENT, "%", counts)


# The planner -------------------------------------------------------------------------------------


def planner(given: argparse.Namespace) -> Iterator[Figure]:
    """One decision about a pool in which half of the pipelines hold their share and the other half has just opened."""
    for pipelines, gpus, limit, published in SIZES:
        shares = a_pool(pipelines, gpus)
        samples = []
        for _ in range(report.times(5, given.repeat)):
            gc.collect()
            begun = time.perf_counter()
            plan(shares, 1000.0)
            samples.append(1000 * (time.perf_counter() - begun))
        name = f"plan() for {pipelines} pipelines on {gpus:,} GPUs"
        yield at_most(name, p50(samples), limit, "ms", {"published": published}, f"worst {max(samples):.3g} ms")


def a_pool(pipelines: int, gpus: int) -> Shares:
    """All maps full. Three in four GPUs are held by the even pipelines; the odd ones have opened and hold nothing."""
    everything = tuple(range(gpus))
    per_pipeline = gpus // pipelines
    members: dict[PipelineId, Pipeline] = {}
    rollouts: dict[PipelineId, Rollout] = {}
    leases: dict[Bundle, Lease] = {}
    for at in range(pipelines):
        name = PipelineId(f"p{at:03}")
        train = tuple(range(at * per_pipeline, (at + 1) * per_pipeline))
        infer = ClusterSpec(gpus=everything, slots_per_bundle=8)
        clusters = {"actor_train": ClusterSpec(gpus=train), GENERATION_CLUSTER: infer}
        members[name] = Pipeline(name, clusters, admitted=True, shrink_s=2.0, expand_s=6.0)
        target = 64 + 16 * (at % 7)
        if at % 2:
            rollouts[name] = Rollout(target * per_pipeline, opened_at=999.0, waiting_since=999.0)
            continue
        rollouts[name] = Rollout(
            None, {"": Stream(target * per_pipeline, 5 * (at % 5) * per_pipeline)}, opened_at=900.0, rate=0.2
        )
        for gpu in _held(at, per_pipeline):
            bundle = Bundle(name, GENERATION_CLUSTER, gpu)
            leases[bundle] = Lease(bundle, 1 << gpu, LeaseState.HELD, 1, Priority.GENERATION, 900.0, 900.0)
    return Shares(Pool(gpus, min(8, gpus)), members, leases, (), rollouts, epoch=1)


def _held(at: int, per_pipeline: int) -> Sequence[int]:
    """Its own part of the pool and the first half of its neighbour's."""
    return range(at * per_pipeline, (at + 1) * per_pipeline + per_pipeline // 2)


# Requests ----------------------------------------------------------------------------------------


class _Willing:
    async def shrink(self, ranks: Sequence[int]) -> None:
        """At once."""

    async def expand(self, ranks: Mapping[int, Sequence[int]]) -> None:
        """At once."""


def grants(given: argparse.Namespace) -> Iterator[Figure]:
    """From the request to the grant of idle GPUs, with the journal on."""
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as folder:
        fixed, generation = asyncio.run(_grants(Path(folder) / "journal.db", report.times(200, given.repeat)))
    yield below("request → grant in process, a fixed cluster (p50)", p50(fixed), 1.0, "ms")
    yield below("request → grant in process, generation (p50)", p50(generation), 1.0, "ms")


def ray(given: argparse.Namespace) -> Iterator[Figure]:
    """The same against a scheduler in a Ray cluster of three nodes, in a network namespace: Ray takes no loopback."""
    apart = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c"]
    inside = 'ip link set lo up; exec "$@"'
    command = [*apart, inside, "lo", sys.executable, "-m", "tests.sharing.ray_cases"]
    env = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=180)
    found = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}
    note = "" if found else f"Ray did not run here: {done.stderr.strip()[-200:]}"
    for kind in ("fixed", "generation"):
        name = f"request → grant over Ray, {'a fixed cluster' if kind == 'fixed' else kind} (p50)"
        yield below(name, found.get(f"{kind}_p50_ms"), 10.0, "ms", note=note)


async def _grants(journal: Path, times: int) -> tuple[list[float], list[float]]:
    scheduler = Scheduler(Pool(gpus=8, gpus_per_node=8), journal=journal)
    await scheduler.start()
    clusters = {"actor_train": ClusterSpec(gpus=range(4)), GENERATION_CLUSTER: ClusterSpec(gpus=range(8))}
    await scheduler.register_pipeline("p1", clusters=clusters, hooks=_Willing())
    await scheduler.admit_pipeline("p1")
    fixed: list[float] = []
    generation: list[float] = []
    for _ in range(times):
        begun = time.perf_counter()
        await scheduler.request_gpus("p1", "actor_train", Priority.ACTOR_TRAINING)
        fixed.append(1000 * (time.perf_counter() - begun))
        await scheduler.notify_release_gpus("p1", "actor_train")
        begun = time.perf_counter()
        await scheduler.request_gpus("p1", GENERATION_CLUSTER, Priority.GENERATION, step_target_estimate=64)
        generation.append(1000 * (time.perf_counter() - begun))
        await scheduler.await_release_gpus("p1", GENERATION_CLUSTER)
    await scheduler.stop()
    return fixed, generation


# Disorder ----------------------------------------------------------------------------------------


def chaos(given: argparse.Namespace) -> Iterator[Figure]:
    """Random operations on virtual time, with hooks that fail, hang and die."""
    history = disorder.Disorder()
    for seed in range(1, 1 + report.times(10, given.repeat)):
        history += disorder.run(seed, 1000)
    name = f"{history.operations:,} random operations"
    first = history.broken[0] if history.broken else ""
    yield at_most(f"{name}: invariants broken", len(history.broken), 0, "", {}, first)
    yield at_most(f"{name}: waiters without an answer", history.unanswered, 0, "", {})


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeat", type=float, default=1.0, help=report.REPEAT)


PARTS = {"makespan": makespan, "planner": planner, "grants": grants, "ray": ray, "disorder": chaos}

if __name__ == "__main__":
    sys.exit(report.run(__doc__ or "", PARTS, _options))

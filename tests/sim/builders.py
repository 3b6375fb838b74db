"""Scenarios and recordings for tests."""

from __future__ import annotations

from collections.abc import Sequence

from muster.sim.recording import GpuSpan, PolicyDecision, QueueWait, Recording, Use
from muster.sim.scenarios import Scenario, Workload


def a_workload(batch: int = 8, median_s: float = 20, sigma: float = 0.5, steps: int = 1, **more: object) -> Workload:
    given: dict[str, object] = {"train": (0, 1), "infer": (0, 1, 2, 3), "cap_s": 200.0, **more}
    return Workload(batch=batch, median_s=median_s, sigma=sigma, steps=steps, **given)  # type: ignore[arg-type]


def a_scenario(*workloads: Workload, gpus: int = 4, slots: int = 2) -> Scenario:
    return Scenario("small", workloads or (a_workload(),), gpus=gpus, gpus_per_node=gpus, slots=slots)


def two_pipelines(steps: int = 2) -> Scenario:
    return a_scenario(a_workload(16, steps=steps), a_workload(8, steps=steps, train=(2, 3)))


def a_recording(spans: Sequence[GpuSpan] = ()) -> Recording:
    return Recording(
        gpus=2,
        spans=tuple(spans) or (GpuSpan(0, "p0", Use.EXPAND, 0.0, 6.0), GpuSpan(0, "p0", Use.SERVE, 6.0, 20.0)),
        waits=(QueueWait("p1", "actor_train", "OLD_LOG_PROBS", 3.0, 5.0),),
        decisions=(PolicyDecision(4.0, "p0", "shrinking rank 1", "p1 gets its GPUs"),),
        resizes=3,
    )

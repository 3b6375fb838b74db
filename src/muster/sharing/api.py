"""What can be asked of a scheduler, wherever it runs? The port that pipelines, clients and simulations are written for.

`scheduler.Scheduler` is in this process, `remote.RemoteScheduler` behind HTTP, `ray.SchedulerHandle` elsewhere in a Ray
cluster. tests/contract/test_scheduler.py passes on all of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any, Protocol

from muster.types.sharing import (
    GENERATION_CLUSTER,
    ClusterSpec,
    Gpu,
    Priority,
    ProgressReport,
    Released,
    SharingEvent,
    Snapshot,
)


class RolloutApi(Protocol):
    """What a rollout loop needs of it."""

    async def request_gpus(
        self,
        pipeline: str,
        cluster: str,
        priority: Priority,
        step_target_estimate: int | None = None,
        timeout: float | None = None,
        *,
        rollout_id: str | None = None,
    ) -> list[Gpu]:
        """Wait for GPUs; which ones, sorted."""

    async def report_progress(self, report: ProgressReport) -> str | None:
        """Say how far a rollout is. Why that was not counted; "" or None if it was."""

    async def clear_progress(self, pipeline: str) -> None: ...


class PipelineApi(RolloutApi, Protocol):
    """And what the rest of a pipeline's program does."""

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def register_pipeline(
        self, pipeline: str, clusters: Mapping[str, ClusterSpec], hooks: Any = None, weight: float = 1.0
    ) -> None:
        """Make a pipeline known, or attach new hooks to one that is. Hooks are what `hooks.PipelineHooks` says; on Ray
        the handle of an actor with such methods."""

    async def admit_pipeline(self, pipeline: str) -> None: ...

    async def notify_release_then_request_gpus(
        self,
        pipeline: str,
        release: str,
        request: str,
        priority: Priority,
        step_target_estimate: int | None = None,
        timeout: float | None = None,
    ) -> list[Gpu]:
        """Release one cluster and ask for another in one step: nobody comes in between."""

    async def notify_release_gpus(self, pipeline: str, cluster: str) -> Released:
        """Give a cluster back. Returns when bundles that were being granted or drained are down too."""

    async def await_release_gpus(
        self, pipeline: str, cluster: str = GENERATION_CLUSTER, timeout: float | None = None
    ) -> Released:
        """Close the rollout and drain every generation bundle; returns when all are really vacated."""


class SchedulerApi(PipelineApi, Protocol):
    """And what those need who look after it."""

    async def unregister_pipeline(self, pipeline: str, why: str = "") -> None: ...

    async def kill_pipeline(self, pipeline: str, why: str = "", force: bool = False) -> Released:
        """End somebody else's pipeline: its hooks are asked to shrink, its process is not served any more."""

    async def quarantine_pipeline(self, pipeline: str, why: str) -> None:
        """For those who see that a pipeline is dead or silent."""

    async def lose_node(self, node: int, why: str = "node-lost") -> None:
        """A node's GPUs are out of use; bundles on them are dropped without hooks."""

    async def restore_node(self, node: int) -> None: ...

    def snapshot(self) -> Awaitable[Snapshot]:
        """In this process it is there without waiting: a `Snapshot` can be awaited, and is then itself."""

    async def events(self) -> list[SharingEvent]:
        """What was decided and seen, oldest first; times are on the scheduler's clock."""

    async def reports(self) -> dict[str, ProgressReport]:
        """The latest report of each pipeline, counted or not."""

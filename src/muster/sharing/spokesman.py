"""What does rank 0 of a pipeline say to the scheduler, and what does it do when it hears that something is wrong?

All of it runs on one event loop; `sync` is its blocking side. A pipeline that was quarantined comes back by itself:
its hooks shrink everything, and it asks again. One that was killed does not.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import TypeVar

from muster.errors import MusterError, NotFound, PipelineKilled, PipelineQuarantined, RequestRefused
from muster.sharing import pool_log
from muster.sharing.api import SchedulerApi
from muster.sharing.hooks import PipelineClient, PipelineHooks
from muster.types.sharing import GENERATION_CLUSTER, ClusterSpec, Gpu, Priority

T = TypeVar("T")

LOOK_S = 5.0  # how often a generation looks at the pool
GIVE_BACK_S = 30.0  # how long somebody on the way out waits for its engine to be down

log = logging.getLogger("muster.sharing")


class Spokesman:
    def __init__(
        self,
        scheduler: SchedulerApi,
        pipeline: str,
        clusters: Mapping[str, ClusterSpec],
        hooks: PipelineHooks,
        weight: float,
    ) -> None:
        self.scheduler, self.pipeline, self.clusters = scheduler, pipeline, clusters
        self._hooks, self._weight = hooks, weight
        self._client = PipelineClient(scheduler, pipeline)
        self._left = 0  # of the open rollout
        self._rollout = ""

    async def register(self) -> None:
        await self.scheduler.register_pipeline(self.pipeline, self.clusters, self._hooks, self._weight)
        await self.scheduler.admit_pipeline(self.pipeline)

    async def unregister(self) -> None:
        """On the way out: everything down first, then out of the pool."""
        try:
            await self._let_go(GIVE_BACK_S)
        except PipelineKilled:
            pass  # it is down, and leaves: what is left of it is free
        except MusterError as error:  # then nobody knows what is on its GPUs: the pool finds out when it falls silent
            log.warning("%s could not give everything back: %s", self.pipeline, error.message)
            return
        await self.scheduler.unregister_pipeline(self.pipeline, "its process has ended")

    async def _let_go(self, timeout: float | None) -> None:
        if GENERATION_CLUSTER not in self.clusters:
            return
        try:
            await self.scheduler.await_release_gpus(self.pipeline, timeout=timeout)
        except PipelineKilled:  # it was asked to shrink, and may not have been able to
            await self._hooks.shrink(list(range(len(self.clusters[GENERATION_CLUSTER].bundles))))
            raise

    # Generation

    async def open(self, rollout: str, target: int, timeout: float | None) -> list[Gpu]:
        """Returns when one bundle was awake; the gate says whether it still is."""
        self._rollout, self._left = rollout, target
        return await self._again(lambda: self._open(timeout))

    async def _open(self, timeout: float | None) -> list[Gpu]:
        gpus = await self._client.signal_rollout_demand(self._rollout, self._left, timeout)
        await self._client.begin_progress_batch(self._left)
        return gpus

    async def completed(self, number: int) -> None:
        self._left = max(0, self._left - number)
        await self._client.bump_completed(number)

    async def close(self, done: int = 0) -> None:
        """The rollout is over, and every bundle is down when this returns. `done` was not told before."""
        try:
            await self._client.bump_completed(done)
            await self._client.end_progress_batch()
        except RequestRefused as error:
            log.info("%s: %s", self.pipeline, error.message)  # somebody has closed it before
        except PipelineQuarantined:
            pass  # what follows says so, too, and does something about it
        await self._again(lambda: self._let_go(None))

    async def look(self) -> str:
        """Why no bundle is awake, in words. Comes back if it was quarantined; raises if nothing can be hoped for."""
        snapshot = await self.scheduler.snapshot()
        if self.pipeline in snapshot.quarantined:
            await self._again(lambda: self._open(None), first=False)
            return "it was quarantined, and has come back"
        if self.pipeline not in snapshot.open_rollouts:
            raise RequestRefused(f"the rollout of {self.pipeline} was closed by somebody else")
        return pool_log.holders(snapshot, self.pipeline)

    # Fixed stages

    async def request(self, cluster: str, priority: Priority, timeout: float | None) -> list[Gpu]:
        return await self._again(lambda: self.scheduler.request_gpus(self.pipeline, cluster, priority, timeout=timeout))

    async def release(self, cluster: str) -> None:
        try:
            await self.scheduler.notify_release_gpus(self.pipeline, cluster)
        except NotFound as error:
            log.warning("%s was not released: %s", cluster, error.message)

    # Parts

    async def _again(self, work: Callable[[], Awaitable[T]], *, first: bool = True) -> T:
        """What was quarantined, for silence or a hook that failed, begins anew: it has to shrink everything first."""
        if first:
            try:
                return await work()
            except PipelineKilled:
                raise
            except PipelineQuarantined as error:
                log.warning("%s; it is registered again", error.message)
        await self.register()
        return await work()

"""When do new hooks count for a pipeline of which nobody knows what is awake? Once they have shrunk all its ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from muster.core.sharing import leases
from muster.errors import AlreadyExists, PipelineQuarantined, RequestRefused
from muster.sharing import execution
from muster.sharing.hooks import PipelineHooks
from muster.sharing.pool_state import PoolState
from muster.types.sharing import PipelineId, Tenant


class Proofs:
    def __init__(self, state: PoolState) -> None:
        self._state = state
        self._proving: dict[PipelineId, asyncio.Task[str]] = {}

    def cancel(self) -> Iterable[asyncio.Task[str]]:
        """Those that are ending."""
        for proof in self._proving.values():
            proof.cancel()
        return self._proving.values()

    def supersede(self, name: PipelineId) -> None:
        """Another process comes for it. The one before must be gone: its hooks were lost, or do not count any more."""
        if self._state.shares.pipelines[name].movable:
            raise AlreadyExists(
                f"{name} is registered by another process, whose hooks are attached",
                hint="end that process, or unregister the pipeline first",
            )
        self._state.quarantine(name, "another process has taken its place")

    async def _shrunk(self, hooks: PipelineHooks, ranks: dict[int, list[int]]) -> str:
        await self._state.written()
        return await execution.shrink_all(hooks, ranks, self._state.limits)

    async def prove(self, name: PipelineId, hooks: PipelineHooks, tenant: Tenant) -> None:
        """New hooks for a pipeline of which nobody knows what is awake count once they have shrunk all its ranks."""
        if name in self._proving:
            raise RequestRefused(f"{name} is being registered by somebody else", retryable=True)
        there = self._state.shares.pipelines[name]
        ranks = {rank: list(bundle) for rank, bundle in enumerate(there.infer.bundles)}
        proof = asyncio.create_task(self._shrunk(hooks, ranks))
        self._proving[name] = proof
        try:
            await asyncio.wait({proof})
        finally:
            proof.cancel()
            self._proving.pop(name, None)
        now = self._state.begin()
        failure = proof.result()
        after = self._state.shares.pipelines.get(name)
        if after is None or not (after.quarantined or after.unsure) or after.clusters != there.clusters:
            raise RequestRefused(f"{name} was changed by somebody else meanwhile", retryable=True)
        if failure:
            self._state.quarantine(name, f"shrink {failure}")
            raise PipelineQuarantined(f"{name} stays quarantined: shrink {failure}")
        self._state.drop_hooks(name)
        self._state.attach(name, hooks)
        self._state.commit(leases.reinstated(leases.occupied(self._state.shares, name, tenant), name, now))
        self._state.note("attached", name, "its new hooks have shrunk all its ranks")
        await self._state.written()

"""How is a pipeline ended by somebody else? At once for its callers, and for its GPUs when they are known to be free.

Its hooks are asked once to shrink what it generates on. A fixed stage has no hook: its owner may still release it. What
is not given back stays quarantined, and whoever learns that the process is gone unregisters the pipeline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from muster.core.sharing import demand, leases
from muster.errors import PipelineKilled
from muster.sharing import execution
from muster.sharing.hooks import PipelineHooks
from muster.sharing.pool_state import PoolState
from muster.types import plural
from muster.types.codec import readable
from muster.types.sharing import GENERATION_CLUSTER, Gpu, PipelineId, Priority, Released


class Kills:
    def __init__(self, state: PoolState) -> None:
        self._state = state
        self._shrinking: dict[PipelineId, asyncio.Task[None]] = {}

    def cancel(self) -> Iterable[asyncio.Task[None]]:
        """Those that are ending."""
        for task in self._shrinking.values():
            task.cancel()
        return list(self._shrinking.values())

    def forget(self, name: PipelineId) -> None:
        """It is unregistered, so nothing is waited for."""
        if (task := self._shrinking.pop(name, None)) is not None:
            task.cancel()

    async def kill(self, name: PipelineId, why: str, *, force: bool) -> Released:
        state = self._state
        before = self._held(name)
        if not demand.known(state.shares, name).killed:
            self._begin(name, readable(why) or "no reason was given")
        if force and name in state.shares.pipelines:
            self.forget(name)
            state.bury(name, "it was killed by force: nobody has made sure that its GPUs are empty")
        if (task := self._shrinking.get(name)) is not None:
            await asyncio.wait({task})
        await state.written()
        kept = self._held(name) if name in state.shares.pipelines else set()
        freed = tuple(sorted(before - kept))
        if not kept:
            return Released(freed, f"{name} is gone; {plural.counted(len(freed), 'GPU')} freed")
        told = f"{name} is ended, and keeps GPU {', '.join(map(str, sorted(kept)))} until its process is gone"
        return Released(freed, told)

    def bury_if_empty(self, name: PipelineId) -> None:
        there = self._state.shares.pipelines.get(name)
        if there is not None and there.killed and not self._held(name) and name not in self._shrinking:
            self._state.bury(name, "it was killed, and has given everything back")

    def _begin(self, name: PipelineId, why: str) -> None:
        state = self._state
        there, hooks = state.shares.pipelines[name], state.hooks_of(name)
        ending = state.runners[name].cancel() if name in state.runners else []
        infer = [] if GENERATION_CLUSTER not in there.clusters else there.infer.bundles
        ranks = {
            lease.bundle.rank: list(infer[lease.bundle.rank])
            for lease in state.shares.leases.values()
            if lease.bundle.pipeline == name and lease.priority is Priority.GENERATION
        }
        gpus = tuple(sorted(self._held(name)))
        state.commit(leases.killed(state.shares, name, why))
        state.drop_hooks(name)
        state.reports.pop(name, None)
        state.waiters.fail_pipeline(name, PipelineKilled(f"{name} was killed: {why}"))
        state.note("killed", name, why, gpus=gpus)
        if ranks and hooks is not None and there.movable:
            self._shrinking[name] = asyncio.create_task(self._shrink(name, hooks, ranks, ending))
        else:
            self.bury_if_empty(name)

    async def _shrink(
        self, name: PipelineId, hooks: PipelineHooks, ranks: dict[int, list[int]], ending: list[asyncio.Task[None]]
    ) -> None:
        state = self._state
        if ending:
            await asyncio.wait(ending)  # a call that was cancelled has ended, or counts as stuck
        await state.written()
        call = asyncio.create_task(execution.shrink(hooks, ranks, state.limits.poll_s))
        try:
            await execution.within(state.limits.timeout_s, call)
        except execution.HookFailed as error:
            state.note("hook-failed", name, f"shrink {error}; it was killed, and its GPUs stay quarantined")
            self._shrinking.pop(name, None)
            return
        self._shrinking.pop(name, None)
        there = state.shares.pipelines.get(name)
        if there is None or not there.killed:
            return
        gpus = tuple(sorted(gpu for owned in ranks.values() for gpu in owned))
        state.commit(leases.shrunk(state.shares, name, asyncio.get_running_loop().time()))
        state.note("vacated", name, "it was killed", cluster=GENERATION_CLUSTER, ranks=tuple(sorted(ranks)), gpus=gpus)
        self.bury_if_empty(name)

    def _held(self, name: PipelineId) -> set[Gpu]:
        shares = self._state.shares
        return {*self._state.gpus_of(one.bundle for one in shares.leases.values() if one.bundle.pipeline == name)}

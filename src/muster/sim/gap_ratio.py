"""How does the published baseline share GPUs? By gaps between due and held ratios, one global cycle at a time.

It has the scheduler's interface, so that the same simulated pipelines drive both. Its weaknesses are kept as they
are: demand lives only in pending requests and progress, a pipeline without either keeps its GPUs and is left out,
training shrinks what is in its way whether or not that helps, and a cycle ends only when its slowest hook has.
Its plan depends on nothing but its state, so a cycle every second finds something only after a change; a cycle is
therefore run on events, and once more a second after a cycle that changed something.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from muster.sharing.hooks import PipelineHooks
from muster.types.sharing import (
    GENERATION_CLUSTER,
    ClusterSpec,
    Pool,
    Priority,
    ProgressReport,
    Released,
    SharingEvent,
    gpus_of,
)

POLL_S = 1.0


@dataclass
class _Registered:
    clusters: Mapping[str, ClusterSpec]
    hooks: PipelineHooks
    progress: tuple[int, int] | None = None  # completed, target

    @property
    def infer(self) -> ClusterSpec:
        return self.clusters[GENERATION_CLUSTER]


@dataclass(eq=False)
class _Waiter:
    seq: int
    pipeline: str
    cluster: str
    priority: Priority
    estimate: int
    granted: asyncio.Future[list[int]]


@dataclass
class _Cycle:
    """What one cycle will do."""

    shrinks: dict[str, set[int]] = field(default_factory=dict)
    expands: dict[str, set[int]] = field(default_factory=dict)
    grants: list[_Waiter] = field(default_factory=list)
    releases: dict[str, asyncio.Future[None]] = field(default_factory=dict)

    @property
    def empty(self) -> bool:
        return not (self.shrinks or self.expands or self.grants or self.releases)


@dataclass
class _Share:
    """A pipeline that takes part in the division."""

    remaining: float
    percent: float
    ratio: float = 0.0
    target: int = 0


class GapRatioScheduler:
    def __init__(self, pool: Pool, on_event: Callable[[SharingEvent], None]) -> None:
        self._on_event = on_event
        self._pool = pool
        self._members: dict[str, _Registered] = {}
        self._held: dict[str, set[int]] = {}  # generation ranks; an empty set is a suspended allocation
        self._fixed: dict[tuple[str, str], int] = {}
        self._waiters: list[_Waiter] = []
        self._releasing: dict[str, asyncio.Future[None]] = {}
        self._changed = asyncio.Event()
        self._seq = 0
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._cycles(), name="gap-ratio")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def register_pipeline(
        self,
        pipeline: str,
        clusters: Mapping[str, ClusterSpec],
        hooks: PipelineHooks | None = None,
        weight: float = 1.0,
    ) -> None:
        assert hooks is not None
        self._members[pipeline] = _Registered(clusters, hooks)

    async def admit_pipeline(self, pipeline: str) -> None:
        """Every registered pipeline is admitted."""

    async def request_gpus(
        self,
        pipeline: str,
        cluster: str,
        priority: Priority,
        step_target_estimate: int | None = None,
        timeout: float | None = None,
        *,
        rollout_id: str | None = None,
    ) -> list[int]:
        self._seq += 1
        granted: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._waiters.append(_Waiter(self._seq, pipeline, cluster, priority, step_target_estimate or 0, granted))
        self._changed.set()
        return await granted

    async def report_progress(self, report: ProgressReport) -> None:
        self._members[report.pipeline].progress = (report.completed, report.target)
        self._changed.set()

    async def clear_progress(self, pipeline: str) -> None:
        self._members[pipeline].progress = None

    async def await_release_gpus(
        self, pipeline: str, cluster: str = GENERATION_CLUSTER, timeout: float | None = None
    ) -> Released:
        self._releasing[pipeline] = asyncio.get_running_loop().create_future()
        self._changed.set()
        await self._releasing[pipeline]
        return Released((), "all of it is vacated")

    async def notify_release_gpus(self, pipeline: str, cluster: str) -> Released:
        gpus = gpus_of(self._fixed.pop((pipeline, cluster), 0))
        self._changed.set()
        return Released(tuple(gpus), f"{len(gpus)} GPUs freed")

    async def notify_release_then_request_gpus(
        self,
        pipeline: str,
        release: str,
        request: str,
        priority: Priority,
        step_target_estimate: int | None = None,
        timeout: float | None = None,
    ) -> list[int]:
        self._fixed.pop((pipeline, release), None)
        return await self.request_gpus(pipeline, request, priority, step_target_estimate)

    # The cycle ----------------------------------------------------------------------------------

    async def _cycles(self) -> None:
        while True:
            await self._changed.wait()
            self._changed.clear()
            cycle = self._plan()
            if cycle.empty:
                continue
            await self._execute(cycle)
            self._commit(cycle)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self._changed.wait()
            self._changed.set()

    async def _execute(self, cycle: _Cycle) -> None:
        """All shrinks, then all expands."""
        shrinks = []
        for pipeline, ranks in sorted(cycle.shrinks.items()):
            self._tell("shrinking", pipeline, ranks)
            shrinks.append(self._members[pipeline].hooks.shrink(sorted(ranks)))
        await asyncio.gather(*shrinks)
        expands = []
        for pipeline, ranks in sorted(cycle.expands.items()):
            member = self._members[pipeline]
            self._tell("expanding", pipeline, ranks)
            expands.append(member.hooks.expand({rank: member.infer.bundles[rank] for rank in sorted(ranks)}))
        await asyncio.gather(*expands)

    def _tell(self, kind: str, pipeline: str, ranks: set[int]) -> None:
        now = asyncio.get_running_loop().time()
        self._on_event(SharingEvent(now, kind, pipeline, "", GENERATION_CLUSTER, tuple(sorted(ranks))))

    def _commit(self, cycle: _Cycle) -> None:
        for pipeline, ranks in cycle.shrinks.items():
            self._held[pipeline] = self._held[pipeline] - ranks
        for pipeline, ranks in cycle.expands.items():
            self._held[pipeline] = self._held.get(pipeline, set()) | ranks
        for waiter in cycle.grants:
            self._waiters.remove(waiter)
            spec = self._members[waiter.pipeline].clusters[waiter.cluster]
            self._fixed[waiter.pipeline, waiter.cluster] = spec.mask
            waiter.granted.set_result(list(spec.gpus))
        for waiter in [one for one in self._waiters if one.cluster == GENERATION_CLUSTER]:
            if self._held.get(waiter.pipeline):
                self._waiters.remove(waiter)
                infer = self._members[waiter.pipeline].infer
                ranks = self._held[waiter.pipeline]
                waiter.granted.set_result(sorted(gpu for rank in ranks for gpu in infer.bundles[rank]))
        for pipeline, released in cycle.releases.items():
            self._held.pop(pipeline, None)
            del self._releasing[pipeline]
            released.set_result(None)

    # The plan -----------------------------------------------------------------------------------

    def _plan(self) -> _Cycle:
        cycle = _Cycle(releases=dict(self._releasing))
        held = {pipeline: set(ranks) for pipeline, ranks in self._held.items()}
        for pipeline in cycle.releases:
            self._shrink(cycle, held, pipeline, held.get(pipeline, set()))
            held.pop(pipeline, None)
        fixed = 0
        for mask in self._fixed.values():
            fixed |= mask
        for waiter in sorted(self._waiters, key=lambda one: (one.priority, one.seq)):
            if waiter.priority is Priority.GENERATION:
                continue
            wanted = self._members[waiter.pipeline].clusters[waiter.cluster].mask
            for pipeline, ranks in held.items():
                masks = self._members[pipeline].infer.masks
                self._shrink(cycle, held, pipeline, {rank for rank in ranks if masks[rank] & wanted})
            if not fixed & wanted:
                cycle.grants.append(waiter)
                fixed |= wanted
        self._divide(cycle, held, fixed)
        return cycle

    def _shrink(self, cycle: _Cycle, held: dict[str, set[int]], pipeline: str, ranks: set[int]) -> None:
        if ranks:
            cycle.shrinks.setdefault(pipeline, set()).update(ranks)
            held[pipeline] = held[pipeline] - ranks

    def _divide(self, cycle: _Cycle, held: dict[str, set[int]], fixed: int) -> None:
        shares = self._shares(held)
        idle = self._pool.mask & ~fixed
        for pipeline, ranks in held.items():
            for rank in ranks:
                idle &= ~self._members[pipeline].infer.masks[rank]
        budget = idle.bit_count() + sum(self._gpus(held, pipeline) for pipeline in shares)
        total = sum(share.remaining * self._members[pipeline].infer.tp_size for pipeline, share in shares.items())
        if not budget or not total:
            return
        for pipeline, share in shares.items():
            tp_size = self._members[pipeline].infer.tp_size
            share.ratio = share.remaining * tp_size / total
            share.target = max(1, math.floor(share.ratio * budget / tp_size + 0.5))
        while True:
            gaps = []
            for pipeline, share in shares.items():
                if share.ratio <= 0 or len(held.get(pipeline, ())) >= share.target:
                    continue
                gap = (share.ratio - self._gpus(held, pipeline) / budget) / share.ratio
                if gap > 0:
                    gaps.append((-gap, pipeline))
            for _, pipeline in sorted(gaps):
                taken = self._take(cycle, held, shares, pipeline, idle, budget)
                if taken is not None:
                    idle = taken
                    break
            else:
                return

    def _shares(self, held: Mapping[str, set[int]]) -> dict[str, _Share]:
        """Who takes part: a pending request or an allocation, and something known about what remains."""
        pending = {one.pipeline: one.estimate for one in self._waiters if one.cluster == GENERATION_CLUSTER}
        shares: dict[str, _Share] = {}
        for pipeline, member in self._members.items():
            if pipeline not in pending and pipeline not in held:
                continue
            if member.progress is not None:
                completed, target = member.progress
                remaining = target - completed + (target if pipeline in pending else 0)
                shares[pipeline] = _Share(remaining, (target - completed) / target)
            elif pipeline in pending:
                shares[pipeline] = _Share(pending[pipeline], 1.0)
        return shares

    def _take(
        self,
        cycle: _Cycle,
        held: dict[str, set[int]],
        shares: Mapping[str, _Share],
        pipeline: str,
        idle: int,
        budget: int,
    ) -> int | None:
        """One more bundle for this pipeline, without a shrink if possible; what is idle then, or None."""
        masks = self._members[pipeline].infer.masks
        used = held.get(pipeline, set()) | cycle.shrinks.get(pipeline, set())
        for rank, mask in enumerate(masks):
            if rank not in used and not mask & ~idle:
                self._expand(cycle, held, pipeline, rank)
                return idle & ~mask
        donors = []
        for donor, share in shares.items():
            spare = len(held.get(donor, ())) - max(1, share.target)
            if donor != pipeline and spare >= 1 and share.ratio < self._gpus(held, donor) / budget:
                donors += [(-share.percent, rank, donor) for rank in held[donor]]
        for _, given, donor in sorted(donors):
            freed = self._members[donor].infer.masks[given]
            for rank, mask in enumerate(masks):
                if rank not in used and mask & freed and not mask & ~(idle | freed):
                    self._shrink(cycle, held, donor, {given})
                    newly = cycle.expands.get(donor, set())
                    if given in newly:  # it was only planned: no hook has to undo it
                        newly.discard(given)
                        cycle.shrinks[donor].discard(given)
                    self._expand(cycle, held, pipeline, rank)
                    return (idle | freed) & ~mask
        return None

    def _expand(self, cycle: _Cycle, held: dict[str, set[int]], pipeline: str, rank: int) -> None:
        cycle.expands.setdefault(pipeline, set()).add(rank)
        held.setdefault(pipeline, set()).add(rank)

    def _gpus(self, held: Mapping[str, set[int]], pipeline: str) -> int:
        return len(held.get(pipeline, ())) * self._members[pipeline].infer.tp_size

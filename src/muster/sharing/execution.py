"""How are a pipeline's hooks called? One call at a time per pipeline, with a deadline and one retry.

A runner looks at the state, makes the call that it asks for, and looks again. It keeps no queue: whatever happened
meanwhile is in the state. A reply changes only leases that still have the epoch of its call.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from muster.core.sharing import demand, leases
from muster.sharing.hooks import PipelineHooks
from muster.types.sharing import GENERATION_CLUSTER, Bundle, LeaseState, PipelineId, Priority, Shares

ATTEMPTS = 2
CANCEL_GRACE_S = 5.0  # how long a cancelled call may take to end, before it counts as stuck

Kind = Literal["shrink", "expand"]
_STATE: Mapping[Kind, LeaseState] = {"shrink": LeaseState.DRAINING, "expand": LeaseState.GRANTING}


class HookFailed(Exception):
    """A call that did not do what it was for, in words."""

    def __init__(self, why: str, *, stuck: bool = False) -> None:
        super().__init__(why)
        self.stuck = stuck  # it still runs, so that a second one would run beside it


@dataclass(frozen=True)
class Limits:
    timeout_s: float
    poll_s: float


class Desk(Protocol):
    """What a runner needs of the scheduler."""

    @property
    def shares(self) -> Shares: ...

    def hooks_of(self, pipeline: PipelineId) -> PipelineHooks | None: ...

    def called(self, pipeline: PipelineId, kind: Kind, epochs: leases.Epochs, took_s: float) -> None: ...

    def call_failed(self, pipeline: PipelineId, kind: Kind, why: str, *, again: bool) -> None: ...


class Runner:
    """The calls of one pipeline."""

    def __init__(self, desk: Desk, pipeline: PipelineId, limits: Limits) -> None:
        self._desk = desk
        self._pipeline = pipeline
        self._limits = limits
        self._task: asyncio.Task[None] | None = None
        self._hook: asyncio.Task[None] | None = None
        self._interrupted = False
        self.in_flight: leases.Epochs = {}  # what the call that runs now is about
        self._begun: dict[Bundle, int] = {}  # what some call was about, the latest epoch of each

    def kick(self) -> None:
        """There may be something to do."""
        if (self._task is None or self._task.done()) and self._next() is not None:
            self._task = asyncio.create_task(self._run(), name=f"hooks of {self._pipeline}")

    def cancel(self) -> asyncio.Task[None] | None:
        """End the call in flight; the task that is ending."""
        if self._task is None or self._task.done():
            return None
        if self._hook is not None:
            self._hook.cancel()  # here and not only by its waiter: one that has not begun must not begin
        self._task.cancel()
        return self._task

    def dispatched(self) -> set[Bundle]:
        """Bundles that a call in their present epoch was about, also one that has ended without success."""
        held = self._desk.shares.leases
        return {bundle for bundle, epoch in self._begun.items() if bundle in held and held[bundle].epoch == epoch}

    def interrupt(self) -> None:
        """The call in flight is about bundles that are gone: end it, and make the one that is right now."""
        if self._hook is not None and not self._hook.done():
            self._interrupted = self._hook.cancel()

    async def _run(self) -> None:
        while (found := self._next()) is not None:
            kind, self.in_flight = found
            self._begun.update(self.in_flight)
            try:
                await self._carry_out(kind, self.in_flight)
            finally:
                self.in_flight = {}

    def _next(self) -> tuple[Kind, leases.Epochs] | None:
        """What gives GPUs back comes first: somebody waits for it."""
        shares = self._desk.shares
        there = shares.pipelines.get(self._pipeline)
        if there is None or not there.movable or self._desk.hooks_of(self._pipeline) is None:
            return None
        found = [
            lease
            for lease in demand.leases_of(shares, self._pipeline, GENERATION_CLUSTER)
            if lease.priority is Priority.GENERATION
        ]
        kinds: tuple[Kind, ...] = ("shrink", "expand")
        for kind in kinds:
            epochs = {lease.bundle: lease.epoch for lease in found if lease.state is _STATE[kind]}
            if epochs:
                return kind, epochs
        return None

    async def _carry_out(self, kind: Kind, epochs: leases.Epochs) -> None:
        clock = asyncio.get_running_loop().time
        failure: HookFailed | None = None
        for attempt in range(ATTEMPTS):
            epochs = self._still(kind, epochs)
            hooks = self._desk.hooks_of(self._pipeline)  # new ones may have come since
            if not epochs or hooks is None:
                return
            began = clock()
            self._hook, self._interrupted = asyncio.create_task(self._call(hooks, kind, epochs)), False
            try:
                await within(self._limits.timeout_s, self._hook)
            except HookFailed as error:
                if self._interrupted and not error.stuck:
                    return
                failure = error
                again = attempt + 1 < ATTEMPTS and not error.stuck
                if not again:
                    break
                self._desk.call_failed(self._pipeline, kind, str(error), again=True)
                continue
            self._desk.called(self._pipeline, kind, epochs, clock() - began)
            return
        if self._still(kind, epochs):  # else what it was for is over, and so is its failure
            self._desk.call_failed(self._pipeline, kind, str(failure), again=False)

    def _still(self, kind: Kind, epochs: leases.Epochs) -> leases.Epochs:
        shares = self._desk.shares
        return {bundle: epochs[bundle] for bundle in leases.matching(shares, epochs, _STATE[kind])}

    def _call(self, hooks: PipelineHooks, kind: Kind, epochs: leases.Epochs) -> Coroutine[Any, Any, None]:
        ranks = gpus_by_rank(self._desk.shares, self._pipeline, epochs)
        return shrink(hooks, ranks, self._limits.poll_s) if kind == "shrink" else expand(hooks, ranks)


def gpus_by_rank(shares: Shares, pipeline: PipelineId, bundles: leases.Epochs) -> dict[int, list[int]]:
    owned = shares.pipelines[pipeline].infer.bundles
    return {rank: list(owned[rank]) for rank in sorted(bundle.rank for bundle in bundles)}


async def shrink(hooks: PipelineHooks, ranks: Mapping[int, list[int]], poll_s: float) -> None:
    """Shrink, then ask until the GPUs are really vacated, where the pipeline can tell."""
    await hooks.shrink(list(ranks))
    vacated: Callable[[list[int]], Awaitable[bool]] | None = getattr(hooks, "vacated", None)
    if vacated is None:
        return
    gpus = sorted(gpu for owned in ranks.values() for gpu in owned)
    while not await vacated(gpus):
        await asyncio.sleep(poll_s)


async def expand(hooks: PipelineHooks, ranks: Mapping[int, list[int]]) -> None:
    await hooks.expand(dict(ranks))


async def shrink_all(hooks: PipelineHooks, ranks: Mapping[int, list[int]], limits: Limits) -> str:
    """Shrink with a deadline and one retry, for hooks that must prove themselves; how they failed, or ""."""
    why = ""
    for _ in range(ATTEMPTS):
        try:
            await within(limits.timeout_s, asyncio.create_task(shrink(hooks, ranks, limits.poll_s)))
            return ""
        except HookFailed as error:
            why = str(error)
            if error.stuck:
                break
    return why


async def within(timeout_s: float, task: asyncio.Task[None]) -> None:
    """Wait for somebody else's code: whatever comes of it, also its own cancellation, ends here as a HookFailed."""
    try:
        await asyncio.wait({task}, timeout=timeout_s)
        if not task.done():
            await _cancelled(task)
            why = f"did not return within {timeout_s:g} s"
            raise HookFailed(why if task.done() else f"{why}, nor when it was cancelled", stuck=not task.done())
    except asyncio.CancelledError:
        await _cancelled(task)
        raise
    if task.cancelled():
        raise HookFailed("cancelled itself")
    error = task.exception()
    if error is not None:
        raise HookFailed(f"raised {type(error).__name__}: {error}"[:500])


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.add_done_callback(_read)
    task.cancel()
    await asyncio.wait({task}, timeout=CANCEL_GRACE_S)


def _read(task: asyncio.Task[None]) -> None:
    """Look at a late result, so that the loop does not report it as forgotten."""
    if not task.cancelled():
        task.exception()

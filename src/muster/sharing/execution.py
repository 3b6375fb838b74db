"""How are a pipeline's hooks called? At once, side by side, each call with a deadline and one retry.

A runner looks at the state, makes the calls that it asks for, and looks again when one has ended. It keeps no queue:
whatever happened meanwhile is in the state. A bundle is in one call at a time, and a reply changes only leases that
still have the epoch of its call.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from muster.core.sharing import demand, leases
from muster.errors import JournalUnusable
from muster.sharing.hooks import PipelineHooks
from muster.types.codec import readable
from muster.types.sharing import GENERATION_CLUSTER, Bundle, LeaseState, PipelineId, Priority, Shares

log = logging.getLogger("muster.sharing")

ATTEMPTS = 2
AGAIN_S = 1.0  # before a call is made again whose outcome could not be written
CANCEL_GRACE_S = 5.0  # how long a cancelled call may take to end, before it counts as stuck

Kind = Literal["shrink", "expand"]
_STATE: Mapping[Kind, LeaseState] = {"shrink": LeaseState.DRAINING, "expand": LeaseState.GRANTING}


class HookFailed(Exception):
    """A call that did not do what it was for, in words."""

    def __init__(self, why: str, *, stuck: bool = False) -> None:
        super().__init__(why)
        self.stuck = stuck  # it still runs, so that a second one would run beside it


@dataclass(frozen=True)
class HookLimits:
    timeout_s: float
    poll_s: float


class State(Protocol):
    """What a runner needs of the pool's state."""

    @property
    def shares(self) -> Shares: ...

    def hooks_of(self, pipeline: PipelineId) -> PipelineHooks | None: ...

    def called(self, pipeline: PipelineId, kind: Kind, epochs: leases.Epochs, took_s: float) -> None: ...

    def call_failed(self, pipeline: PipelineId, kind: Kind, why: str, *, again: bool) -> None: ...

    async def written(self) -> None: ...


@dataclass(eq=False)
class _Call:
    """A hook call in flight, with its retry."""

    kind: Kind
    epochs: leases.Epochs
    task: asyncio.Task[None] | None = None
    hook: asyncio.Task[None] | None = None
    interrupted: bool = False

    def cancel(self) -> None:
        if self.hook is not None:
            self.hook.cancel()  # here and not only by its waiter: one that has not begun must not begin
        if self.task is not None:
            self.task.cancel()

    def interrupt(self) -> None:
        if self.hook is not None and not self.hook.done():
            self.interrupted = self.hook.cancel()


class Runner:
    """The calls of one pipeline."""

    def __init__(self, state: State, pipeline: PipelineId, limits: HookLimits) -> None:
        self._state = state
        self._pipeline = pipeline
        self._limits = limits
        self._calls: set[_Call] = set()
        self._begun: dict[Bundle, int] = {}  # what some call was about, the latest epoch of each

    def kick(self) -> None:
        """There may be something to do."""
        for kind, epochs in self._due():
            call = _Call(kind, epochs)
            self._begun.update(epochs)
            self._calls.add(call)
            call.task = asyncio.create_task(self._run(call), name=f"{kind} of {self._pipeline}")

    def cancel(self) -> list[asyncio.Task[None]]:
        """End the calls in flight; the tasks that are ending."""
        for call in self._calls:
            call.cancel()
        return [call.task for call in self._calls if call.task is not None]

    def dispatched(self) -> set[Bundle]:
        """Bundles that a call in their present epoch was about, also one that has ended without success."""
        held = self._state.shares.leases
        return {bundle for bundle, epoch in self._begun.items() if bundle in held and held[bundle].epoch == epoch}

    def interrupt(self) -> None:
        """Calls about bundles that are gone end now; what is left of them is called for again."""
        held = self._state.shares.leases
        for call in self._calls:
            if any(bundle not in held for bundle in call.epochs):
                call.interrupt()

    async def _run(self, call: _Call) -> None:
        try:
            await self._carry_out(call)
        except JournalUnusable as error:  # what came of it is not known: it is called for again
            log.error("%s of %s: %s", call.kind, self._pipeline, error.message)
            await asyncio.sleep(AGAIN_S)
        finally:
            self._calls.discard(call)
        self.kick()

    def _due(self) -> list[tuple[Kind, leases.Epochs]]:
        shares = self._state.shares
        there = shares.pipelines.get(self._pipeline)
        if there is None or not there.movable or self._state.hooks_of(self._pipeline) is None:
            return []
        busy = {bundle for call in self._calls for bundle in call.epochs}
        found = [
            lease
            for lease in demand.leases_of(shares, self._pipeline, GENERATION_CLUSTER)
            if lease.priority is Priority.GENERATION and lease.bundle not in busy
        ]
        by_kind: list[tuple[Kind, leases.Epochs]] = [
            (kind, {lease.bundle: lease.epoch for lease in found if lease.state is state})
            for kind, state in _STATE.items()
        ]
        return [(kind, epochs) for kind, epochs in by_kind if epochs]

    async def _carry_out(self, call: _Call) -> None:
        clock = asyncio.get_running_loop().time
        failure: HookFailed | None = None
        kind, epochs = call.kind, call.epochs
        for attempt in range(ATTEMPTS):
            await self._state.written()  # what is called for must not be lost with this process
            epochs = self._still(kind, epochs)
            hooks = self._state.hooks_of(self._pipeline)  # new ones may have come since
            if not epochs or hooks is None:
                return
            began = clock()
            call.hook, call.interrupted = asyncio.create_task(self._call(hooks, kind, epochs)), False
            try:
                await within(self._limits.timeout_s, call.hook)
            except HookFailed as error:
                if call.interrupted and not error.stuck:
                    return
                failure = error
                again = attempt + 1 < ATTEMPTS and not error.stuck
                if not again:
                    break
                self._state.call_failed(self._pipeline, kind, str(error), again=True)
                continue
            self._state.called(self._pipeline, kind, epochs, clock() - began)
            return
        if self._still(kind, epochs):  # else what it was for is over, and so is its failure
            self._state.call_failed(self._pipeline, kind, str(failure), again=False)

    def _still(self, kind: Kind, epochs: leases.Epochs) -> leases.Epochs:
        shares = self._state.shares
        return {bundle: epochs[bundle] for bundle in leases.matching(shares, epochs, _STATE[kind])}

    def _call(self, hooks: PipelineHooks, kind: Kind, epochs: leases.Epochs) -> Coroutine[Any, Any, None]:
        ranks = gpus_by_rank(self._state.shares, self._pipeline, epochs)
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


async def shrink_all(hooks: PipelineHooks, ranks: Mapping[int, list[int]], limits: HookLimits) -> str:
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
        raise HookFailed(readable(f"raised {type(error).__name__}: {error}"[:500]))


async def _cancelled(task: asyncio.Task[None]) -> None:
    task.add_done_callback(_read)
    task.cancel()
    await asyncio.wait({task}, timeout=CANCEL_GRACE_S)


def _read(task: asyncio.Task[None]) -> None:
    """Look at a late result, so that the loop does not report it as forgotten."""
    if not task.cancelled():
        task.exception()

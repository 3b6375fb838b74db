"""Who answers the scheduler when a pipeline's hooks live in this process and the scheduler does not?

A `HookRunner` fetches the pipeline's actions, calls its hooks and answers. It goes on fetching while hooks run: calls
for different ranks run side by side, and one that the scheduler makes again ends the one before. After a restart of
the server it attaches the pipeline again; it ends when the pipeline is not this process's any more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any, Protocol

from muster.backoff import Backoff
from muster.errors import (
    AlreadyExists,
    Conflict,
    MusterError,
    NotFound,
    PipelineQuarantined,
    SchedulerStopped,
    Unavailable,
)
from muster.sharing.hooks import PipelineHooks
from muster.types.pools import Action, ActionAnswer

log = logging.getLogger("muster.sharing")

VACATED_POLL_S = 0.05
CANCEL_GRACE_S = 5.0  # how long a cancelled hook may take to end, before it counts as stuck
AWAY = Backoff(0.05, 1.0)  # while the server is


class Wire(Protocol):
    """What an runner needs of the connection."""

    async def next_action(self, pipeline: str, after: int) -> Action | None: ...

    async def answer(self, pipeline: str, action: Action, answer: ActionAnswer) -> None: ...

    async def attach(self, pipeline: str) -> None:
        """Come back to what is held, after a restart of the server."""


class HookRunner:
    def __init__(self, wire: Wire, pipeline: str, hooks: PipelineHooks) -> None:
        self._wire = wire
        self._pipeline = pipeline
        self._hooks = hooks
        self._seen = 0  # the newest epoch that was fetched
        self._calls: dict[asyncio.Task[None], Action] = {}
        self._task = asyncio.create_task(self._attend(), name=f"hooks of {pipeline}")

    @property
    def over(self) -> bool:
        """Whether it has found nothing left to attend."""
        return self._task.done()

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.wait({self._task})
        await self._give_up(list(self._calls))

    async def _attend(self) -> None:
        failures = 0
        while True:
            try:
                action = await self._wire.next_action(self._pipeline, self._seen)
                failures = 0
            except (Unavailable, SchedulerStopped):
                failures += 1
                await asyncio.sleep(AWAY.after(failures))
                continue
            except Conflict:
                action = None
                await self._attach_again()
            except (PipelineQuarantined, NotFound, AlreadyExists) as over:
                log.warning("%s", over.message)
                await self._give_up(list(self._calls))
                return
            if action is not None:
                self._seen = action.epoch
                await self._begin(action)

    async def _attach_again(self) -> None:
        """The server has lost its hooks in a restart: what it asked before is over."""
        await self._give_up(list(self._calls))
        try:
            await self._wire.attach(self._pipeline)
        except MusterError as error:  # if it is not over, the next fetch says so and this is tried again
            log.warning("%s could not be attached again: %s", self._pipeline, error.message)
            await asyncio.sleep(AWAY.first_s)
        else:
            log.info("%s is attached again", self._pipeline)

    async def _begin(self, action: Action) -> None:
        """One call at a time for each rank: if it is asked for again, the scheduler has given up the one before."""
        before = [task for task, other in self._calls.items() if _overlap(action, other)]
        if not await self._give_up(before):
            told = "the call before it still runs, though it was cancelled"
            await self._answer(action, ActionAnswer(action.epoch, False, told))
            return
        task = asyncio.create_task(self._carry_out(action))
        self._calls[task] = action
        task.add_done_callback(self._calls.pop)

    async def _give_up(self, calls: Collection[asyncio.Task[None]]) -> bool:
        """Cancel calls in flight; whether they have ended."""
        if not calls:
            return True
        for call in calls:
            call.cancel()
        _, running = await asyncio.wait(calls, timeout=CANCEL_GRACE_S)
        return not running

    async def _carry_out(self, action: Action) -> None:
        error = await _outcome(self._called(action))
        told = None if error is None else f"{type(error).__name__}: {error}"[:500]
        await self._answer(action, ActionAnswer(action.epoch, error is None, told))

    async def _called(self, action: Action) -> None:
        if action.do == "shrink":
            await self._hooks.shrink(list(action.ranks))
        elif action.do == "expand":
            await self._hooks.expand(action.by_rank)
        else:
            vacated: Callable[[list[int]], Awaitable[bool]] = getattr(self._hooks, "vacated")  # noqa: B009
            while not await vacated(list(action.gpus)):
                await asyncio.sleep(VACATED_POLL_S)

    async def _answer(self, action: Action, answer: ActionAnswer) -> None:
        try:
            await self._wire.answer(self._pipeline, action, answer)
        except (Conflict, NotFound) as late:
            log.info("an answer came late: %s", late.message)
        except MusterError as error:  # whoever asked will ask again, or has given up
            log.warning("%s of %s was not answered: %s", action.do, self._pipeline, error.message)


def _overlap(one: Action, other: Action) -> bool:
    """Whether they are about the same: shrinks and expands name ranks, and questions name GPUs."""
    if "vacated" in (one.do, other.do):
        return one.do == other.do and not set(one.gpus).isdisjoint(other.gpus)
    return not set(one.ranks).isdisjoint(other.ranks)


async def _outcome(call: Coroutine[Any, Any, None]) -> BaseException | None:
    """How somebody else's coroutine ended; cancelling this cancels it."""
    task = asyncio.create_task(call)
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.wait({task})
        if not task.cancelled():
            task.exception()  # looked at: nobody else will
        raise
    if task.cancelled():
        return asyncio.CancelledError("it cancelled itself")
    return task.exception()

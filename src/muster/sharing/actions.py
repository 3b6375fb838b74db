"""How are the hooks of a pipeline in another process called? Each call is an action that it fetches and answers.

`Actions` is the queue, `RemoteHooks` what the scheduler sees. A call that the scheduler gives up is over at once;
made again, it keeps its id and gets a newer epoch, so that a late answer to the first one changes nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from muster.errors import Conflict, NotFound, SharingError
from muster.sharing.hooks import PipelineHooks
from muster.types.pools import Action, ActionAnswer
from muster.types.sharing import ClusterSpec, Gpu

MOST_REMEMBERED = 256  # answered or given up; a repeated answer to one of them is told what became of it


@dataclass(frozen=True)
class _Open:
    action: Action
    answer: asyncio.Future[ActionAnswer]


class Actions:
    """What one pipeline is asked to do, oldest first."""

    def __init__(self, epochs: Iterator[int]) -> None:
        self._epochs = epochs
        self._open: dict[str, _Open] = {}
        self._past: dict[str, tuple[Action, ActionAnswer | None]] = {}  # None: given up unanswered
        self._news = asyncio.Event()

    async def call(self, action: Action) -> ActionAnswer:
        """Wait for the pipeline's answer. Cancelling it takes the action back."""
        epoch = next(self._epochs)
        action = replace(action, id=self._id_of(action) or f"{action.do}-{epoch}", epoch=epoch)
        waiting = _Open(action, asyncio.get_running_loop().create_future())
        self._open[action.id] = waiting
        self.wake()
        given: ActionAnswer | None = None
        try:
            given = await waiting.answer
            return given
        finally:
            if self._open.get(action.id) is waiting:
                del self._open[action.id]
                self._remember(action, given)

    def _id_of(self, action: Action) -> str | None:
        """The id under which the same thing was asked last, if that was given up."""
        for last, answer in reversed(self._past.values()):
            if replace(action, id=last.id, epoch=last.epoch) == last:
                return last.id if answer is None else None
        return None

    def _remember(self, action: Action, answer: ActionAnswer | None) -> None:
        self._past.pop(action.id, None)
        self._past[action.id] = (action, answer)
        while len(self._past) > MOST_REMEMBERED:
            del self._past[next(iter(self._past))]

    def next(self, after: int) -> Action | None:
        """The oldest that is unanswered and newer than that epoch."""
        found = (one.action for one in self._open.values() if one.action.epoch > after)
        return min(found, key=lambda action: action.epoch, default=None)

    def wake(self) -> None:
        """Let those who wait look again."""
        self._news.set()
        self._news = asyncio.Event()

    async def news(self, timeout_s: float) -> None:
        """Until something has changed, or time is over."""
        news = self._news
        try:
            async with asyncio.timeout(timeout_s):
                await news.wait()
        except TimeoutError:
            return

    def answer(self, action_id: str, answer: ActionAnswer) -> None:
        """Raises Conflict for one that is over, or that is being asked anew; a repeated answer is fine."""
        there = self._open.get(action_id)
        if there is None:
            self._answer_to_the_past(action_id, answer)
            return
        if answer.epoch != there.action.epoch:
            raise Conflict(
                f"action {action_id!r} is asked anew with epoch {there.action.epoch}, not {answer.epoch}",
                retryable=False,
                hint="fetch it again: what was asked before is over",
            )
        if not there.answer.done():
            there.answer.set_result(answer)

    def _answer_to_the_past(self, action_id: str, answer: ActionAnswer) -> None:
        action, given = self._past.get(action_id, (None, None))
        if action is None:
            raise NotFound(f"there is no action {action_id[:128]!r}", hint="it may be of before a restart")
        if given is None or (given.epoch, given.ok) != (answer.epoch, answer.ok):
            told = "was given up" if given is None else "has been answered otherwise"
            raise Conflict(f"action {action_id!r} {told}", retryable=False, hint="it is over: nothing was changed")


class RemoteHooks:
    """The scheduler's side of a pipeline in another process."""

    def __init__(self, actions: Actions, infer: ClusterSpec) -> None:
        self._actions = actions
        self._infer = infer

    async def shrink(self, ranks: Sequence[int], /) -> None:
        gpus = tuple(sorted(gpu for rank in ranks for gpu in self._infer.bundles[rank]))
        _must_be_ok(await self._actions.call(Action("", 0, "shrink", tuple(ranks), gpus)))

    async def expand(self, ranks: Mapping[int, Sequence[Gpu]], /) -> None:
        bundles = {str(rank): tuple(gpus) for rank, gpus in ranks.items()}
        gpus = tuple(sorted(gpu for owned in ranks.values() for gpu in owned))
        _must_be_ok(await self._actions.call(Action("", 0, "expand", tuple(ranks), gpus, bundles)))


class TellingHooks(RemoteHooks):
    """Of a pipeline that can also say whether its GPUs are empty."""

    async def vacated(self, gpus: Sequence[Gpu], /) -> bool:
        answer = await self._actions.call(Action("", 0, "vacated", gpus=tuple(gpus)))
        if answer.error:
            _must_be_ok(answer)
        return answer.ok


def hooks_for(actions: Actions, infer: ClusterSpec, *, vacated: bool) -> PipelineHooks:
    return TellingHooks(actions, infer) if vacated else RemoteHooks(actions, infer)


def _must_be_ok(answer: ActionAnswer) -> None:
    if not answer.ok:
        raise SharingError(answer.error or "the pipeline says that it failed")

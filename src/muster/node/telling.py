"""What does an agent tell its ranks before a planned recall, and what does it hear of them? (`node.word`)"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from muster.background import Tasks
from muster.core.member.orders import Notify
from muster.node import word
from muster.node.saves import WatchedRank

LOOK_S = 0.01


class Noticed(Protocol):
    def __call__(self, number: int, calls: int, *, seen: bool = False, done: bool = False) -> None:
        """How often ranks asked; whether all have been told, and whether one has gone on."""


class Telling:
    def __init__(self, ranks: Callable[[int], Sequence[WatchedRank]], noticed: Noticed, tasks: Tasks) -> None:
        self._ranks = ranks
        self._noticed = noticed
        self._tasks = tasks

    def notify(self, order: Notify) -> None:
        """Count only after all are held: whoever is not held yet will be at its next call."""
        marks = [rank.mark for rank in self._ranks(order.round)]
        for mark in marks:
            if order.withdrawn:
                word.withdraw(mark)
            elif order.call is None:
                word.hold(mark, order.for_s)
            else:
                word.tell(mark, order.call, order.for_s)
        if order.call is None and not order.withdrawn:
            self._noticed(order.round, max((word.asked(mark).calls for mark in marks), default=0))
        elif order.call is not None:
            self._tasks.start(self._watch_savers(order.round, order.call, order.for_s))

    async def _watch_savers(self, number: int, call: int, for_s: float) -> None:
        """Tell when all of our ranks that ask have been told, and when one has gone on."""
        loop = asyncio.get_running_loop()
        until, told = loop.time() + for_s, (False, False)
        while loop.time() < until and (ranks := self._ranks(number)):
            asked = [one for rank in ranks if (one := word.asked(rank.mark)).calls]
            known = all(one.has_seen(call) for one in asked), any(one.is_done(call) for one in asked)
            if known != told:
                told, most = known, max((one.calls for one in asked), default=0)
                seen, done = known
                self._noticed(number, most, seen=seen, done=done)
            if all(known):
                return
            await asyncio.sleep(LOOK_S)


def over(marks: Iterable[str]) -> None:
    """They are asked to end. Only now nothing keeps those that wait for that: before, they would make a step."""
    for mark in marks:
        word.over(mark)

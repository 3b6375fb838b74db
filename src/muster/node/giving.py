"""Give the newest state of our ranks to one other worker, beside the training, as it comes."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Sequence

from muster.node.bulk import Bulk
from muster.node.memory import Memory
from muster.node.shelf import Copy, Key, Shelf

AGAIN_S = 0.5
BURST_S = 0.1  # what may be spent at once, in seconds of the rate


class Rate:
    """Bytes in a second, for all together; 0: as many as there are."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free_at = 0.0

    async def spend(self, count: int) -> None:
        if self._rate <= 0:
            return
        now = asyncio.get_running_loop().time()
        begin = max(self._free_at, now - BURST_S)
        self._free_at = begin + count / self._rate
        await asyncio.sleep(max(0.0, begin - now))


class Giver:
    def __init__(self, shelf: Shelf, memory: Memory, opened: Callable[[], Awaitable[Bulk]], rate: Rate) -> None:
        self._shelf = shelf
        self._memory = memory
        self._opened = opened
        self._rate = rate
        self._news = asyncio.Event()
        self._given: set[Key] = set()
        self._flushing = 0
        self._all_given = asyncio.Event()
        self.took_s = 0.0

    def wake(self) -> None:
        self._news.set()

    async def flush(self) -> None:
        self._flushing += 1
        self._all_given.clear()
        self.wake()
        try:
            await self._all_given.wait()
        finally:
            self._flushing -= 1

    async def run(self) -> None:
        while True:
            try:
                line = await self._opened()
                try:
                    await self._give_all(line)
                finally:
                    line.abort()
            except (OSError, ValueError, TypeError, IndexError):
                self._all_given.set()  # nobody waits for one that cannot be reached
            await asyncio.sleep(AGAIN_S)

    async def _give_all(self, line: Bulk) -> None:
        self._given.clear()
        while True:
            self._news.clear()
            due = self._due()
            if not due:
                self._all_given.set()
                await self._news.wait()
            for copy in due:
                self._given.add(copy.key)
                await self._offer(line, copy)
            self._given &= {copy.key for copy in self._shelf}

    def _due(self) -> list[Copy]:
        """The newest of each of our ranks that all of us give."""
        newest: dict[int, Copy] = {}
        for copy in sorted((one for one in self._shelf if one.own), key=lambda one: one.key):
            if self._flushing or copy.manifest.step % self._shelf.stride == 0:
                newest[copy.manifest.rank] = copy
        return [copy for copy in newest.values() if copy.key not in self._given]

    async def _offer(self, line: Bulk, copy: Copy) -> None:
        loop = asyncio.get_running_loop()
        line.say(offer=json.loads(copy.manifest.write()))
        told = await line.hear()
        began = loop.time()
        wanted = told.get("want")
        if isinstance(wanted, list):
            await send(line, copy, wanted, self._rate, self._memory)
            await line.hear()  # it is kept
            self.took_s = loop.time() - began


async def send(line: Bulk, copy: Copy, wanted: Sequence[int], rate: Rate, memory: Memory) -> None:
    """Those pieces of a copy, which stays where it is meanwhile."""
    for segment in copy.segments:
        segment.users += 1
    try:
        for index in wanted:
            segment, offset = copy.spots[index]
            with open(os.dup(segment.fd), "rb") as file:
                await line.give(file, offset, copy.manifest.every[index].length, rate.spend)
    finally:
        for segment in copy.segments:
            memory.let_go(segment)

"""What is said to one engine server? One request at a time, also when who asked has given up waiting."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from muster.sharing.engines import wire
from muster.sharing.engines.faults import EngineGarbled
from muster.sharing.engines.wire import Reply, Request

OK = 200
ABSENT = (404, 405)


class EngineServer:
    """The server of one rank. Update functions get it, to speak to it by `get` and `post`."""

    def __init__(self, url: str, rank: int, headers: Mapping[str, str], within_s: float) -> None:
        self.url = url.rstrip("/")
        self.rank = rank
        self.gpus: tuple[int, ...] = ()  # of the pool, once they are known
        self._headers, self._within_s = dict(headers), within_s
        self._in_flight: asyncio.Task[Reply] | None = None

    async def get(self, path: str, **params: str | int) -> Any:
        """Its answer's JSON, or None where it is empty. Any status but 200 raises."""
        return await self._asked(Request("GET", path, params))

    async def post(self, path: str, json: object = None, **params: str | int) -> Any:
        return await self._asked(Request("POST", path, params, json))

    async def find(self, path: str) -> Any:
        """As `get`; None where it has no such route."""
        return await self._asked(Request("GET", path, {}), absent=True)

    async def _asked(self, request: Request, *, absent: bool = False) -> Any:
        reply = await self._sent(request)
        asked = f"{self.url}: {request}"
        if absent and reply.status in ABSENT:
            return None
        if reply.status != OK:
            raise EngineGarbled(f"{asked}: answers {reply.status}: {reply.shown!r}")
        return reply.value(asked)

    async def _sent(self, request: Request) -> Reply:
        """A request that was begun is not abandoned with its caller: the next one waits until it is over."""
        await self.settled()
        task = asyncio.create_task(wire.send(self.url, request, self._headers, self._within_s))
        task.add_done_callback(_read)
        self._in_flight = task
        return await asyncio.shield(task)

    async def settled(self) -> None:
        before = self._in_flight
        if before is not None and not before.done() and before.get_loop() is asyncio.get_running_loop():
            await asyncio.wait({before})


def _read(task: asyncio.Task[Reply]) -> None:
    """Look at a late result, so that the loop does not report it as forgotten."""
    if not task.cancelled():
        task.exception()


def numbers(gpus: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(gpu) for gpu in gpus)

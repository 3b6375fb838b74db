"""A pool behind a server, and pipelines that reach it over sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from muster.sdk.drive import Link
from muster.sdk.find import Search
from muster.sharing import ClusterSpec, Pool
from muster.sharing.remote import RemoteScheduler
from muster.sharing.service import PoolService
from muster.types.sharing import Tenant
from tests.server.house import serving

BOUND_S = 30.0
INFER, TRAIN = "actor_infer", "actor_train"
ALL = [0, 1, 2, 3]


class Engine:
    """Hooks that keep count, and can be held up or made to fail."""

    held_up: asyncio.Event

    def __init__(self) -> None:
        self.awake: set[int] = set()
        self.calls: list[str] = []
        self.cancelled = 0
        self.called = asyncio.Event()
        self.go = asyncio.Event()
        self.go.set()
        self.fails = False

    async def shrink(self, ranks: Sequence[int]) -> None:
        await self._do(f"shrink {sorted(ranks)}")
        self.awake -= set(ranks)

    async def expand(self, ranks: Mapping[int, Sequence[int]]) -> None:
        assert all(list(owned) == [rank] for rank, owned in ranks.items())
        await self._do(f"expand {sorted(ranks)}")
        self.awake |= set(ranks)

    async def _do(self, what: str) -> None:
        self.calls.append(what)
        self.called.set()
        try:
            await self.go.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.fails:
            raise ValueError("no memory")


def clusters(*train: int) -> dict[str, ClusterSpec]:
    return {TRAIN: ClusterSpec(list(train) or [0, 1]), INFER: ClusterSpec(ALL)}


class Room:
    """A pool behind a server, and the pipelines that reach it over sockets."""

    def __init__(self, url: str, token: str, pool: PoolService) -> None:
        self.url, self.token, self.pool = url, token, pool
        self._handles: list[RemoteScheduler] = []

    async def handle(self, tenant: Tenant | None = None) -> RemoteScheduler:
        made = RemoteScheduler(Link(Search.of(self.url, self.token)), "default", tenant)
        await made.start()
        self._handles.append(made)
        return made

    async def pipeline(self, name: str, engine: Engine, *train: int, tenant: Tenant | None = None) -> RemoteScheduler:
        """A pipeline of this process; with a `tenant` of another one, as far as the server can tell."""
        handle = await self.handle(tenant)
        await handle.register_pipeline(name, clusters(*train), engine)
        await handle.admit_pipeline(name)
        return handle

    async def close(self) -> None:
        for handle in self._handles:
            await handle.stop()

    async def until(self, look: Callable[[], object]) -> None:
        """Bounded by the test's own bound."""
        while not look():
            await asyncio.sleep(0.005)


@asynccontextmanager
async def a_room(home: Path, gpus: Pool = Pool(4, 4), **options: Any) -> AsyncIterator[Room]:  # noqa: B008
    pool = PoolService("default", gpus, **options)
    await pool.start()
    try:
        async with serving(home, pools={"default": pool}) as house:
            room = Room(house.url, house.client.headers["Authorization"].split()[1], pool)
            try:
                yield room
            finally:
                await room.close()
    finally:
        await pool.stop()


def in_room(home: Path, test: Callable[[Room], Awaitable[None]], **options: Any) -> None:
    async def run() -> None:
        async with a_room(home, **options) as room, asyncio.timeout(BOUND_S):
            await test(room)

    asyncio.run(run())

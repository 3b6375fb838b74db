"""A member that can go on with the run: a coordinator in its own process, which follows until it has to lead.

It listens where the run's coordinator does on its own machine, if that port is free there, so that who looks for the
run on any of its machines finds it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from muster.background import Tasks
from muster.types.world import Elector, Electorate, RunId
from muster.world import wire
from muster.world.connection import Address
from muster.world.post import Post
from muster.world.service import Coordinator


def place_beside(leader: Address, addr: str) -> Address:
    """Where a member at that address listens: at the leader's port, unless it is the leader's own machine's.

    A coordinator that is started again must find its port free.
    """
    host, port = leader
    return addr, port if host != addr else 0


class Standby:
    """`on_ready` is called when it listens."""

    def __init__(
        self,
        run_id: RunId,
        token: str | None,
        place: Address,
        on_ready: Callable[[Standby], None],
        say: Callable[[str], None],
    ) -> None:
        self._run_id = run_id
        self._host = place[0]
        self._on_ready = on_ready
        self._coordinator = Coordinator(token=token, opens_runs=False)
        self._coordinator.posts.say = say
        self._post: Post | None = None
        self._tasks = Tasks()
        self.port = 0
        self._tasks.start(self._listen(place[1]))

    async def _listen(self, port: int) -> None:
        """Only loopback addresses are bound as such: others may be mapped."""
        host = self._host if wire.is_loopback(self._host) else ("::" if ":" in self._host else "0.0.0.0")
        try:
            _, self.port = await self._coordinator.start(host, port)
        except OSError:
            _, self.port = await self._coordinator.start(host, 0)
        self._coordinator.posts.address = (self._host, self.port)
        self._on_ready(self)

    @property
    def leads(self) -> bool:
        return self._post is not None and self._post.leads

    def take_part(
        self, me: Elector, lease_s: float, seek: Callable[[Address], None], known: Callable[[], Electorate]
    ) -> None:
        self._post = self._coordinator.posts.follow(self._run_id, me, lease_s, lambda leader: seek(leader.post), known)

    def leader_gone(self, term: int) -> None:
        if self._post is not None:
            self._post.leader_gone(term)

    async def see_off(self, patience_s: float) -> None:
        """Whoever is led from here hears the end before this process goes."""
        deadline = asyncio.get_running_loop().time() + patience_s
        while self._coordinator.connected > 0 and asyncio.get_running_loop().time() < deadline:
            self._coordinator.someone_left.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await self._coordinator.someone_left.wait()

    def close(self) -> None:
        self._tasks.cancel()
        self._coordinator.shut()

"""How does a request become an answer? It takes a place in the queue, and its caller waits for the grant."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from muster.core.sharing import demand, leases
from muster.errors import GrantTimeout, JournalUnusable
from muster.sharing.pool_state import PoolState
from muster.types.sharing import Gpu, Priority, Shares


class Requests:
    def __init__(self, state: PoolState) -> None:
        self._state = state

    def ask(self, shares: Shares, wish: demand.Wish, now: float) -> demand.Asked:
        orphans = {one.seq for one in shares.requests if one.seq not in self._state.waiters}
        asked = demand.requested(shares, wish, now, orphans=orphans)
        self._state.commit(asked.shares)
        told = "" if wish.estimate is None else f"estimate {wish.estimate}"
        self._state.note("requested", wish.pipeline, f"{wish.priority.name} {told}".strip(), cluster=wish.cluster)
        return asked

    async def granted(
        self,
        asked: demand.Asked,
        wish: demand.Wish,
        timeout: float | None,
        gone: asyncio.Future[None] | None = None,
    ) -> list[Gpu]:
        """The answer, once what was to be `gone` before is gone too."""
        if asked.request is None:
            if gone is not None:
                await gone
            await self._state.written()
            return list(asked.gpus)
        seq = asked.request.seq
        answer = self._state.waiters.for_grant(seq, wish.pipeline)
        awaited: set[asyncio.Future[Any]] = {answer} if gone is None else {answer, gone}
        try:
            await self._state.written()  # a wish that cannot be kept is not waited for
            _, missing = await asyncio.wait(awaited, timeout=timeout)
            await self._state.written()
        except (asyncio.CancelledError, JournalUnusable):
            with contextlib.suppress(JournalUnusable):
                self._gone(wish, seq, answer)
            raise
        if not missing:
            if gone is not None:
                gone.result()
            return answer.result()
        why = "what was released is still being vacated" if answer.done() else self._state.reasons.get(seq, "")
        self._gone(wish, seq, answer)
        await self._state.written()
        told = f": {why}" if why else ""
        raise GrantTimeout(f"{wish.pipeline}/{wish.cluster} was not granted within {timeout:g} s{told}")

    def _gone(self, wish: demand.Wish, seq: int, answer: asyncio.Future[list[Gpu]]) -> None:
        """Nobody hears the answer any more. A fixed grant that came in the same moment is given back."""
        self._state.waiters.leave(seq)
        if not self._state.running:
            return
        now = asyncio.get_running_loop().time()
        unheard = answer.done() and answer.exception() is None and wish.priority is not Priority.GENERATION
        answer.cancel()
        if unheard and wish.pipeline in self._state.shares.pipelines:
            self._state.commit(leases.released(self._state.shares, wish.pipeline, wish.cluster, now))
        elif leases.request_of(self._state.shares, seq) is not None:
            self._state.commit(demand.withdrawn(self._state.shares, seq))
        self._state.note("withdrawn", wish.pipeline, f"request #{seq}", cluster=wish.cluster)

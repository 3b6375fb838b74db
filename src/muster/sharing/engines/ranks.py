"""How do several engines become one pipeline's hooks? Each has its rank, and is asked about that alone."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any

from muster.errors import InvalidRequest
from muster.sharing.hooks import PipelineHooks


class EngineRanks:
    """`EngineRanks({0: engine, 1: other})`: for engines of one rank each."""

    def __init__(self, engines: Mapping[int, PipelineHooks]) -> None:
        self._engines = dict(engines)

    async def shrink(self, ranks: Sequence[int]) -> None:
        await together(self._of(rank).shrink([0]) for rank in ranks)

    async def expand(self, ranks: Mapping[int, Sequence[int]]) -> None:
        await together(self._of(rank).expand({0: gpus}) for rank, gpus in ranks.items())

    async def vacated(self, gpus: Sequence[int]) -> bool:
        """Whether all engines that can tell say so: what they are asked about is memory, whoever's rank it is."""
        for engine in self._engines.values():
            tells: Callable[[Sequence[int]], Awaitable[bool]] | None = getattr(engine, "vacated", None)
            if tells is not None and not await tells(gpus):
                return False
        return True

    def _of(self, rank: int) -> PipelineHooks:
        if rank not in self._engines:
            raise InvalidRequest(f"there is no engine for rank {rank}, only for {sorted(self._engines)}")
        return self._engines[rank]


async def together(calls: Iterable[Coroutine[Any, Any, Any]]) -> None:
    """All of them, to their ends; then the first failure, if any."""
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome

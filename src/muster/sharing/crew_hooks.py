"""How do hook calls reach ranks other than 0? As actions on the crew's board, which each rank's hook runner fetches."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence

from muster.errors import SharingError
from muster.sharing.crew import Crew
from muster.sharing.gate import Gate
from muster.types.codec import from_wire, to_wire
from muster.types.pools import Action, ActionAnswer
from muster.types.sharing import Gpu

LOOK_S = 0.02


def owners(bundle: int, bundles: int, size: int) -> list[int]:
    """The ranks of a crew that work on a bundle: neighbours share one, or one has several."""
    if bundles >= size:
        return [bundle * size // bundles]
    return [rank for rank in range(size) if rank * bundles // size == bundle]


class CrewHooks:
    """Rank 0's: each call goes to the ranks that own its bundles, and is done when all of them have done it."""

    def __init__(self, crew: Crew, gate: Gate, bundles: Sequence[Sequence[Gpu]]) -> None:
        self._crew, self._gate = crew, gate
        self._bundles = bundles
        self._numbers = {rank: itertools.count(1) for rank in range(1, crew.size)}
        if getattr(gate, "vacated", None) is not None:
            self.vacated = self._vacated

    async def shrink(self, ranks: Sequence[int], /) -> None:
        await self._all(
            self._gate.shrink(mine) if rank == 0 else self._order(rank, Action("", 0, "shrink", tuple(mine)))
            for rank, mine in self._by_owner(ranks).items()
        )

    async def expand(self, ranks: Mapping[int, Sequence[Gpu]], /) -> None:
        async def expand(rank: int, mine: Sequence[int]) -> None:
            if rank == 0:
                await self._gate.expand({one: ranks[one] for one in mine})
                return
            bundles = {str(one): tuple(ranks[one]) for one in mine}
            await self._order(rank, Action("", 0, "expand", tuple(mine), bundles=bundles))

        await self._all(expand(rank, mine) for rank, mine in self._by_owner(list(ranks)).items())

    async def _vacated(self, gpus: Sequence[Gpu], /) -> bool:
        here: Callable[[Sequence[Gpu]], Awaitable[bool]] = self._gate.vacated
        touched = [number for number, bundle in enumerate(self._bundles) if set(bundle) & set(gpus)]
        for rank in self._by_owner(touched):
            if rank:
                await self._order(rank, Action("", 0, "vacated", gpus=tuple(gpus)))
        return await here(gpus)

    def _by_owner(self, ranks: Sequence[int]) -> Mapping[int, list[int]]:
        found: dict[int, list[int]] = defaultdict(list)
        for one in ranks:
            for rank in owners(one, len(self._bundles), self._crew.size):
                found[rank].append(one)
        return found

    async def _all(self, calls: Iterable[Awaitable[None]]) -> None:
        await asyncio.gather(*calls)

    async def _order(self, rank: int, action: Action) -> None:
        number = next(self._numbers[rank])
        asked = Action(f"{action.do}-{number}", number, action.do, action.ranks, action.gpus, action.bundles)
        self._crew.post(f"order/{rank}/{number}", json.dumps(to_wire(asked)))
        while (told := self._crew.find(f"answer/{rank}/{number}")) is None:
            await asyncio.sleep(LOOK_S)
        answer = from_wire(ActionAnswer, json.loads(told))
        if not answer.ok:
            raise SharingError(f"rank {rank}: {answer.error or 'it failed'}")


class CrewWire:
    """The other ranks': what their hook runners fetch actions from, in place of a server."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew

    async def next_action(self, pipeline: str, after: int) -> Action | None:
        while (told := self._crew.find(f"order/{self._crew.rank}/{after + 1}")) is None:
            await asyncio.sleep(LOOK_S)
        return from_wire(Action, json.loads(told))

    async def answer(self, pipeline: str, action: Action, answer: ActionAnswer) -> None:
        self._crew.post(f"answer/{self._crew.rank}/{action.epoch}", json.dumps(to_wire(answer)))

    async def attach(self, pipeline: str) -> None: ...

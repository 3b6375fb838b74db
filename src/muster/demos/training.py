"""How does a pipeline train? Two data-parallel processes load the policy, do their part, and drop it again.

Between stages they hold nothing: what a stage needs from the one before is in files or in the pipeline's own memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from muster.demos.orders import A, Begin, Group, Join, Learn, Load, LogProbs, Publish, RankOrder, Rows, Unload
from muster.demos.processes import RankProcess, WorkerFailed


class TrainingStage:
    """The ranks of `actor_train`, and the weights that they have published."""

    def __init__(self, ranks: Sequence[RankProcess], folder: Path) -> None:
        self._ranks, self._folder = ranks, folder
        self._version = 0

    @property
    def newest(self) -> Path:
        return self._folder / f"weights-{self._version:05}.pt"

    async def join(self) -> None:
        """Let the ranks find each other."""
        world, meeting = len(self._ranks), self._folder / "meeting"
        await asyncio.gather(*(one.ask(Join(rank, world, meeting)) for rank, one in enumerate(self._ranks)))

    async def begin(self, seed: int) -> None:
        """Make and publish the first weights."""
        await self._all(Begin(seed))
        await self.publish()

    async def load(self) -> None:
        await self._all(Load(self.newest, self._folder / "optimiser.pt"))

    async def unload(self) -> None:
        """Returns when every rank confirms that it holds nothing."""
        for memory in await self._all(Unload()):
            if memory.tensors:
                raise WorkerFailed(f"a trainer still holds {memory.tensors} bytes after it dropped its weights")

    async def log_probs(self, groups: tuple[Group, ...]) -> Rows:
        """A row per answer. Each rank answers for every n-th one; the rows are put together again here."""
        parts = await self._all(LogProbs(groups))
        rows: list[tuple[float, ...]] = [()] * sum(len(part) for part in parts)
        for rank, part in enumerate(parts):
            rows[rank :: len(parts)] = part
        return tuple(rows)

    async def learn(self, groups: tuple[Group, ...], old: Rows, seed: int) -> None:
        await self._all(Learn(groups, old, seed))

    async def publish(self) -> None:
        """From its return on, ranks that wake load these."""
        await self._all(Publish(self._folder / f"weights-{self._version + 1:05}.pt", self._folder / "optimiser.pt"))
        self._version += 1

    async def _all(self, order: RankOrder[A]) -> list[A]:
        return await asyncio.gather(*(rank.ask(order) for rank in self._ranks))

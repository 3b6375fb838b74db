"""How does a pipeline train? Two data-parallel processes load the policy, do their part, and drop it again.

Between stages they hold nothing: what a stage needs from the one before is in files or in the pipeline's own memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from muster.sharing.demo.crew import Worker, WorkerFailed
from muster.sharing.demo.wire import Begin, Done, Drop, Group, Join, Learn, Load, LogProbs, Memory, Publish, Rows


class Training:
    """The ranks of `actor_train`, and the weights that they have published."""

    def __init__(self, workers: Sequence[Worker], folder: Path) -> None:
        self._workers, self._folder = workers, folder
        self._version = 0

    @property
    def newest(self) -> Path:
        return self._folder / f"weights-{self._version:05}.pt"

    async def join(self) -> None:
        """Let the ranks find each other."""
        world, meeting = len(self._workers), self._folder / "meeting"
        joins = [worker.ask(Join(rank, world, meeting), Done) for rank, worker in enumerate(self._workers)]
        await asyncio.gather(*joins)

    async def begin(self, seed: int) -> None:
        """Make and publish the first weights."""
        await asyncio.gather(*(worker.ask(Begin(seed), Done) for worker in self._workers))
        await self.publish()

    async def load(self) -> None:
        order = Load(self.newest, self._folder / "optimiser.pt")
        await asyncio.gather(*(worker.ask(order, Done) for worker in self._workers))

    async def drop(self) -> None:
        """Returns when every rank confirms that it holds nothing."""
        for memory in await asyncio.gather(*(worker.ask(Drop(), Memory) for worker in self._workers)):
            if memory.tensors:
                raise WorkerFailed(f"a trainer still holds {memory.tensors} bytes after it dropped its weights")

    async def log_probs(self, groups: tuple[Group, ...]) -> tuple[tuple[float, ...], ...]:
        """A row per answer. Each rank answers for every n-th one; the rows are put together again here."""
        parts = await asyncio.gather(*(worker.ask(LogProbs(groups), Rows) for worker in self._workers))
        rows: list[tuple[float, ...]] = [()] * sum(len(part.rows) for part in parts)
        for rank, part in enumerate(parts):
            rows[rank :: len(parts)] = part.rows
        return tuple(rows)

    async def learn(self, groups: tuple[Group, ...], old: tuple[tuple[float, ...], ...], seed: int) -> None:
        await asyncio.gather(*(worker.ask(Learn(groups, old, seed), Done) for worker in self._workers))

    async def publish(self) -> None:
        """From its return on, ranks that wake load these."""
        path = self._folder / f"weights-{self._version + 1:05}.pt"
        order = Publish(path, self._folder / "optimiser.pt")
        await asyncio.gather(*(worker.ask(order, Done) for worker in self._workers))
        self._version += 1

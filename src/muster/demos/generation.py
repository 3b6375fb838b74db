"""How does a pipeline generate with however many GPUs it has at the moment?

Turns wait in one queue; every rank that is awake takes the next one. The scheduler's hooks put ranks to sleep and wake
them: a rank that is put to sleep loses its turn, which goes back to its place in the queue, and its weights, which
its process confirms to be gone. A rank that wakes loads the newest weights that were published.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from muster.demos.occupancy import Occupancy
from muster.demos.orders import Generate, Load, Unload, Weigh
from muster.demos.processes import RankProcess, WorkerDied, WorkerFailed
from muster.demos.tasks import Digits
from muster.errors import MusterError
from muster.types.sharing import ClusterSpec

OnAnswer = Callable[[int], Awaitable[None]]


@dataclass(frozen=True, order=True)
class Turn:
    """One prompt that is to be answered several times. Turns are ordered, so one that is queued again comes first."""

    index: int
    order: Generate = field(compare=False)


@dataclass(frozen=True)
class Awake:
    weights: Path
    pump: asyncio.Task[None]


class GenerationStage:
    """The ranks of `actor_infer`, and the hooks that the scheduler calls."""

    def __init__(
        self,
        ranks: Sequence[RankProcess],
        spec: ClusterSpec,
        newest: Callable[[], Path],
        occupancy: Occupancy,
        letter: str,
    ) -> None:
        self._ranks, self._spec, self._newest = ranks, spec, newest
        self._occupancy, self._letter = occupancy, letter
        self._awake: dict[int, Awake] = {}
        self._queue: asyncio.PriorityQueue[Turn] = asyncio.PriorityQueue()
        self._answers: dict[int, tuple[Digits, ...]] = {}
        self._on_answer: OnAnswer | None = None
        self._wanted = 0
        self._settled = asyncio.Event()  # all answers are there, or a rank has failed
        self._failure: MusterError | None = None
        self._broken: MusterError | None = None
        self.resizes = 0
        self.queued_again = 0

    # What the pipeline calls ----------------------------------------------------------------------

    async def answer(self, orders: Sequence[Generate], on_answer: OnAnswer) -> list[tuple[Digits, ...]]:
        """All answers, in the order of the prompts, whichever ranks there were. Says how many came each time."""
        self._answers, self._wanted, self._on_answer = {}, len(orders), on_answer
        self._settled.clear()
        for index, order in enumerate(orders):
            self._queue.put_nowait(Turn(index, order))
        await self._settled.wait()
        if self._failure is not None:
            raise self._failure
        return [self._answers[index] for index in range(len(orders))]

    async def give_up(self, why: MusterError) -> None:
        """Stop routing. From now on the hooks raise: a pipeline that lost a process cannot vouch for its GPUs."""
        self._broken = why
        await asyncio.gather(*(self._stop_routing(rank) for rank in list(self._awake)))

    # What the scheduler calls ----------------------------------------------------------------------

    async def shrink(self, ranks: Iterable[int]) -> None:
        self._check()
        await _all(self._put_to_sleep(rank) for rank in ranks)

    async def expand(self, ranks: Mapping[int, Sequence[int]]) -> None:
        self._check()
        await _all(self._wake(rank, tuple(gpus)) for rank, gpus in ranks.items())

    async def vacated(self, gpus: Iterable[int]) -> bool:
        """Do the processes on these GPUs confirm that they hold not one tensor?"""
        self._check()
        chosen = sorted(gpus)
        ranks = sorted({self._spec.rank_at[gpu] for gpu in chosen})
        held = await asyncio.gather(*(self._ranks[rank].ask(Weigh()) for rank in ranks))
        empty = all(memory.tensors == 0 for memory in held)
        if empty:
            self._occupancy.give(chosen, self._letter)
        return empty

    def _check(self) -> None:
        if self._broken is not None:
            raise WorkerFailed(self._broken.message)

    async def _put_to_sleep(self, rank: int) -> None:
        if await self._stop_routing(rank):
            self.resizes += 1
        await self._ranks[rank].ask(Unload())  # also when it sleeps: a wake may have stopped half-way

    async def _wake(self, rank: int, gpus: tuple[int, ...]) -> None:
        weights, awake = self._newest(), self._awake.get(rank)
        if awake is not None and awake.weights == weights:
            return
        await self._stop_routing(rank)
        self._occupancy.take(gpus, self._letter)
        await self._ranks[rank].ask(Load(weights))
        self._awake[rank] = Awake(weights, asyncio.create_task(self._pump(self._ranks[rank])))
        self.resizes += 1

    async def _stop_routing(self, rank: int) -> bool:
        awake = self._awake.pop(rank, None)
        if awake is None:
            return False
        awake.pump.cancel()
        await asyncio.gather(awake.pump, return_exceptions=True)
        return True

    # The ranks -----------------------------------------------------------------------------------

    async def _pump(self, rank: RankProcess) -> None:
        """Give turns to a rank until it is put to sleep or fails."""
        while True:
            turn = await self._queue.get()
            try:
                answers = await rank.ask(turn.order)
            except asyncio.CancelledError:
                self._queue_again(turn)
                raise
            except (WorkerDied, WorkerFailed) as error:
                self._queue_again(turn)
                self._failure = error
                return self._settled.set()
            if answers is None:
                self._queue_again(turn)
            else:
                await self._note(turn, answers)

    async def _note(self, turn: Turn, answers: tuple[Digits, ...]) -> None:
        self._answers[turn.index] = answers
        try:
            if self._on_answer is not None:
                await self._on_answer(len(answers))
        finally:  # also when the rank is put to sleep meanwhile: the answer counts
            if len(self._answers) == self._wanted:
                self._settled.set()

    def _queue_again(self, turn: Turn) -> None:
        self.queued_again += 1
        self._queue.put_nowait(turn)


async def _all(calls: Iterable[Awaitable[None]]) -> None:
    """Every call runs to its end, also when one fails: a rank is not left half-way because of another."""
    for outcome in await asyncio.gather(*calls, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome

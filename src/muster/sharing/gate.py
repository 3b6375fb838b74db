"""May this process generate now? Only in a turn, and a turn begins only while its GPUs are leased and awake.

A `Gate` stands between an engine and whoever generates with it. The scheduler's calls come on an event loop, turns are
taken on other threads. A shrink lets no new turn in, tells those in flight, waits until they have ended, and only then
has the engine go down: so there is no token without a lease, whatever happens between a grant and the first one.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence

from muster.errors import InvalidRequest
from muster.sharing import hooks as pipeline_hooks
from muster.sharing.hooks import PipelineHooks
from muster.types.sharing import Gpu

LOOK_S = 0.2  # how often one that waits looks whether it still should

Check = Callable[[float], None]  # called now and then with the seconds waited; raises to end the wait


class Turn:
    """A piece of generation, and the bundles it may use."""

    def __init__(self, bundles: Mapping[int, Sequence[Gpu]]) -> None:
        self.bundles = {rank: tuple(gpus) for rank, gpus in bundles.items()}
        self._asked_at: float | None = None  # since when somebody else is to have one of them

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        return tuple(sorted(gpu for gpus in self.bundles.values() for gpu in gpus))

    def interrupted(self, after_s: float = 0.0) -> bool:
        """Whether one of its GPUs has been wanted back, for at least so long: the shrink waits for this turn's end."""
        return self._asked_at is not None and time.monotonic() - self._asked_at >= after_s

    def interrupt(self) -> None:
        if self._asked_at is None:
            self._asked_at = time.monotonic()


class Gate:
    """Hooks around an engine's. Turns are taken on any thread; hooks are called on one event loop."""

    def __init__(self, engine: PipelineHooks | None = None) -> None:
        self.engine: PipelineHooks | None = None
        self._change = threading.Condition()
        self._awake: dict[int, tuple[Gpu, ...]] = {}
        self._turns: list[Turn] = []
        self._left: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
        if engine is not None:
            self.attach(engine)

    def attach(self, engine: PipelineHooks) -> None:
        """The engine that is moved. One that can tell whether its GPUs are empty is asked."""
        if problems := pipeline_hooks.problems(engine):
            raise InvalidRequest(f"the engine: {problems[0].message}", problems=problems)
        if self.engine is not None and self.engine is not engine:
            raise InvalidRequest("an engine is attached already")
        self.engine = engine
        vacated: Callable[[Sequence[Gpu]], Awaitable[bool]] | None = getattr(engine, "vacated", None)
        if vacated is not None:
            self.vacated = vacated

    @property
    def awake(self) -> Mapping[int, tuple[Gpu, ...]]:
        with self._change:
            return dict(self._awake)

    # What the scheduler calls

    async def expand(self, ranks: Mapping[int, Sequence[Gpu]], /) -> None:
        await self._engine().expand(ranks)
        with self._change:
            self._awake.update({rank: tuple(gpus) for rank, gpus in ranks.items()})
            self._change.notify_all()

    async def shrink(self, ranks: Sequence[int], /) -> None:
        """It may be cancelled and called again; ranks stay out of use meanwhile."""
        gone = set(ranks)
        with self._change:
            for rank in gone:
                self._awake.pop(rank, None)
        while self._busy(gone):
            ended = asyncio.Event()
            waiting = (asyncio.get_running_loop(), ended)
            self._left.append(waiting)
            try:
                if self._busy(gone):  # none can have begun: they are not awake
                    await ended.wait()
            finally:
                self._left.remove(waiting)
        if self.engine is not None:  # else nothing was ever awake
            await self.engine.shrink(list(ranks))

    def _engine(self) -> PipelineHooks:
        if self.engine is None:
            raise InvalidRequest("no engine is attached: nothing can be moved")
        return self.engine

    def _busy(self, ranks: set[int]) -> bool:
        with self._change:
            found = [turn for turn in self._turns if ranks & turn.bundles.keys()]
        for turn in found:
            turn.interrupt()
        return bool(found)

    # What a generating thread does

    @contextlib.contextmanager
    def turn(self, check: Check = lambda waited_s: None) -> Iterator[Turn]:
        """Blocks until a bundle is awake. Until it is left, no bundle of it is given to anybody else."""
        turn = self._begun(check)
        try:
            yield turn
        finally:
            with self._change:
                self._turns.remove(turn)
            for loop, ended in list(self._left):
                with contextlib.suppress(RuntimeError):  # a loop that is closed waits for nothing
                    loop.call_soon_threadsafe(ended.set)

    def _begun(self, check: Check) -> Turn:
        began = time.monotonic()
        while True:
            check(time.monotonic() - began)
            with self._change:
                if not self._awake:
                    self._change.wait(LOOK_S)
                if self._awake:
                    turn = Turn(self._awake)
                    self._turns.append(turn)
                    return turn

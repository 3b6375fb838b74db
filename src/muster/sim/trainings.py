"""What does an elastic training do beside the pipelines? It fills what they leave, and gives it back when it is asked.

Its minimum is one worker, on a GPU of its own beside those of the scenario: what it gains or costs is what happens on
the scenario's GPUs. A change of size stops all its workers for as long as leaving and coming back take.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from muster.sharing.scheduler import Scheduler
from muster.sim.recording import Recorder, Use
from muster.types.sharing import Crew, gpus_of, mask_of


@dataclass(frozen=True)
class TrainingLoad:
    """What its changes cost; measured with real processes, see `make bench-pool`."""

    vacate_s: float = 0.3
    return_s: float = 0.5


class SimulatedTraining:
    def __init__(self, name: str, gpus: int, load: TrainingLoad, recorder: Recorder) -> None:
        self.name = name
        self.resizes = 0
        self._load, self._recorder, self._most = load, recorder, gpus
        self._active: set[int] = set()  # masks of the GPUs of workers that are part of its world
        self._due = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    def enter(self, scheduler: Scheduler) -> None:
        self._pool = scheduler.trainings
        self._pool.heard_by(lambda training: self._due.set())
        self._declare()
        self._task = asyncio.create_task(self._live(), name=self.name)

    def leave(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._recorder.free(_gpus(self._active))

    def _declare(self) -> None:
        self._pool.declare(
            Crew(self.name, f"sim/{self.name}", 1, 1, 1, self._most, "fill", using=_mask(self._active), admitted=True)
        )

    async def _live(self) -> None:
        while True:
            await self._due.wait()
            self._due.clear()
            leaving = self._active.intersection(self._pool.leaving(self.name))
            new = set(self._pool.held(self.name)) - self._active
            if leaving or new:
                await self._resize(leaving)

    async def _resize(self, leaving: set[int]) -> None:
        """All stop; those that leave are gone then, and the others go on together with those that have come."""
        self.resizes += 1
        self._recorder.use(_gpus(self._active), self.name, Use.RESIZE)
        await asyncio.sleep(self._load.vacate_s)
        leaving |= self._active.intersection(self._pool.leaving(self.name))
        self._active -= leaving
        self._recorder.free(_gpus(leaving), preempted=bool(leaving))
        self._declare()
        self._pool.left(self.name, _mask(leaving))
        new = set(self._pool.held(self.name)) - self._active
        self._recorder.use(_gpus(new), self.name, Use.RESIZE)
        self._active |= new
        self._declare()
        await asyncio.sleep(self._load.return_s)
        self._pool.returned(self.name, self._load.return_s)
        self._recorder.use(_gpus(self._active), self.name, Use.FILL)
        self._due.set()  # whatever was asked meanwhile


def _mask(masks: set[int]) -> int:
    return mask_of(_gpus(masks))


def _gpus(masks: set[int]) -> list[int]:
    return sorted(gpu for mask in masks for gpu in gpus_of(mask))

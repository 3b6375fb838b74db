"""How does a training take part that fills what the pipelines leave? It is submitted like any other.

One worker is its minimum; the others it has while nobody else has a use for their GPUs, and gives them back at the end
of a step. What happened is read from its ranks' own log.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from muster.demos import step_log
from muster.demos.occupancy import Spell
from muster.demos.step_log import Account
from muster.errors import MusterError
from muster.sdk.client import Client
from muster.sdk.training import DistributedTraining
from muster.types.training import Metadata, Resources, Spec, Training, WorldSize

NAME, LETTER = "T", "t"
_PROGRAM = Path(__file__).with_name("filling_training.py")
_AHEAD = "muster.demos.filling_training"  # what ranks need is in the memory that they are forked from, `State` included
_PACE_S = 0.04  # a step, in place of what a GPU would take
_LOOK_S = 0.05
_START_S = 60.0
_BACK_S = 15.0
_END_S = 20.0


class TrainingFailed(MusterError):
    """It does not train, or not as it should."""

    code = "training_failed"


class FillingTraining:
    def __init__(self, client: Client, folder: Path, gpus: int, say: Callable[[str], None]) -> None:
        self._client, self._folder, self._gpus, self._say = client, folder, gpus, say
        self._handle: DistributedTraining | None = None
        self.problem = ""  # why it did not end well

    def described(self) -> Training:
        size = WorldSize(min=1, target=1, max=self._gpus)
        return Training(
            Metadata(name="filling"),
            Spec(
                script=str(_PROGRAM),
                args=(str(self._folder), str(_PACE_S)),
                working_dir=str(self._folder),
                env={"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
                world_size=size,
                resources=Resources(gpus=1),
                preload=(_AHEAD,),
                elasticity="fill",
            ),
        )

    async def submit(self) -> None:
        self._folder.mkdir()
        self._handle = await self._client.submit_async(self.described())
        self._say(
            f"{NAME} is a training that fills: 1 worker at least, up to {self._gpus} where nobody needs the GPUs, "
            f"an artificial {_PACE_S * 1000:.0f} ms a step in place of a GPU's work"
        )

    async def has_all(self) -> None:
        """Until it trains on every GPU."""
        await self._until(self._gpus, _START_S)

    async def come_back(self) -> None:
        """Until it trains on every GPU again, if it can. Why it cannot is kept as its problem."""
        with self._noted():
            await self._until(self._gpus, _BACK_S)
            self._say(f"{NAME} has all {self._gpus} GPUs again, and is told to end")

    async def finish(self) -> None:
        """Until it has ended by itself."""
        (self._folder / step_log.STOP).touch()
        with self._noted():
            assert self._handle is not None
            await self._handle.wait_async(_END_S)
            self._say(f"{NAME} is done")

    @contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except MusterError as error:
            self.problem = self.problem or str(error)
            self._say(f"{NAME} failed: {error}")

    async def _until(self, ranks: int, within_s: float) -> None:
        """Until a step is done by so many, from now on."""
        assert self._handle is not None
        await self._handle.refresh_async()
        if self._handle.is_terminal:
            raise TrainingFailed(f"it has ended: {self._handle.outcome}")
        clock = time.monotonic  # as its ranks have it
        begin = clock()
        while not any(line.what == "ends" and line.ranks == ranks and line.at > begin for line in self.lines()):
            await asyncio.sleep(_LOOK_S)
            if clock() > begin + within_s:
                why = await self._client.explain_async(self._handle.name)
                raise TrainingFailed(f"it does not train on {ranks} GPUs after {within_s:g} s: {why}")

    # What happened

    def lines(self) -> list[step_log.Line]:
        return step_log.read(self._folder)

    def spells(self) -> list[Spell]:
        return step_log.spells(self.lines(), LETTER)

    def account(self) -> Account:
        return step_log.account(self.lines())

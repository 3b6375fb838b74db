"""Who is waiting inside a call right now, and what answers them?

Places in the queue are part of the state and survive a restart; these are only the calls that wait for them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

from muster.core.sharing import leases
from muster.types.sharing import Gpu, PipelineId, Shares


@dataclass(eq=False)
class _Departure:
    """Somebody waits until these leases are gone."""

    pipeline: PipelineId
    epochs: leases.Epochs
    done: asyncio.Future[None]

    def is_over(self, shares: Shares) -> bool:
        return not any(
            (lease := shares.leases.get(bundle)) is not None and lease.epoch == epoch
            for bundle, epoch in self.epochs.items()
        )


class Waiters:
    def __init__(self) -> None:
        self._grants: dict[int, tuple[PipelineId, asyncio.Future[list[Gpu]]]] = {}
        self._departures: list[_Departure] = []

    def __contains__(self, seq: object) -> bool:
        return seq in self._grants

    def seqs_of(self, pipeline: PipelineId) -> list[int]:
        return [seq for seq, (owner, _) in self._grants.items() if owner == pipeline]

    def for_grant(self, seq: int, pipeline: PipelineId) -> asyncio.Future[list[Gpu]]:
        future: asyncio.Future[list[Gpu]] = asyncio.get_running_loop().create_future()
        self._grants[seq] = (pipeline, future)
        return future

    def for_departure(self, pipeline: PipelineId, epochs: leases.Epochs) -> asyncio.Future[None]:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if epochs:
            self._departures.append(_Departure(pipeline, epochs, future))
        else:
            future.set_result(None)
        return future

    def answer(self, seq: int, gpus: Iterable[Gpu]) -> bool:
        """Whether somebody was there to hear it."""
        _, future = self._grants.pop(seq, (None, None))
        if future is None or future.done():
            return False
        future.set_result(list(gpus))
        return True

    def leave(self, seq: int) -> None:
        self._grants.pop(seq, None)

    def refuse(self, seq: int, error: Exception) -> None:
        _, future = self._grants.pop(seq, (None, None))
        if future is not None:
            _fail(future, error)

    def settle(self, shares: Shares) -> None:
        """Answer those whose leases are gone."""
        if not self._departures:
            return
        over = [one for one in self._departures if one.is_over(shares)]
        for one in over:
            if not one.done.done():
                one.done.set_result(None)
        self._departures = [one for one in self._departures if one not in over and not one.done.done()]

    def fail_pipeline(self, pipeline: PipelineId, error: Exception) -> None:
        for seq in self.seqs_of(pipeline):
            self.refuse(seq, error)
        for one in self._departures:
            if one.pipeline == pipeline:
                _fail(one.done, error)
        self._departures = [one for one in self._departures if one.pipeline != pipeline]

    def fail_all(self, error: Exception) -> None:
        for seq in list(self._grants):
            self.refuse(seq, error)
        for one in self._departures:
            _fail(one.done, error)
        self._departures = []


def _fail(future: asyncio.Future[list[Gpu]] | asyncio.Future[None], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # looked at: whoever waited may have gone

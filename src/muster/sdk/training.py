"""What does a user hold in the hand after submitting a training?

A `DistributedTraining` is a handle: it shows the training as last read, and every method has an `_async` twin that
drives the same flow.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterator
from typing import TYPE_CHECKING, Self

from muster.core.training import waits
from muster.core.training.waits import Goal
from muster.errors import MusterError
from muster.sdk import flows, streams
from muster.sdk.flows import Handle
from muster.types.bench import Bench
from muster.types.event import Event
from muster.types.metrics import Metrics
from muster.types.training import Condition, Outcome, Phase, RankExit, RankStatus, Training, WorldStatus
from muster.types.usage import Usage

if TYPE_CHECKING:
    from muster.sdk.client import Client


class DistributedTraining:
    """A training that the control plane keeps. What it shows is as old as the last call; `refresh` reads again."""

    def __init__(self, client: Client, training: Training) -> None:
        self._client = client
        self._handle = Handle(training)

    def __repr__(self) -> str:
        world = self.world
        return f"<DistributedTraining {self.namespace}/{self.name} {self.phase} {world.ready}/{world.target}>"

    # What it is

    @property
    def training(self) -> Training:
        """The whole object, as last read."""
        return self._handle.training

    @property
    def name(self) -> str:
        return self.training.metadata.name

    @property
    def namespace(self) -> str:
        return self.training.metadata.namespace

    @property
    def generation(self) -> int:
        return self.training.generation

    @property
    def phase(self) -> Phase:
        return self.training.status.phase

    @property
    def is_terminal(self) -> bool:
        return self.training.is_terminal

    @property
    def world(self) -> WorldStatus:
        return waits.world_of(self.training)

    @property
    def rendezvous_endpoint(self) -> str | None:
        """HOST:PORT of the store at which the ranks of the current round meet; None while no round is out."""
        return self.training.status.rendezvous_endpoint

    @property
    def ranks(self) -> list[RankStatus]:
        return list(self.training.status.ranks)

    @property
    def rank_exits(self) -> list[RankExit]:
        """How each rank of the last round ended; empty while it runs."""
        return list(self.training.status.rank_exits or ())

    @property
    def conditions(self) -> list[Condition]:
        return list(self.training.status.conditions)

    @property
    def bench(self) -> Bench | None:
        """How fast all-reduce was between its workers before its program began, if `bench` asked for that."""
        return self.training.status.bench

    @property
    def outcome(self) -> Outcome | None:
        return self.training.status.outcome

    # What it can be told

    def refresh(self) -> None:
        """Read it again."""
        self._client.run(flows.refresh(self._handle))

    async def refresh_async(self) -> None:
        await self._client.run_async(flows.refresh(self._handle))

    def scale(self, target: int) -> WorldStatus:
        """Ask for another number of workers; the answer has the requested target. It does not wait."""
        return self._client.run(flows.scale(self._handle, target))

    async def scale_async(self, target: int) -> WorldStatus:
        return await self._client.run_async(flows.scale(self._handle, target))

    def cancel(self, grace_seconds: float | None = None) -> None:
        """Have it stopped. On a training that has ended this changes nothing."""
        self._client.run(flows.cancel(self._handle, grace_seconds))

    async def cancel_async(self, grace_seconds: float | None = None) -> None:
        await self._client.run_async(flows.cancel(self._handle, grace_seconds))

    def kill(self, rank: int, *, worker: bool = False) -> None:
        """Send SIGKILL to a rank, or with `worker` to every process of its worker. The handle must be up to date."""
        self._client.run(flows.kill(self._handle, rank, worker))

    async def kill_async(self, rank: int, *, worker: bool = False) -> None:
        await self._client.run_async(flows.kill(self._handle, rank, worker))

    def suspend(self) -> None:
        """Have its workers leave, after they were told to save; it waits until it is resumed."""
        self._client.run(flows.suspend(self._handle, True))

    async def suspend_async(self) -> None:
        await self._client.run_async(flows.suspend(self._handle, True))

    def resume(self) -> None:
        """Let it have workers again. One that is not suspended is left as it is."""
        self._client.run(flows.suspend(self._handle, False))

    async def resume_async(self) -> None:
        await self._client.run_async(flows.suspend(self._handle, False))

    def delete(self, timeout: float | None = None) -> None:
        """Stop it if it runs, remove it, and come back when it is gone."""
        self._client.run(flows.delete(self._handle, timeout))

    async def delete_async(self, timeout: float | None = None) -> None:
        await self._client.run_async(flows.delete(self._handle, timeout))

    # What it tells

    def logs(
        self,
        rank: int | None = None,
        round: int | None = None,
        follow: bool = False,
        tail: int | None = None,
        timestamps: bool = False,
    ) -> Iterator[str]:
        """What its ranks wrote, line by line; with `follow` until it has ended, with `timestamps` after its time."""
        return self._client.iterate(streams.logs(self._handle, rank, round, follow, tail, timestamps))

    def logs_async(
        self,
        rank: int | None = None,
        round: int | None = None,
        follow: bool = False,
        tail: int | None = None,
        timestamps: bool = False,
    ) -> AsyncIterator[str]:
        return self._client.iterate_async(streams.logs(self._handle, rank, round, follow, tail, timestamps))

    def stream_logs(self, ranks: Collection[int] | None = None, timestamps: bool = False) -> Iterator[tuple[int, str]]:
        """(rank, line) for all that its ranks write, or some of them, as they write it, until it has ended."""
        return self._client.iterate(streams.rank_logs(self._handle, ranks, timestamps))

    def stream_logs_async(
        self, ranks: Collection[int] | None = None, timestamps: bool = False
    ) -> AsyncIterator[tuple[int, str]]:
        return self._client.iterate_async(streams.rank_logs(self._handle, ranks, timestamps))

    def events(self, since: flows.Since | None = None, *, limit: int | None = None) -> list[Event]:
        """What happened to it, oldest first; since a time, or behind an event or its id; the newest so many of it."""
        return self._client.run(flows.events_of(self._handle, since, limit))

    async def events_async(self, since: flows.Since | None = None, *, limit: int | None = None) -> list[Event]:
        return await self._client.run_async(flows.events_of(self._handle, since, limit))

    def metrics(self, *names: str, after: float | None = None) -> Metrics:
        """Curves of what its ranks logged, of its steps and its size, and what its workers use; or only these."""
        return self._client.run(flows.metrics_of(self._handle, names, after))

    async def metrics_async(self, *names: str, after: float | None = None) -> Metrics:
        return await self._client.run_async(flows.metrics_of(self._handle, names, after))

    def usage(self) -> Usage:
        """The worker-seconds and GPU-seconds that it used so far."""
        return self._client.run(flows.usage_of(self._handle))

    async def usage_async(self) -> Usage:
        return await self._client.run_async(flows.usage_of(self._handle))

    # Held for the length of a block

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Cancel it if it still runs, and wait for nothing. What went wrong in the block comes first."""
        try:
            self._client.run(flows.leave(self._handle))
        except MusterError as wrong:
            _told_beside(error, wrong, self.name)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            await self._client.run_async(flows.leave(self._handle))
        except MusterError as wrong:
            _told_beside(error, wrong, self.name)

    # What can be waited for

    def wait_until_min_world(self, timeout: float | None = None) -> WorldStatus:
        """Until at least the minimum of workers trains, or it has succeeded."""
        return self._wait("min", timeout)

    async def wait_until_min_world_async(self, timeout: float | None = None) -> WorldStatus:
        return await self._wait_async("min", timeout)

    def wait_until_target_world(self, timeout: float | None = None) -> WorldStatus:
        """Until the target that was last asked for is reached, or it has succeeded."""
        return self._wait("target", timeout)

    async def wait_until_target_world_async(self, timeout: float | None = None) -> WorldStatus:
        return await self._wait_async("target", timeout)

    def wait_until_complete(self, timeout: float | None = None) -> WorldStatus:
        """Until it has succeeded. A training that had ended before is an error here; see `wait`."""
        return self._wait("complete", timeout)

    async def wait_until_complete_async(self, timeout: float | None = None) -> WorldStatus:
        return await self._wait_async("complete", timeout)

    def wait(self, timeout: float | None = None) -> WorldStatus:
        """Until it has succeeded, now or before; raises if it failed or was cancelled."""
        return self._wait("result", timeout)

    async def wait_async(self, timeout: float | None = None) -> WorldStatus:
        return await self._wait_async("result", timeout)

    def result(self, timeout: float | None = None) -> WorldStatus:
        """The final status, or the error that tells how each failed rank ended."""
        return self._wait("result", timeout)

    async def result_async(self, timeout: float | None = None) -> WorldStatus:
        return await self._wait_async("result", timeout)

    def _wait(self, goal: Goal, timeout: float | None) -> WorldStatus:
        return self._client.run(flows.wait(self._handle, goal, timeout))

    async def _wait_async(self, goal: Goal, timeout: float | None) -> WorldStatus:
        return await self._client.run_async(flows.wait(self._handle, goal, timeout))


def _told_beside(error: BaseException | None, wrong: MusterError, name: str) -> None:
    """A training that could not be cancelled is an error of its own, unless another one is on its way already."""
    if error is None:
        raise wrong
    error.add_note(f"training {name} could not be cancelled: {wrong.message}")

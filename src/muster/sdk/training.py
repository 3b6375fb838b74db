"""What does a user hold in the hand after submitting a training?

A `DistributedTraining` is a handle: it shows the training as last read, and every method has an `_async` twin that
drives the same flow.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

from muster.core.training import waits
from muster.core.training.waits import Goal
from muster.sdk import flows, streams
from muster.sdk.flows import Handle
from muster.types.event import Event
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
        self, rank: int | None = None, round: int | None = None, follow: bool = False, tail: int | None = None
    ) -> Iterator[str]:
        """What its ranks wrote, line by line; with `follow`, until it has ended."""
        return self._client.iterate(streams.logs(self._handle, rank, round, follow, tail))

    def logs_async(
        self, rank: int | None = None, round: int | None = None, follow: bool = False, tail: int | None = None
    ) -> AsyncIterator[str]:
        return self._client.iterate_async(streams.logs(self._handle, rank, round, follow, tail))

    def events(self) -> list[Event]:
        """What happened to it, oldest first."""
        return self._client.run(flows.events_of(self._handle))

    async def events_async(self) -> list[Event]:
        return await self._client.run_async(flows.events_of(self._handle))

    def usage(self) -> Usage:
        """The worker-seconds and GPU-seconds that it used so far."""
        return self._client.run(flows.usage_of(self._handle))

    async def usage_async(self) -> Usage:
        return await self._client.run_async(flows.usage_of(self._handle))

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

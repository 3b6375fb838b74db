"""Is a scheduler the same in this process, over HTTP and on Ray? All tell the stories of `scheduler_stories`."""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from muster.sharing import Scheduler
from muster.sharing.api import SchedulerApi
from muster.sharing.remote import RemoteScheduler
from tests.contract.scheduler_stories import BOUND_S, POOL, STORIES, Story
from tests.sharing.room import Engine, Room, a_room

each = pytest.mark.parametrize("story", STORIES, ids=[story.__name__ for story in STORIES])


@dataclass
class InThisProcess:
    """And over HTTP: hooks live here either way."""

    scheduler: SchedulerApi
    before: int = 0

    async def hooks(self) -> Engine:
        return Engine()

    async def asked(self, hooks: Any) -> list[str]:
        return list(hooks.calls)


@each
def test_in_this_process(story: Story, tmp_path: Path) -> None:
    async def tell() -> None:
        scheduler = Scheduler(POOL, tmp_path / "journal")
        await scheduler.start()
        try:
            async with asyncio.timeout(BOUND_S):
                await story(InThisProcess(scheduler))
        finally:
            await scheduler.stop()

    asyncio.run(tell())


@each
def test_over_http(story: Story, tmp_path: Path) -> None:
    async def tell(room: Room) -> None:
        await story(InThisProcess(await room.handle()))

    async def run() -> None:
        async with a_room(tmp_path, POOL) as room, asyncio.timeout(BOUND_S):
            await tell(room)

    asyncio.run(run())


@each
@pytest.mark.ray
@pytest.mark.xdist_group("ray")
def test_on_ray(story: Story, ray_outcomes: dict[str, str]) -> None:
    name = f"test_contract[{story.__name__}]"
    assert ray_outcomes.get(name, "it did not run") == "", ray_outcomes.get(name)


def adapters() -> list[type]:
    ray = pytest.importorskip("muster.sharing.ray")
    return [Scheduler, RemoteScheduler, ray.SchedulerHandle]


def test_every_adapter_takes_the_same_parameters() -> None:
    for name, operation in inspect.getmembers(SchedulerApi, inspect.isfunction):
        if name.startswith("_"):
            continue
        expected = [(one.name, one.default, one.kind) for one in inspect.signature(operation).parameters.values()]
        for adapter in adapters():
            found = inspect.signature(getattr(adapter, name)).parameters.values()
            said = [(one.name, one.default, one.kind) for one in found if one.name != "tenant"]
            assert said == expected, f"{adapter.__name__}.{name}"

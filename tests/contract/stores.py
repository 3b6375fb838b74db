"""What the stories about stores have in common."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

from muster.ports import Filter, Store, StoreChange, Stored, Write
from tests.training_builders import a_training

Story = Callable[[Store], Awaitable[None]]
ALL = Filter()


class Run(Protocol):
    def __call__(self, story: Story, *, keep_changes: int = 5000) -> None: ...


async def take(changes: AsyncIterator[StoreChange], count: int) -> list[StoreChange]:
    return [await anext(changes) for _ in range(count)]


async def settle() -> None:
    """Let every task that can run do so until it waits."""
    for _ in range(5):
        await asyncio.sleep(0)


def version_of(written: Stored | None) -> int:
    assert written is not None
    return written.version


async def fill(store: Store, names: str, namespace: str = "default") -> list[int]:
    """One training for each letter; the versions that they got."""
    return [version_of(await store.write(Write(put=a_training(name, namespace=namespace)))) for name in names]

"""Every adapter of a port tells the same stories; one joins by a line here."""

from __future__ import annotations

import asyncio
from datetime import datetime
from pathlib import Path

import pytest

from muster.ports import Store
from muster.store.memory import MemoryStore
from muster.store.sqlite import SqliteStore
from tests.contract.stores import Run, Story
from tests.training_builders import BIRTH

BOUND_S = 20.0


class _Clock:
    def now(self) -> datetime:
        return BIRTH

    def monotonic(self) -> float:
        return 0.0


@pytest.fixture(params=["memory", "sqlite"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Run:
    """Tells a story to a fresh store."""

    def opened(keep_changes: int) -> Store:
        if request.param == "memory":
            return MemoryStore(keep_changes=keep_changes, clock=_Clock())
        return SqliteStore.open(tmp_path / "store.db", synchronous="NORMAL", keep_changes=keep_changes, clock=_Clock())

    def tell(story: Story, *, keep_changes: int = 5000) -> None:
        async def bounded() -> None:
            store = opened(keep_changes)
            try:
                await asyncio.wait_for(story(store), BOUND_S)
            finally:
                await store.close()

        asyncio.run(bounded())

    return tell

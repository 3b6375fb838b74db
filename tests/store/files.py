"""Stores on disk for tests: open, tell a story, close; and SQL from outside, as someone around the API would use it."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path

from muster.store.sqlite import SqliteStore

BOUND_S = 20.0


def opened(path: Path, story: Callable[[SqliteStore], Awaitable[None]], *, keep_changes: int = 5000) -> None:
    async def bounded() -> None:
        store = SqliteStore.open(path, keep_changes=keep_changes)
        try:
            await asyncio.wait_for(story(store), BOUND_S)
        finally:
            await store.close()

    asyncio.run(bounded())


def sql(path: Path, statement: str, *values: object) -> list[tuple[object, ...]]:
    """One statement over a connection of its own, committed."""
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        return connection.execute(statement, values).fetchall()

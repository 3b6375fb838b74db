"""A store that lives and dies with its process: for tests, simulations and trials."""

from __future__ import annotations

import asyncio
import json

from muster.ports import Clock, Stored, Write
from muster.store.ledger import KEEP_CHANGES, Ledger, LedgerStore, closed
from muster.types import codec
from muster.types.event import Event


class MemoryStore(LedgerStore):
    def __init__(self, *, keep_changes: int = KEEP_CHANGES, clock: Clock | None = None) -> None:
        super().__init__(Ledger(keep=keep_changes, clock=clock))
        self._journal: list[Event] = []

    async def write(self, write: Write) -> Stored | None:
        if self._ledger.closed:
            raise closed()
        entry = self._ledger.prepare(write)
        # Read back from JSON, so that an event is here what it would be after a trip to disk.
        self._journal += [codec.from_wire(Event, json.loads(noted.raw)) for noted in entry.events]
        self._ledger.commit([entry])
        await asyncio.sleep(0)  # subscribers hear of it before the writer goes on, as with any other store
        return entry.put

    async def events(
        self,
        *,
        namespace: str | None = None,
        training: str | None = None,
        uid: str | None = None,
        after: int = 0,
        before: int | None = None,
        most: int | None = None,
    ) -> list[Event]:
        found = [
            event
            for event in self._journal[max(after, 0) :]  # ids are 1, 2, 3, …
            if namespace in (None, event.namespace) and training in (None, event.training) and uid in (None, event.uid)
            if before is None or event.id < before
        ]
        return found if most is None else found[len(found) - min(most, len(found)) :]

    async def close(self) -> None:
        self._ledger.close()

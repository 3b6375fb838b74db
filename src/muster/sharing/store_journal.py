"""How is a pool's state kept in the control plane's store? Each record of `records` is one of the store's.

Changes that come while a write is under way go into the next one together; of a record that changed twice only the
last form is written. A store that is full or away is asked again for as long as it takes: what was decided stands,
and nobody hears of it meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from pathlib import Path

from muster.core.keeping import POOL
from muster.core.sharing import records
from muster.core.sharing.records import Changes, KeptShares
from muster.errors import JournalUnusable, MusterError
from muster.ports import Record, Store, Write, insist
from muster.sharing.journal import FileJournal
from muster.types.sharing import Shares

log = logging.getLogger("muster.sharing")

MIGRATED = ".migrated"  # what the name of a file of 0.1 ends with, once all of it is in the store


class StoreJournal:
    def __init__(self, store: Store, pool: str, *, boot: str = "", file_of_0_1: Path | None = None) -> None:
        """`boot`: of the machine with which the end of what was written may be lost; "" where it cannot."""
        self._store = store
        self._name = f"pool {pool!r}"
        self._prefix = f"{pool}/"
        self._boot = boot
        self._old_file = file_of_0_1
        self._unwritten: Changes = {}
        self._next: asyncio.Future[None] | None = None  # done when what is unwritten now is written
        self._under_way: asyncio.Future[None] | None = None
        self._writer: asyncio.Task[None] | None = None
        self._failed: JournalUnusable | None = None

    def open(self, empty: Shares) -> KeptShares:
        """A file of 0.1 counts if there is one: it is put away as soon as the store has what it says."""
        if self._old_file is not None and self._old_file.exists():
            file = FileJournal(self._old_file)
            try:
                return file.open(empty)
            finally:
                file.close()
        there = {key.removeprefix(self._prefix): value for key, value in self._kept().items()}
        return records.read(there, empty, self._name, boot=self._boot)

    def _kept(self) -> dict[str, records.Value]:
        return {key: value for key, value in self._store.records(POOL).items() if key.startswith(self._prefix)}

    def rewrite(self, shares: Shares, at: float, reasons: Mapping[int, str]) -> None:
        stale: Changes = {key.removeprefix(self._prefix): None for key in self._kept()}
        self._put(stale | records.changes(Shares(shares.pool), shares, at, boot=self._boot, reasons=reasons))

    def append(self, before: Shares, after: Shares, at: float, reasons: Mapping[int, str] | None = None) -> None:
        self._put(records.changes(before, after, at, boot=self._boot, reasons=reasons))

    def _put(self, changes: Changes) -> None:
        if self._failed is not None:
            raise self._failed
        self._unwritten |= changes
        if self._next is None:
            self._next = asyncio.get_running_loop().create_future()
        if self._writer is None or self._writer.done():
            self._writer = asyncio.create_task(self._write(), name=f"journal of {self._name}")

    async def _write(self) -> None:
        while self._next is not None:
            changes, self._unwritten = self._unwritten, {}
            self._under_way, self._next = self._next, None
            kept = tuple(Record(POOL, self._prefix + key, value) for key, value in changes.items())
            # A file of 0.1 may only be put away when the disk has all of it.
            migrating = self._old_file is not None
            try:
                await insist(self._store, Write(records=kept, lazy=not migrating))
                self._put_away()
            except (MusterError, OSError) as error:
                self._fail(JournalUnusable(f"{self._name} cannot be kept: {error}"))
                return
            except BaseException as error:  # whatever it was: nobody waits for ever, nothing is written on top of it
                self._fail(JournalUnusable(f"{self._name} cannot be kept: {error!r}"))
                raise
            self._under_way.set_result(None)
        self._under_way = None

    def _put_away(self) -> None:
        if self._old_file is not None and self._old_file.exists():
            os.replace(self._old_file, f"{self._old_file}{MIGRATED}")
            log.info("%s is in the store now; its file is left as %s%s", self._name, self._old_file.name, MIGRATED)
        self._old_file = None

    def _fail(self, error: JournalUnusable) -> None:
        self._failed = error
        for waiting in (self._under_way, self._next):
            if waiting is not None:
                waiting.set_exception(error)
                waiting.exception()  # looked at: there may be nobody who waits

    async def written(self) -> None:
        if (awaited := self._next or self._under_way) is not None:
            await asyncio.shield(awaited)

    def close(self) -> None:
        """What is still to be written is, as long as the store is open."""

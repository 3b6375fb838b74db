"""How does a write become durable without making everyone wait? The store on disk.

One thread writes. Whatever is asked for while it commits goes into its next transaction together (group commit), so
the cost of forcing a disk is shared. A write counts, and is seen by anyone, once its transaction has committed; a
transaction that fails takes everything decided after it along, because that was decided on top of it. Reads answer
from memory; only the journal and old history are read from the file, by a second thread.

Another program may edit the file around the API. Each transaction notices that before it writes: the edit is taken
up first, with a new version and generation, and what was waiting is decided again on top of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Self

from muster import errors
from muster.ports import Clock, StoreChange, Stored, Trouble, Version, Write
from muster.store import schema
from muster.store.database import Database, Foreign, Synchronous
from muster.store.entries import Keep
from muster.store.ledger import KEEP_CHANGES, Entry, Ledger, LedgerStore, closed
from muster.store.reached import Reached
from muster.store.schema import Row
from muster.types.event import Event
from muster.types.training import Training, check

log = logging.getLogger("muster.store")

_AT_HAND = 1000  # changes kept in memory; a watcher further behind reads the file


@dataclass(frozen=True)
class _QueuedWrite:
    """A decided write on its way to the disk, and whom to tell."""

    write: Write
    entry: Entry
    done: asyncio.Future[Stored | None] | None
    refusal: errors.MusterError | None = None  # said once what it rests on is committed


class SqliteStore(LedgerStore):
    def __init__(self, ledger: Ledger, database: Database) -> None:
        """Use `open`."""
        super().__init__(ledger)
        self._database = database
        self._queue: list[_QueuedWrite] = []
        self._under_way: list[_QueuedWrite] = []  # the transaction that the writing thread is at
        self._closing = False
        self._trouble: Trouble | None = None
        self._short_of = ""  # what there is too little of, when it was last looked at
        self._writes = ThreadPoolExecutor(1, "muster-store-write")
        self._reads = ThreadPoolExecutor(1, "muster-store-read")

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        synchronous: Synchronous = "FULL",
        keep_changes: int = KEEP_CHANGES,
        clock: Clock | None = None,
        home: str = "",
        reached: Reached | None = None,
    ) -> Self:
        """Open the file, or make it. Raises MusterError if another process has it, or a newer muster wrote it.

        `home` is the identity that it has from now on; `reached` is told of every transaction.
        """
        ledger = Ledger(keep=keep_changes, at_hand=_AT_HAND, clock=clock)
        database = Database(path, synchronous=synchronous, keep_changes=ledger.keep, home=home, reached=reached)
        try:
            found = database.load()
            edited = [row for row in found.rows if not row.ours]
            known = [row.stored() for row in found.rows if row.ours]
            known += [stored for row in edited if (stored := database.last_written(row)) is not None]
            ledger.load(known, found.records, found.version, found.last_event)
            if edited:
                _take_up_at_start(ledger, database, edited)
        except errors.MusterError:
            database.close()
            raise
        return cls(ledger, database)

    @property
    def trouble(self) -> Trouble | None:
        return self._trouble

    async def write(self, write: Write) -> Stored | None:
        self._refuse_if_closed()
        if self._trouble is not None and not self._trouble.stuck and write.put is not None and write.expect == 0:
            raise errors.Unavailable(str(self._trouble), hint="make room on its disk, then try again")
        try:
            entry = self._ledger.prepare(write)
        except (errors.Conflict, errors.AlreadyExists, errors.NotFound):
            if self._ledger.is_settled(write):
                raise
            # What refuses it cannot be read yet: whoever reads again must find it, or he would ask the same for ever.
            with contextlib.suppress(errors.Unavailable):
                await self._put_in_queue(Write(lazy=True), Entry())
            self._refuse_if_closed()
            entry = self._ledger.prepare(write)
        return await self._put_in_queue(write, entry)

    async def refresh(self) -> None:
        """Take up what another program has written to the file, and see what room there is. Cheap, most of the time."""
        await self.write(Write(lazy=True))  # every transaction looks, also an empty one
        left = await asyncio.get_running_loop().run_in_executor(self._writes, self._database.keep_room)
        self._short_of = f"the disk of {self._database.path} is full ({left})" if self._database.short else ""
        if self._trouble is None or not self._trouble.stuck:
            self._turn(self._short_of)

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
        self._refuse_if_closed()
        wanted = {"namespace": namespace, "training": training, "uid": uid}
        where = {column: value for column, value in wanted.items() if value is not None}
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._reads, self._database.events, where, after, before, most)

    async def trim_events(self, keep: Keep, now: datetime) -> int:
        """Drop the oldest entries of the journal where there are too many; how many went."""
        self._refuse_if_closed()
        loop, gone = asyncio.get_running_loop(), 0
        for uid, upto in await loop.run_in_executor(self._reads, self._database.surplus, keep):
            fold = functools.partial(self._database.fold_events, uid, upto, now)
            try:
                while (count := await loop.run_in_executor(self._writes, fold)) > 0:
                    gone += count
            except ValueError as error:  # edited around us: it stays as it is
                log.warning("the journal of %s cannot be trimmed: %s", uid, error)
        return gone

    async def _older(self, position: Version) -> Sequence[StoreChange]:
        if position >= self.version - self._ledger.keep:
            loop = asyncio.get_running_loop()
            found = await loop.run_in_executor(self._reads, self._database.changes, position, self.version)
            if found:
                return found
        raise self._ledger.compacted(position)

    async def close(self) -> None:
        """Finish what is under way, then let go of the file. A second call does nothing."""
        if self._closing:
            return
        self._closing = True
        with contextlib.suppress(errors.Unavailable):
            await self._put_in_queue(Write(lazy=True), Entry())  # the last in the queue: all others are done then
        self._ledger.close()
        await asyncio.get_running_loop().run_in_executor(None, self._release)

    def _refuse_if_closed(self) -> None:
        if self._closing:
            raise closed()

    def _release(self) -> None:
        self._writes.shutdown()
        self._reads.shutdown()
        self._database.close()

    # Committing ----------------------------------------------------------------------------------

    # The chain of transactions is made of callbacks, not of a task: whoever cancels all tasks of a loop must not leave
    # the ledger in doubt about what the thread has written.

    def _put_in_queue(self, write: Write, entry: Entry) -> asyncio.Future[Stored | None]:
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Stored | None] = loop.create_future()
        self._queue.append(_QueuedWrite(write, entry, done))
        loop.call_soon(self._start_next)  # not now: others may be about to write in this very turn of the loop
        return done

    def _start_next(self) -> None:
        if self._under_way or not self._queue:
            return
        batch, self._queue = self._queue, []
        self._under_way = batch
        durable = any(not job.write.lazy for job in batch)
        commit = functools.partial(self._database.commit, [job.entry for job in batch], durable=durable)
        ended = asyncio.get_running_loop().run_in_executor(self._writes, commit)
        ended.add_done_callback(self._ended)

    def _ended(self, ended: asyncio.Future[Foreign | None]) -> None:
        batch, self._under_way = self._under_way, []
        error = asyncio.CancelledError() if ended.cancelled() else ended.exception()
        try:
            if isinstance(error, errors.Unavailable):
                self._turn(error.message, stuck=True)
                self._fail(batch, error)
            elif error is not None:  # nobody waits for ever
                log.error("the store's writer failed", exc_info=error)
                self._fail(batch, errors.Unavailable(f"the store's writer failed: {error!r}"))
            elif (foreign := ended.result()) is not None:
                self._decide_again(batch, foreign)
            else:
                self._publish(batch)
        finally:
            self._start_next()

    def _turn(self, what: str, *, stuck: bool = False) -> None:
        """Trouble begins, becomes another, or is over (nothing to say). Said once, for it may last."""
        before = self._trouble
        if not what:
            if before is not None:
                log.warning("everything can be written again, after trouble since %s", before.since.isoformat())
            self._trouble = None
            return
        since = before.since if before is not None and before.stuck == stuck else self._ledger.clock.now()
        self._trouble = Trouble(since, what, stuck)
        if before is None or before.stuck != stuck:
            log.error("%s", self._trouble)

    def _publish(self, batch: Sequence[_QueuedWrite]) -> None:
        self._ledger.commit([job.entry for job in batch])
        if self._trouble is not None and self._trouble.stuck and any(job.entry != Entry() for job in batch):
            self._turn(self._short_of)
        for job in batch:
            if job.done is None or job.done.done():
                continue
            if job.refusal is not None:
                job.done.set_exception(job.refusal)
            else:
                job.done.set_result(job.entry.put)

    def _fail(self, batch: Sequence[_QueuedWrite], error: errors.Unavailable) -> None:
        """What waits behind a failed transaction was decided on top of it, so it fails with it."""
        failed, self._queue = [*batch, *self._queue], []
        self._ledger.rollback()
        for job in failed:
            if job.done is not None and not job.done.done():
                again = errors.Unavailable(error.message, error.code, error.retryable, error.hint)
                again.__cause__ = error.__cause__
                job.done.set_exception(again)

    def _decide_again(self, batch: Sequence[_QueuedWrite], foreign: Foreign) -> None:
        """Put the foreign edits first, then what was waiting, as if it had come after them."""
        waiting = [*batch, *self._queue]
        self._ledger.rollback()
        self._ledger.skip_events(foreign.last_event)
        edits = _edits(self._ledger, foreign.rows)
        edits += [Write(delete=key) for key in self._ledger.absent_from(foreign.keys)]
        self._queue = [_QueuedWrite(edit, self._ledger.prepare(edit), None) for edit in edits]
        for job in waiting:
            if job.done is None:
                continue  # an edit that was found before: it has just been found again
            try:
                self._queue.append(replace(job, entry=self._ledger.prepare(job.write), refusal=None))
            except errors.MusterError as error:
                self._queue.append(replace(job, entry=Entry(), refusal=error))


# Edits around the API ----------------------------------------------------------------------------


def _take_up_at_start(ledger: Ledger, database: Database, edited: Sequence[Row]) -> None:
    while edited:
        entries = [ledger.prepare(edit) for edit in _edits(ledger, edited)]
        foreign = database.commit(entries, durable=True)
        if foreign is None:
            ledger.commit(entries)
            return
        ledger.rollback()
        edited = foreign.rows


def _edits(ledger: Ledger, rows: Sequence[Row]) -> list[Write]:
    """What edits mean. One that cannot be read is said and undone: the object stays as it was."""
    found = []
    for row in rows:
        known = ledger.get(row.key)
        try:
            edited = _read_edit(row)
        except (ValueError, RecursionError) as error:
            kept = "it stays as it was" if known is not None else "it is left alone"
            log.warning("training %s was edited in the database and cannot be read, so %s: %s", row.key, kept, error)
            if known is not None:
                found.append(Write(put=known.training))
            continue
        log.info("training %s was edited in the database", row.key)
        found.append(Write(put=edited))
    return found


def _read_edit(row: Row) -> Training:
    """The training as someone left it, with a new generation if its spec is new. ValueError says what is wrong."""
    data = json.loads(row.raw)
    if not isinstance(data, dict):
        raise ValueError("the body is not a JSON object")
    training = check(Training.from_wire(data))
    if training.key != row.key or training.uid != row.uid or not training.uid:
        raise ValueError(f"the body is that of {training.key} with uid {training.uid!r}")
    generation = max(training.generation, row.generation)
    if training.generation <= row.generation and schema.spec_hash(training.spec) != row.spec_hash:
        generation = row.generation + 1
    return replace(training, metadata=replace(training.metadata, generation=generation))

"""How do a journal and records survive in a cluster that has no disk of ours? As a log of numbered Secrets.

Each Secret holds one batch: events and records that were decided while the batch before it was being written, so that
the cost of a request is shared. A number can be created only once, which makes the log the fence between control
planes: whoever finds a number taken by somebody else has been replaced, and must stop. A new one claims the next
number before it does anything.

The oldest events go when there are more than `KEEP_EVENTS`; records that only their batch still held are written again
first, and so is what they tell of usage (`kube_sums`).
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

import msgspec

from muster import errors
from muster.backoff import Backoff
from muster.core import keeping
from muster.kube.client import Json, KubeApi, passes
from muster.ports import Record
from muster.store import kube_batches, kube_sums
from muster.store.kube_batches import Batch, Batches
from muster.store.kube_outbox import ASIDE, USAGE, Outbox
from muster.store.ledger import Entry, KeptRecord
from muster.types import codec
from muster.types.event import Event

log = logging.getLogger("muster.store")

KEEP_EVENTS = 100_000
GONE = "gone-"  # how the mark of a removal begins
MADE_UP = f"{ASIDE}journal"  # the mark of the entry that tells what of the journal itself was set aside
TIDY_EVERY_S = 1.0
TOGETHER = 200  # records that are written again at once
RETRY = Backoff(0.1, 5.0)


class _Line(NamedTuple):
    """An event of the journal. As JSON: there are many, and few are ever asked for."""

    id: int
    namespace: str
    training: str
    uid: str
    raw: bytes


def _line(event: Json) -> _Line:
    namespace, training, uid = (sys.intern(str(event.get(name) or "")) for name in ("namespace", "training", "uid"))
    return _Line(int(event["id"]), namespace, training, uid, msgspec.json.encode(event))


def _is_made_up(event: Json) -> bool:
    """Usage is written together with its worker. With a mark it came in an object, which up to 0.1.0 was believed."""
    return bool(event.get("mark")) and event.get("reason") in USAGE


def _doubt(which: tuple[str, str], value: Any, before: Any) -> str:
    """Why a record is not to be believed; then what it was before stands. A token is made once: workers have it."""
    kind, key = which
    if value is None:
        return ""
    if why := keeping.problem_with(kind, key, value):
        return why
    replaced = kind == keeping.TOKEN and before is not None and before["token"] != value["token"]
    return "is another one than the workers of that training were given" if replaced else ""


@dataclass(frozen=True)
class _QueuedEntry:
    entry: Entry
    done: asyncio.Future[None]
    mark: str = ""


class KubeLog:
    def __init__(
        self,
        api: KubeApi,
        namespace: str,
        identity: str,
        *,
        commit: Callable[[Sequence[Entry]], None],
        value: Callable[[str, str], Mapping[str, Any] | None],
        now: Callable[[], datetime],
        keep: int = KEEP_EVENTS,
    ) -> None:
        """`commit` is told what has become durable, in order, before anyone who waits for it goes on; `value` says
        what a record is now; `now` is the clock that durations are measured with."""
        self.namespace = namespace
        self._batches = Batches(api, namespace, identity)
        self._commit = commit
        self._value = value
        self._now = now
        self._keep = keep
        self._events: list[_Line] = []
        self._sums: dict[str, Event] = {}
        self._marks: set[str] = set()
        self.refused: dict[tuple[str, str], str] = {}  # records that cannot be believed, and why
        self.made_up: list[int] = []  # entries that cannot be ours, and of which nobody was told yet
        self._queue: list[_QueuedEntry] = []
        self._under_way: list[_QueuedEntry] = []
        self._singly = 0  # how many jobs have to go each in a batch of its own
        self._wanted = asyncio.Event()
        self._stopping = False
        self._tasks: list[asyncio.Task[None]] = []
        self._fenced: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def until_fenced(self) -> str:
        return await asyncio.shield(self._fenced)

    # Opening

    async def open(self) -> tuple[dict[str, dict[str, Mapping[str, Any]]], int]:
        """Read what there is and claim the next number. The records, and the id of the last event."""
        values: dict[tuple[str, str], Any] = {}
        events: dict[int, Json] = {}
        for batch in await self._batches.read():
            self._know(batch, values, events)
        while True:
            claim = self._batches.next()
            try:
                await self._batches.create(claim)
                break
            except errors.AlreadyExists:  # a control plane before us was still writing
                self._know(await self._batches.get(claim), values, events)
        self._batches.add(claim, stays=True)  # the number that whoever we replace would write next
        self._sums = kube_sums.read(values)
        self._events = [_line(events[number]) for number in sorted(events)]
        self._marks = {event["mark"] for event in events.values() if "mark" in event}
        records: dict[str, dict[str, Mapping[str, Any]]] = {}
        for (kind, key), value in values.items():
            if value is not None:
                records.setdefault(kind, {})[key] = value
        last = max([*self.made_up, *events], default=0)  # a number is given once, whoever got it
        told = max((number for number, event in events.items() if event.get("mark") == MADE_UP), default=0)
        self.made_up = [number for number in self.made_up if number > told]
        return records, last

    def _know(self, batch: Batch, values: dict[tuple[str, str], Any], events: dict[int, Json]) -> None:
        self.made_up += [event["id"] for event in batch.events if _is_made_up(event)]
        batch.events = [
            event
            for event in batch.events
            if event["id"] not in events and not _is_made_up(event)  # a merge may have been cut short
        ]
        for event in batch.events:
            events[event["id"]] = event
        for which, value in batch.records.items():
            if why := _doubt(which, value, values.get(which)):
                self.refused[which] = why
            else:
                values[which] = value
                self.refused.pop(which, None)  # it was put right
        self._batches.add(batch)

    def start(self) -> None:
        self._tasks = [asyncio.create_task(self._keep_writing()), asyncio.create_task(self._keep_tidy())]

    async def close(self) -> None:
        """Finish what is waiting, if it can be."""
        self._stopping = True
        self._wanted.set()
        if self._tasks:
            await asyncio.wait({self._tasks[0]}, timeout=RETRY.longest_s)
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._fail(errors.Unavailable("the store is closed"))

    # Reading

    def find(
        self,
        namespace: str | None,
        training: str | None,
        uid: str | None,
        after: int,
        before: int | None = None,
        most: int | None = None,
    ) -> list[Event]:
        def meant(one: _Line | Event) -> bool:
            return (
                namespace in (None, one.namespace)
                and training in (None, one.training)
                and uid in (None, one.uid)
                and one.id > after
                and (before is None or one.id < before)
            )

        start = bisect.bisect_right(self._events, after, key=lambda line: line.id)
        end = len(self._events) if before is None else bisect.bisect_left(self._events, before, key=lambda one: one.id)
        newest_first = (self._events[at] for at in range(end - 1, start - 1, -1))
        kept = (line for line in newest_first if line.uid not in self._sums or line.id > self._sums[line.uid].id)
        lines = list(itertools.islice(filter(meant, kept), most))[::-1]
        found = [codec.from_wire(Event, msgspec.json.decode(line.raw), strict=False) for line in lines]
        sums = sorted(filter(meant, self._sums.values()), key=lambda event: event.id)
        return [*sums, *found] if most is None else [*sums, *found][-most:] if most else []

    # Writing

    def knows(self, mark: str) -> bool:
        """Whether entries with that mark were here when it was opened; of removals, whether they are here now."""
        return mark in self._marks

    def has(self, outbox: Outbox) -> bool:
        """Whether it was here when it was opened, or is of a time that the journal no longer tells of."""
        if self.knows(outbox.mark) or not self._events:
            return self.knows(outbox.mark)
        first = codec.from_wire(Event, msgspec.json.decode(self._events[0].raw), strict=False)
        times = (event.at for event in outbox.write.events)
        return any(at is not None and first.at is not None and at < first.at for at in times)

    def append(self, entry: Entry, mark: str = "") -> asyncio.Future[None]:
        """`mark` tells later that these entries are here."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._fenced.done() or (self._stopping and self._tasks and self._tasks[0].done()):
            why = self._fenced.result() if self._fenced.done() else "the store is closed"
            done.set_exception(errors.Unavailable(why, retryable=False))
            return done
        if mark.startswith(GONE):
            self._marks.add(mark)
        self._queue.append(_QueuedEntry(entry, done, mark))
        self._wanted.set()
        return done

    async def _keep_writing(self) -> None:
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            while self._queue:
                await asyncio.sleep(0)  # others may be about to write in this very turn of the loop
                batch = self._next()
                try:
                    await self._insist(batch)
                    self._stored(batch)
                except (errors.InvalidRequest, errors.TooLarge) as error:
                    self._sort_out(error)
                except errors.MusterError as error:
                    self._fenced.set_result(error.message)
                    self._fail(error)
                    return
            if self._stopping:
                return

    def _sort_out(self, error: errors.MusterError) -> None:
        """The cluster does not take that batch: one by one shows which entry it is, and only that one fails."""
        jobs, self._under_way = self._under_way, []
        if len(jobs) > 1:
            self._queue[:0] = jobs
            self._singly = len(jobs)
        elif not jobs[0].done.done():
            jobs[0].done.set_exception(error)

    def _stored(self, batch: Batch) -> None:
        jobs, self._under_way = self._under_way, []
        self._batches.add(batch)
        self._events += map(_line, batch.events)
        self._commit([job.entry for job in jobs])
        for job in jobs:
            if not job.done.done():
                job.done.set_result(None)

    def _next(self) -> Batch:
        batch = self._batches.next()
        count = 0
        for job in self._queue:
            batch.take(job.entry, job.mark)
            count += 1
            if batch.size >= kube_batches.FULL or self._singly:
                break
        self._singly = max(0, self._singly - 1)
        self._under_way, self._queue = self._queue[:count], self._queue[count:]
        return batch

    async def _insist(self, batch: Batch) -> None:
        """Write it however long that takes. An answer that was lost does not matter: what is there tells."""
        failures, told = 0, ""
        while True:
            try:
                await self._batches.create(batch, again=bool(told))
                return
            except errors.AlreadyExists as error:
                raise errors.Unavailable(
                    f"{batch.name} was written by another control plane: this one has been replaced", retryable=False
                ) from error
            except errors.MusterError as error:
                if not passes(error) and not isinstance(error, errors.NotFound):
                    raise
                failures += 1
                if str(error) != told:
                    log.warning("the journal cannot be written, trying again: %s", error)
                told = str(error)
                await asyncio.sleep(RETRY.after(failures))

    def _fail(self, error: errors.MusterError) -> None:
        jobs, self._under_way, self._queue = [*self._under_way, *self._queue], [], []
        for job in jobs:
            if not job.done.done():
                job.done.set_exception(errors.Unavailable(error.message, retryable=error.retryable))

    # Tidying

    async def _keep_tidy(self) -> None:
        while True:
            await asyncio.sleep(TIDY_EVERY_S)
            try:
                await self.tidy()
            except errors.MusterError as error:
                log.warning("the journal cannot be tidied now: %s", error)

    async def tidy(self) -> None:
        await self._batches.sweep()
        await self._batches.merge()
        if len(self._events) > self._keep:
            await self._trim()
        await self._batches.sweep()

    async def _trim(self) -> None:
        oldest, last_event = self._batches.oldest
        if oldest >= self._batches.last - 1:
            return
        changing = {
            (kept.record.kind, kept.record.key)
            for job in (*self._under_way, *self._queue)
            for kept in job.entry.records
        }
        cut = bisect.bisect_right(self._events, last_event, key=lambda line: line.id)
        gone = (codec.from_wire(Event, msgspec.json.decode(line.raw), strict=False) for line in self._events[:cut])
        known = self._sums
        uncounted = (one for one in gone if one.uid not in known or one.id > known[one.uid].id)
        sums = kube_sums.added(known, uncounted, self._now())
        held = [which for which in self._batches.records_of(oldest) if which not in changing]
        again = [self._kept(which) for which in held if which[0] != keeping.SUM or which[1] not in sums]
        records = [*again, *kube_sums.kept(sums)]
        pieces = [tuple(records[at : at + TOGETHER]) for at in range(0, max(len(records), 1), TOGETHER)]
        # In line at once, before anybody writes one of them anew; also what is changing is stored when they are.
        for stored in [self.append(Entry(records=piece)) for piece in pieces]:
            await stored
        self._sums |= sums
        del self._events[:cut]
        self._batches.drop(oldest)

    def _kept(self, which: tuple[str, str]) -> KeptRecord:
        value = self._value(*which)
        return KeptRecord(Record(*which, value), None if value is None else msgspec.json.encode(value))

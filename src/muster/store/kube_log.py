"""How do a journal and records survive in a cluster that has no disk of ours? As a log of numbered Secrets.

Each Secret holds one batch: events and records that were decided while the batch before it was being written, so that
the cost of a request is shared. A number can be created only once, which makes the log the fence between control
planes: whoever finds a number taken by somebody else has been replaced, and must stop. A new one claims the next
number before it does anything.

Small batches are merged: what they hold together is put into the last of them, and the others are deleted. A crash in
between leaves both, which means the same: an event has its id, and of a record the last value counts. The oldest
events go when there are more than `KEEP_EVENTS`; records that only their batch still held are written again first.
"""

from __future__ import annotations

import asyncio
import base64
import bisect
import contextlib
import gzip
import logging
import sys
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec

from muster import errors
from muster.backoff import Backoff
from muster.core import keeping
from muster.kube.client import Json, KubeApi, passes
from muster.ports import Record
from muster.store.kube_outbox import ASIDE, USAGE, Outbox
from muster.store.ledger import Entry, Kept
from muster.types import codec
from muster.types.event import Event

log = logging.getLogger("muster.store")

LABEL = "muster.dev/log"
KEEP_EVENTS = 100_000
GONE = "gone-"  # how the mark of a removal begins
MADE_UP = f"{ASIDE}journal"  # the mark of the entry that tells what of the journal itself was set aside
TIDY_EVERY_S = 1.0
MERGE_AT = 64  # small batches that are put together
FULL = 400_000  # bytes that a batch may have before it is compressed; the server takes a million
RETRY = Backoff(0.1, 5.0)


@dataclass(eq=False)
class Batch:
    """What one Secret holds."""

    number: int
    events: list[Json] = field(default_factory=list)
    records: dict[tuple[str, str], Any] = field(default_factory=dict)  # None: removed
    by: str = ""
    version: str = ""
    size: int = 0

    @property
    def name(self) -> str:
        return f"muster-log-{self.number:012d}"

    @property
    def last_event(self) -> int:
        return int(self.events[-1]["id"]) if self.events else 0

    def take(self, entry: Entry, mark: str = "") -> None:
        more = {"mark": mark} if mark else {}
        self.events += [{**msgspec.json.decode(noted.raw), **more} for noted in entry.events]
        for kept in entry.records:
            self.records[(kept.record.kind, kept.record.key)] = kept.record.value
        self.size += sum(len(noted.raw) for noted in entry.events) + sum(len(kept.raw or b"") for kept in entry.records)

    def to_secret(self) -> Json:
        records = [[kind, key, value] for (kind, key), value in self.records.items()]
        packed = gzip.compress(msgspec.json.encode({"by": self.by, "events": self.events, "records": records}), 1)
        metadata = {"name": self.name, "labels": {LABEL: "true", "app.kubernetes.io/managed-by": "muster"}}
        if self.version:
            metadata["resourceVersion"] = self.version
        data = {"batch": base64.b64encode(packed).decode()}
        return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "type": LABEL, "data": data}

    @classmethod
    def from_secret(cls, secret: Json) -> Batch:
        """Raises InternalError for one that muster has not written like that."""
        about = secret["metadata"]
        try:
            plain = gzip.decompress(base64.b64decode(secret["data"]["batch"]))
            held = msgspec.json.decode(plain)
            records = {(kind, key): value for kind, key, value in held["records"]}
            events = {int(event["id"]): event for event in held["events"]}
            number = int(about["name"].rpartition("-")[2])
            return cls(number, list(events.values()), records, held["by"], about["resourceVersion"], len(plain))
        except (OSError, EOFError, zlib.error, ValueError, KeyError, TypeError, RecursionError) as error:
            raise errors.InternalError(
                f"the Secret {about['name']} holds no part of the journal that can be read: {error!r}",
                hint=f"put it back from a backup, or delete it: what it held is lost then ({LABEL} marks the others)",
            ) from error


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
class _Job:
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
        keep: int = KEEP_EVENTS,
    ) -> None:
        """`commit` is told what has become durable, in order, before anyone who waits for it goes on; `value` says
        what a record is now."""
        self._api = api
        self.namespace = namespace
        self._path = f"/api/v1/namespaces/{namespace}/secrets"
        self._identity = identity
        self._commit = commit
        self._value = value
        self._keep = keep
        self._last = 0
        self._batches: dict[int, int] = {}  # number → the id of its last event, oldest first
        self._rubbish: list[int] = []  # batches whose contents others hold, to be deleted
        self._small: list[Batch] = []  # the latest ones, which wait to be merged
        self._where: dict[tuple[str, str], int] = {}  # which batch holds the current value of a record
        self._events: list[_Line] = []
        self._marks: set[str] = set()
        self.refused: dict[tuple[str, str], str] = {}  # records that cannot be believed, and why
        self.made_up: list[int] = []  # entries that cannot be ours, and of which nobody was told yet
        self._queue: list[_Job] = []
        self._under_way: list[_Job] = []
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
        batches = await self._read()
        values: dict[tuple[str, str], Any] = {}
        events: dict[int, Json] = {}
        for batch in batches:
            self._know(batch, values, events)
        while True:
            claim = Batch(self._last + 1, by=self._identity)
            try:
                claim.version = await self._create(claim)
                break
            except errors.AlreadyExists:  # a control plane before us was still writing
                late = Batch.from_secret(await self._api.request("GET", f"{self._path}/{claim.name}"))
                self._know(late, values, events)
        self._know(claim, values, events)
        self._small.pop()  # the number that whoever we replace would write next stays taken
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

    async def _read(self) -> list[Batch]:
        batches = []
        async for secrets, _ in self._api.pages(self._path, {"labelSelector": LABEL}, limit=100):
            batches += [Batch.from_secret(secret) for secret in secrets]
        return sorted(batches, key=lambda batch: batch.number)

    def _know(self, batch: Batch, values: dict[tuple[str, str], Any], events: dict[int, Json]) -> None:
        self._last = batch.number
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
        self._note(batch)

    def _note(self, batch: Batch) -> None:
        """A batch that is stored, newer than all others."""
        self._batches[batch.number] = batch.last_event
        for which, value in batch.records.items():
            if value is None:
                self._where.pop(which, None)
            else:
                self._where[which] = batch.number
        if batch.size >= FULL / 2:
            self._small.clear()  # what lies before a full one has been merged as far as it goes
        else:
            self._small.append(batch)

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

    def find(self, namespace: str | None, training: str | None, uid: str | None, after: int) -> list[Event]:
        start = bisect.bisect_right(self._events, after, key=lambda line: line.id)
        return [
            codec.from_wire(Event, msgspec.json.decode(line.raw), strict=False)
            for line in self._events[start:]
            if namespace in (None, line.namespace) and training in (None, line.training) and uid in (None, line.uid)
        ]

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
        self._queue.append(_Job(entry, done, mark))
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
        self._note(batch)
        self._events += map(_line, batch.events)
        self._commit([job.entry for job in jobs])
        for job in jobs:
            if not job.done.done():
                job.done.set_result(None)

    def _next(self) -> Batch:
        batch = Batch(self._last + 1, by=self._identity)
        count = 0
        for job in self._queue:
            batch.take(job.entry, job.mark)
            count += 1
            if batch.size >= FULL or self._singly:
                break
        self._singly = max(0, self._singly - 1)
        self._under_way, self._queue = self._queue[:count], self._queue[count:]
        return batch

    async def _insist(self, batch: Batch) -> None:
        """Write it however long that takes. An answer that was lost does not matter: what is there tells."""
        failures, told = 0, ""
        while True:
            try:
                batch.version = await self._create(batch) if not told else await self._create_or_find(batch)
                self._last = batch.number
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

    async def _create_or_find(self, batch: Batch) -> str:
        """After a failure, which may have been a success: what is there may be what we wrote."""
        try:
            return await self._create(batch)
        except errors.AlreadyExists:
            found = Batch.from_secret(await self._api.request("GET", f"{self._path}/{batch.name}"))
            if found.by != self._identity:
                raise
            return found.version

    async def _create(self, batch: Batch) -> str:
        answer = await self._api.request("POST", self._path, body=batch.to_secret())
        return str(answer["metadata"]["resourceVersion"])

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
        await self._sweep()
        if len(self._small) > MERGE_AT:
            await self._merge()
        if len(self._events) > self._keep:
            await self._trim()
        await self._sweep()

    async def _sweep(self) -> None:
        while self._rubbish:
            with contextlib.suppress(errors.NotFound):
                await self._api.request("DELETE", f"{self._path}/{Batch(self._rubbish[-1]).name}")
            self._rubbish.pop()

    async def _merge(self) -> None:
        """Put the contents of small batches together into the last of them, as far as one can hold them."""
        merged = Batch(0, by=self._identity)
        sources: list[Batch] = []
        for batch in self._small[:-1]:  # the newest stays: it may be in the middle of being told about
            merged.events += batch.events
            merged.records |= batch.records
            merged.size += batch.size
            sources.append(batch)
            if merged.size >= FULL:
                break
        merged.number, merged.version = sources[-1].number, sources[-1].version
        merged.size = len(msgspec.json.encode([merged.events, list(merged.records.values())]))
        try:
            answer = await self._api.request("PUT", f"{self._path}/{merged.name}", body=merged.to_secret())
        except (errors.Conflict, errors.NotFound):
            # Put before, with an answer that was lost, or by the control plane before us. They stay as they are.
            self._small = [batch for batch in self._small if batch not in sources]
            return
        merged.version = str(answer["metadata"]["resourceVersion"])
        self._merged(merged, sources)

    def _merged(self, merged: Batch, sources: Sequence[Batch]) -> None:
        for which, number in list(self._where.items()):
            if sources[0].number <= number < merged.number:
                self._where[which] = merged.number
        self._batches[merged.number] = merged.last_event
        # Meanwhile a full batch may have come: what lies before it is not put together with what comes after.
        in_line = bool(self._small) and self._small[0] is sources[0]
        self._small = [batch for batch in self._small if batch not in sources]
        if in_line and merged.size < FULL / 2:
            self._small.insert(0, merged)
        self._throw_away([batch.number for batch in sources[:-1]])

    async def _trim(self) -> None:
        oldest = next(iter(self._batches))
        if oldest >= self._last - 1:
            return
        changing = {
            (kept.record.kind, kept.record.key)
            for job in (*self._under_way, *self._queue)
            for kept in job.entry.records
        }
        held = [which for which, number in self._where.items() if number == oldest and which not in changing]
        await self.append(Entry(records=tuple(map(self._kept, held))))  # also what is changing is stored then
        del self._events[: bisect.bisect_right(self._events, self._batches[oldest], key=lambda line: line.id)]
        self._small = [batch for batch in self._small if batch.number != oldest]
        self._throw_away([oldest])

    def _throw_away(self, numbers: Sequence[int]) -> None:
        for number in numbers:
            self._batches.pop(number, None)
        self._rubbish += numbers

    def _kept(self, which: tuple[str, str]) -> Kept:
        value = self._value(*which)
        return Kept(Record(*which, value), None if value is None else msgspec.json.encode(value))

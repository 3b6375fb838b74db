"""What does a write mean, and who is told? The part of a store that does not depend on where it is kept.

There are two views. The *committed* one is what reads, watchers and subscribers see. The *head* is the committed
one plus every write that has been decided but is not durable yet; compare-and-set looks at the head, so that two
writers in one group commit cannot both win. `prepare` decides a write and moves the head; `commit` moves the
committed view; `rollback` gives up everything between the two. When to call which is the adapter's business.

Everything here runs on one event loop and never waits for a disk.
"""

from __future__ import annotations

import asyncio
import base64
import bisect
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

from muster import errors
from muster.clock import SystemClock
from muster.ports import Clock, Filter, Page, Record, Store, StoreChange, Stored, Trouble, Version, Write
from muster.types import codec
from muster.types.event import Event
from muster.types.training import Key, Training

KEEP_CHANGES = 5000
_AT_ONCE = 500  # changes that a watcher is handed in one go, so that one far behind does not copy all history


@dataclass(frozen=True)
class Noted:
    """An event with its id, and as JSON."""

    event: Event
    raw: bytes


@dataclass(frozen=True)
class KeptRecord:
    """A record, and its value as JSON (None: remove it)."""

    record: Record
    raw: bytes | None


@dataclass(frozen=True)
class Entry:
    """A write as it was decided: everything that one transaction stores."""

    change: StoreChange | None = None
    training: Training | None = None  # what was put, with its version
    events: tuple[Noted, ...] = ()
    records: tuple[KeptRecord, ...] = ()

    @property
    def put(self) -> Stored | None:
        return self.change.stored if self.change is not None and self.training is not None else None


def pack(value: object) -> bytes:
    """JSON for keeping. Text that no encoding can hold is replaced: it could be written, but never read back."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise errors.InvalidRequest(f"this cannot be stored: {error}") from error
    return text.encode("utf-8", "replace")


class Ledger:
    """Objects, records and recent history in memory."""

    def __init__(self, *, keep: int = KEEP_CHANGES, at_hand: int | None = None, clock: Clock | None = None) -> None:
        self.keep = max(keep, 1)  # changes that a watcher can still ask for
        self._at_hand = min(self.keep, self.keep if at_hand is None else at_hand)  # those of them held here
        self.clock: Clock = clock or SystemClock()
        self._objects: dict[Key, Stored] = {}
        self._sorted: list[Stored] = []  # by namespace and name
        self._records: dict[str, dict[str, Mapping[str, Any]]] = {}
        self.version: Version = 0
        self.last_event = 0
        self._head: dict[Key, Stored | None] = {}  # only where it differs from the committed view
        self._head_version: Version = 0
        self._head_event = 0
        self._recent: list[StoreChange] = []  # the latest changes, without one missing
        self._reach: Version = 0  # they are all that happened after this version
        self._subscribers: list[Callable[[StoreChange], None]] = []
        self._moved = asyncio.Event()  # replaced by a new one at each commit
        self._waiting: dict[Key, set[asyncio.Future[None]]] = {}
        self.closed = False

    def load(
        self,
        objects: Iterable[Stored],
        records: Mapping[str, Mapping[str, Mapping[str, Any]]],
        version: Version,
        last_event: int,
    ) -> None:
        """Start from what an earlier process has left."""
        self._objects = {one.key: one for one in objects}
        self._sorted = sorted(self._objects.values(), key=_place)
        self._records = {kind: dict(values) for kind, values in records.items()}
        self.version = self._head_version = self._reach = version
        self.last_event = self._head_event = last_event

    def load_objects(self, objects: Iterable[Stored], version: Version) -> None:
        """Start from what there is, where objects are kept apart from the rest."""
        self.load(objects, self._records, version, self.last_event)

    # Reading -------------------------------------------------------------------------------------

    def get(self, key: Key) -> Stored | None:
        return self._objects.get(key)

    def absent_from(self, keys: Set[Key]) -> list[Key]:
        """The objects that are not among those."""
        return [key for key in self._objects if key not in keys]

    def page(self, which: Filter, limit: int | None, token: str) -> Page:
        if limit is not None and limit < 1:
            raise errors.InvalidRequest(f"a page cannot have {limit} items", hint="ask for at least 1")
        start = 0
        if token:
            start = bisect.bisect_right(self._sorted, _read_token(token), key=_place)
        if which.namespace is not None:
            start = max(start, bisect.bisect_left(self._sorted, (which.namespace, ""), key=_place))
        found: list[Stored] = []
        for index in range(start, len(self._sorted)):
            one = self._sorted[index]
            if which.namespace is not None and one.key.namespace != which.namespace:
                break
            if not which.takes(one):
                continue
            if limit is not None and len(found) == limit:
                return Page(tuple(found), self.version, _make_token(found[-1].key))
            found.append(one)
        return Page(tuple(found), self.version)

    def record(self, kind: str, key: str) -> Mapping[str, Any] | None:
        return self._records.get(kind, {}).get(key)

    def records(self, kind: str) -> Mapping[str, Mapping[str, Any]]:
        return dict(self._records.get(kind, {}))

    # Writing -------------------------------------------------------------------------------------

    def prepare(self, write: Write, about: Stored | None = None) -> Entry:
        """Decide a write against the head. Raises before anything has changed.

        `about` is the object that the events belong to when it is written elsewhere.
        """
        before = None
        if (key := subject(write)) is not None:
            before = self._latest(key)
            check_expectation(key, before, write)
        change, training = self._change(write, before)
        about = change.stored if change is not None else about
        entry = Entry(change, training, self._note(write.events, about), _keep(write.records))
        if change is not None:
            self._head[change.stored.key] = entry.put
            self._head_version = change.version
        self._head_event += len(entry.events)
        return entry

    def check(self, write: Write) -> None:
        """Refuse what could not be kept, before anything of it is written."""
        _keep(write.records)
        for event in write.events:
            _check_texts(event.namespace, event.training, event.uid)
            pack(codec.to_wire(event))

    def is_settled(self, write: Write) -> bool:
        """Whether no decided write of the same object is still on its way."""
        return subject(write) not in self._head

    def _latest(self, key: Key) -> Stored | None:
        return self._head[key] if key in self._head else self._objects.get(key)

    def _change(self, write: Write, before: Stored | None) -> tuple[StoreChange | None, Training | None]:
        version = self._head_version + 1
        if write.put is not None:
            metadata = replace(write.put.metadata, resource_version=str(version))
            training = replace(write.put, metadata=metadata)
            _check_texts(training.key.namespace, training.key.name, training.uid)
            raw = pack(training.to_wire())
            labels = dict(metadata.labels)
            stored = Stored(training.key, training.uid, version, training.status.phase, labels, raw)
            return StoreChange(version, "ADDED" if before is None else "MODIFIED", stored), training
        if write.delete is not None:
            assert before is not None  # or the expectation would not have held
            return StoreChange(version, "DELETED", before), None
        return None, None

    def _note(self, events: Sequence[Event], about: Stored | None) -> tuple[Noted, ...]:
        noted = []
        for number, event in enumerate(events, self._head_event + 1):
            at = event.at or self.clock.now()
            if about is not None:
                event = replace(
                    event,
                    namespace=event.namespace or about.key.namespace,
                    training=event.training or about.key.name,
                    uid=event.uid or about.uid,
                )
            event = replace(event, id=number, at=at)
            _check_texts(event.namespace, event.training, event.uid)
            noted.append(Noted(event, pack(codec.to_wire(event))))
        return tuple(noted)

    def skip_events(self, last: int) -> None:
        """Somebody else has written to the journal up to that id: ours come after."""
        self.last_event = max(self.last_event, last)
        self._head_event = max(self._head_event, last)

    def rollback(self) -> None:
        """Forget every write that was decided and not committed."""
        self._head.clear()
        self._head_version = self.version
        self._head_event = self.last_event

    # Committing ----------------------------------------------------------------------------------

    def commit(self, entries: Sequence[Entry], *, silent: bool = False) -> None:
        """Make decided writes visible, in the order in which they were decided.

        Subscribers are called by the loop, before anyone who waits for one of these writes goes on; an error of
        theirs therefore reaches the loop's handler and not a writer that has nothing to do with it. Silent: it is
        half of a change, and only the other half is told.
        """
        loop = asyncio.get_running_loop() if self._subscribers else None
        for entry in entries:
            if entry.events:
                self.last_event = max(self.last_event, entry.events[-1].event.id)
            for kept in entry.records:
                self._apply_record(kept)
            if entry.change is None:
                continue
            self._apply(entry.change, entry.put, silent=silent)
            for hear in self._subscribers if not silent else ():
                assert loop is not None
                loop.call_soon(hear, entry.change)
        if len(self._recent) > 2 * self._at_hand:
            self._reach = self._recent[-self._at_hand - 1].version
            del self._recent[: -self._at_hand]
        self._wake()

    def advance(self, version: Version) -> None:
        """Nothing has changed up to that version: versions are shared with others."""
        self.version = max(self.version, version)

    def _apply(self, change: StoreChange, put: Stored | None, *, silent: bool) -> None:
        key = change.stored.key
        self.version = change.version
        if key in self._head and self._head[key] is put:
            del self._head[key]
        at = bisect.bisect_left(self._sorted, _place(change.stored), key=_place)
        if put is None:
            del self._objects[key]
            del self._sorted[at]
        else:
            if key in self._objects:
                self._sorted[at] = put
            else:
                self._sorted.insert(at, put)
            self._objects[key] = put
        if silent:
            return
        self._recent.append(change)
        for waiter in self._waiting.pop(key, ()):
            if not waiter.done():
                waiter.set_result(None)

    def _apply_record(self, kept: KeptRecord) -> None:
        values = self._records.setdefault(kept.record.kind, {})
        if kept.raw is None:
            values.pop(kept.record.key, None)
        else:
            values[kept.record.key] = json.loads(kept.raw)

    # Waiting -------------------------------------------------------------------------------------

    def subscribe(self, hear: Callable[[StoreChange], None]) -> None:
        self._subscribers.append(hear)

    def close(self) -> None:
        """Let everyone go who waits for changes: none will come."""
        self.closed = True
        for waiters in self._waiting.values():
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)
        self._waiting.clear()
        self._wake()

    async def moved(self) -> None:
        """Until the next commit, or the end."""
        await self._moved.wait()

    def _wake(self) -> None:
        moved, self._moved = self._moved, asyncio.Event()
        moved.set()

    async def newer(self, key: Key, than: Version, timeout_s: float | None) -> Stored | None:
        loop = asyncio.get_running_loop()
        deadline = None if timeout_s is None else loop.time() + timeout_s
        while True:
            found = self.get(key)
            left = None if deadline is None else deadline - loop.time()
            if found is None or found.version > than or self.closed or (left is not None and left <= 0):
                return found
            waiter: asyncio.Future[None] = loop.create_future()
            self._waiting.setdefault(key, set()).add(waiter)
            try:
                await asyncio.wait([waiter], timeout=left)
            finally:
                self._stop_waiting(key, waiter)

    def _stop_waiting(self, key: Key, waiter: asyncio.Future[None]) -> None:
        waiters = self._waiting.get(key)
        if waiters is not None:
            waiters.discard(waiter)
            if not waiters:
                del self._waiting[key]

    async def follow(
        self, since: Version, which: Filter, older: Callable[[Version], Awaitable[Sequence[StoreChange]]]
    ) -> AsyncIterator[StoreChange]:
        """Changes from a position on. `older` finds those that are no longer in memory, or raises Compacted."""
        if since > self.version:
            raise self.compacted(since)
        position = since
        while not self.closed:
            moved = self._moved
            changes = self._after(position)
            if changes is None:
                changes = await older(position)
            for change in changes:
                position = change.version
                if which.takes(change.stored):
                    yield change
            if not changes:
                await moved.wait()

    def _after(self, position: Version) -> Sequence[StoreChange] | None:
        """The next changes after that version; None if memory does not reach that far back."""
        start = bisect.bisect_right(self._recent, position, key=lambda change: change.version)
        if position < self._reach or len(self._recent) - start > self._at_hand:
            return None
        return self._recent[start : start + _AT_ONCE]

    def compacted(self, since: Version) -> errors.Compacted:
        what = "is in the future" if since > self.version else "is too long ago"
        return errors.Compacted(
            f"version {since} {what}: the store is at version {self.version} and keeps the last {self.keep} changes",
            hint="list again, then watch from the version of that list",
        )


class LedgerStore(Store):
    """The reading half of `ports.Store`, which all adapters have in common."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    @property
    def version(self) -> Version:
        return self._ledger.version

    @property
    def trouble(self) -> Trouble | None:
        return None

    def get(self, key: Key) -> Stored | None:
        return self._ledger.get(key)

    def page(self, which: Filter, *, limit: int | None = None, token: str = "") -> Page:
        return self._ledger.page(which, limit, token)

    async def newer(self, key: Key, than: Version, timeout_s: float | None) -> Stored | None:
        return await self._ledger.newer(key, than, timeout_s)

    def changes(self, since: Version, which: Filter) -> AsyncIterator[StoreChange]:
        return self._ledger.follow(since, which, self._older)

    async def _older(self, position: Version) -> Sequence[StoreChange]:
        """The next changes after a version that memory no longer holds."""
        raise self._ledger.compacted(position)

    def record(self, kind: str, key: str) -> Mapping[str, Any] | None:
        return self._ledger.record(kind, key)

    def records(self, kind: str) -> Mapping[str, Mapping[str, Any]]:
        return self._ledger.records(kind)

    def subscribe(self, hear: Callable[[StoreChange], None]) -> None:
        self._ledger.subscribe(hear)

    @property
    def last_event(self) -> int:
        return self._ledger.last_event

    async def more_events(self, after: int) -> list[Event]:
        while not self._ledger.closed:
            # An entry may be known before the journal has it.
            if self.last_event > after and (found := await self.events(after=after)):
                return found
            await self._ledger.moved()
        return []


def closed() -> errors.Unavailable:
    return errors.Unavailable("the store is closed", hint="the control plane is stopping: try again")


def _place(one: Stored) -> tuple[str, str]:
    return (one.key.namespace, one.key.name)


def _make_token(key: Key) -> str:
    return base64.urlsafe_b64encode(json.dumps([key.namespace, key.name]).encode()).decode()


def _read_token(token: str) -> tuple[str, str]:
    try:
        last = json.loads(base64.b64decode(token.encode("ascii"), altchars=b"-_", validate=True))
        if isinstance(last, list) and len(last) == 2 and all(isinstance(part, str) for part in last):
            return (last[0], last[1])
    except (ValueError, RecursionError):
        pass
    raise errors.InvalidRequest(
        "the continue token was not given by this server", hint="start again from the first page"
    )


def subject(write: Write) -> Key | None:
    """The object that a write is about."""
    if write.put is not None and write.delete is not None:
        raise errors.InvalidRequest("one write cannot both put and delete")
    return write.put.key if write.put is not None else write.delete


def check_expectation(key: Key, before: Stored | None, write: Write) -> None:
    if before is None:
        if write.delete is not None or write.expect:
            raise errors.NotFound(f"there is no training {key}")
    elif write.expect == 0 and write.put is not None:
        raise errors.AlreadyExists(f"there is a training {key} already", hint="choose another name, or delete it first")
    elif write.expect is not None and write.expect != before.version:
        raise errors.Conflict(
            f"training {key} is at version {before.version}, not {write.expect}: somebody else wrote first",
            hint="read it again, then decide",
        )


def _check_texts(*texts: str) -> None:
    """Refuse what the disk could not hold as text, before it is part of a transaction with others."""
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise errors.InvalidRequest(f"{text[:80]!r} is not valid text") from error


def _keep(records: Sequence[Record]) -> tuple[KeptRecord, ...]:
    for record in records:
        _check_texts(record.kind, record.key)
    return tuple(KeptRecord(record, None if record.value is None else pack(dict(record.value))) for record in records)

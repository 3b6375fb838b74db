"""What the control plane needs of the outside: a store, a backend, keys, a clock. Adapters implement it, and meet here.

Each port has one contract suite in tests/contract that every adapter passes.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

from muster import errors
from muster.core.curves import Curve, WorkerReading
from muster.core.packages import KeptPackage
from muster.core.steady import Mark
from muster.core.world.run import Run
from muster.types.event import Event
from muster.types.training import Key, Training, Uid
from muster.types.worker import Capacity, Worker
from muster.types.world import OutcomeState, RunOutcome, Settings, Spot

log = logging.getLogger("muster")
T = TypeVar("T")

AGAIN_S = 1.0  # before what could not be done is tried again
_SAID_EVERY = 300

# Store -------------------------------------------------------------------------------------------

Version = int  # one counter for the whole store; grows with every change of any object


class Stored:
    """A training as the store holds it. Reading it costs nothing until it is asked for."""

    def __init__(self, key: Key, uid: Uid, version: Version, phase: str, labels: Mapping[str, str], raw: bytes) -> None:
        self.key = key
        self.uid = uid
        self.version = version
        self.phase = phase
        self.labels = labels
        self.raw = raw  # JSON with everything, secrets too: it never leaves the control plane

    @functools.cached_property
    def training(self) -> Training:
        return Training.from_wire(json.loads(self.raw))

    @functools.cached_property
    def shown(self) -> bytes:
        """JSON as anyone who may read it sees it."""
        # Most have no secrets, and their bytes say so: a page of hundreds then needs no decoding. Inside a text the
        # quotes would be escaped, so only the field itself looks like this.
        if b'"secretEnv":[]' in self.raw and b'"secretEnv":["' not in self.raw:
            return self.raw
        masked = self.training.masked()
        return self.raw if masked is self.training else json.dumps(masked.to_wire()).encode()


@dataclass(frozen=True)
class StoreChange:
    """One step of the store's history."""

    version: Version
    type: Literal["ADDED", "MODIFIED", "DELETED"]
    stored: Stored  # as it was after the change; for DELETED, as it was last


@dataclass(frozen=True)
class Record:
    """A small private value that is kept beside the objects: runs, workers, idempotency keys. None removes it."""

    kind: str
    key: str
    value: Mapping[str, Any] | None


@dataclass(frozen=True)
class Write:
    """One transaction: at most one object, with the events and records that belong to the change.

    `expect` is the version that the object must have (0: it must not exist; None: any). Put sets the object's
    resourceVersion. An event that lacks them gets the object's namespace, name and uid, and the time of writing.
    """

    put: Training | None = None
    delete: Key | None = None
    expect: Version | None = None
    events: Sequence[Event] = ()
    records: Sequence[Record] = ()
    lazy: bool = False  # need not be on disk before it counts: it only has to outlive the process


@dataclass(frozen=True)
class Trouble:
    """Why a store takes nothing, or nothing new, and since when."""

    since: datetime
    what: str
    stuck: bool  # nothing can be written: what is read may be old

    def __str__(self) -> str:
        at = f"{self.since:%H:%M:%S} UTC"
        if self.stuck:
            return f"the control plane cannot write since {at}: {self.what}; what is shown may be as old as that"
        return f"{self.what} since {at}: nothing new is taken; what is shown is true, and what runs can be ended"


@dataclass(frozen=True)
class Page:
    items: tuple[Stored, ...]
    version: Version
    next: str = ""  # continue token; empty at the end


@dataclass(frozen=True)
class Filter:
    """Which trainings a list or watch is about."""

    namespace: str | None = None
    phase: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)

    def takes(self, one: Stored) -> bool:
        if self.namespace is not None and one.key.namespace != self.namespace:
            return False
        if self.phase is not None and one.phase != self.phase:
            return False
        return all(one.labels.get(name) == value for name, value in self.labels.items())


class Store(Protocol):
    """Versioned objects with compare-and-set, an ordered history, a journal and records; all in one transaction.

    Reads answer from what is committed. A write that cannot be made durable raises `errors.Unavailable` and leaves
    nothing behind. Everything is called from one event loop.
    """

    @property
    def version(self) -> Version: ...

    @property
    def trouble(self) -> Trouble | None:
        """What keeps it from writing now."""

    def get(self, key: Key) -> Stored | None: ...

    def page(self, which: Filter, *, limit: int | None = None, token: str = "") -> Page:
        """In order of namespace and name. Raises `errors.InvalidRequest` for a token that it did not give."""

    async def write(self, write: Write) -> Stored | None:
        """Commit; the object as written (None if none was put). Raises Conflict, AlreadyExists, NotFound."""

    async def newer(self, key: Key, than: Version, timeout_s: float | None) -> Stored | None:
        """The object as soon as it is newer than that version or gone; after the timeout as it is."""

    def changes(self, since: Version, which: Filter) -> AsyncIterator[StoreChange]:
        """Every change after `since`, in order, for ever. Raises `errors.Compacted` if they are no longer known."""

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
        """Entries of the journal with an id between these, oldest first; the newest of them where `most` says how many.

        They outlive the training that they are about.
        """

    @property
    def last_event(self) -> int:
        """The id of the newest entry."""

    async def more_events(self, after: int) -> list[Event]:
        """Entries with a higher id, as soon as there are some; none when the store is closed."""

    def record(self, kind: str, key: str) -> Mapping[str, Any] | None: ...

    def records(self, kind: str) -> Mapping[str, Mapping[str, Any]]: ...

    def subscribe(self, hear: Callable[[StoreChange], None]) -> None:
        """Call on every committed change, in order."""

    async def close(self) -> None: ...


async def until_answered(
    what: str,
    ask: Callable[[], Awaitable[T]],
    passes: Callable[[errors.MusterError], bool] = lambda error: error.retryable,
) -> T:
    """Ask for what nobody would ask for again, however long it takes. What does not pass is raised."""
    for failures in itertools.count():
        try:
            return await ask()
        except errors.MusterError as error:
            if not passes(error):
                raise
            level = logging.WARNING if failures % _SAID_EVERY == 0 else logging.DEBUG  # many may ask, and for days
            log.log(level, "%s: trying again: %s", what, error)
        await asyncio.sleep(AGAIN_S)
    raise AssertionError("there is no end of it")


async def insist(store: Store, write: Write) -> None:
    """Write what nobody will ask for again, however long the disk is full."""
    await until_answered("what is to be written down", lambda: store.write(write))


# Backend -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LogQuery:
    rank: int | None = None
    round: int | None = None
    tail: int | None = None
    follow: bool = False
    markers: bool = False  # a line of muster's own where a round begins
    timestamps: bool = False  # before each line, when it was written


class Backend(Protocol):
    """Where workers run."""

    def workers(self, uid: Uid) -> Sequence[Worker]:
        """All that were ever started for that training, oldest first."""

    @property
    def patience(self) -> timedelta:
        """How long a worker that runs may take to join its world."""

    def capacity(self) -> Capacity | None:
        """The GPUs to be given out; None where somebody else places workers, and says why one has to wait."""

    def plan(self, training: Training) -> Mapping[str, Any]:
        """What would be started, for a dry run."""

    async def start(self, training: Training, name: str, gpus: tuple[int, ...], token: str) -> Worker:
        """Start a worker. Its GPUs count as taken at once; an order that cannot be carried out gives an ended one."""

    async def stop(self, uid: Uid, name: str, *, why: str, kill: bool = False) -> None:
        """Ask a worker to leave, or end it. One that is gone already is no error."""

    async def kill(self, training: Training, worker: str, rank: int | None) -> int:
        """Send SIGKILL to a rank's process, or to all processes of a worker; return how many there were.

        Raises `errors.Conflict` where this control plane cannot do that.
        """

    def logs(self, uid: Uid, query: LogQuery, ended: Callable[[], bool]) -> AsyncGenerator[bytes, None]:
        """Chunks of whole lines. With `follow` it goes on until `ended` says that no more will come."""

    async def log_bytes_taken(self, uid: Uid) -> int | None:
        """What its logs take on the disk; None where somebody else keeps them."""

    async def forget(self, uid: Uid) -> None:
        """Remove everything kept for a training that is no more."""


# Worlds ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RunView:
    """What the coordinator knows of a training's world."""

    run: Run
    reason: str
    confirmed: bool  # its members were told the outcome


class Worlds(Protocol):
    """The coordinator, as whoever directs its runs sees it. A run is named by its training's uid."""

    def look(self, uid: Uid) -> RunView | None: ...

    def open(self, uid: Uid, settings: Settings, target: int, lent: Mapping[str, str] | None = None) -> None:
        """Open a run, or give one that is open other settings.

        `lent` are all the workers that may have no rank, by name, each with a sentence that says who has its GPUs;
        None leaves it as it is, which is as records tell it where nobody has ordered anything since this process began.
        """

    def end(self, uid: Uid, state: OutcomeState, reason: str, message: str) -> None:
        """Order an outcome. It is proposed back through `look` and counts when it is confirmed."""

    def mark_dead(self, uid: Uid, names: Sequence[str]) -> None:
        """These workers are dead, and so are their ranks: a run that waits for them need not."""

    def place(self, uid: Uid, spots: Mapping[str, Spot]) -> None:
        """Where those workers are, by their names: for workers that do not know it themselves."""

    def confirm(self, uid: Uid, outcome: RunOutcome) -> None:
        """The outcome is stored: tell the members."""

    def let_go(self, uid: Uid) -> None:
        """The end is stored: members may leave."""

    def close(self, uid: Uid) -> None: ...


# Curves ------------------------------------------------------------------------------------------


class Measured(Protocol):
    """What trainings have logged and what their workers use, as whoever shows it sees it."""

    def curves(self, uid: Uid) -> Mapping[str, Curve]: ...

    def workers(self, uid: Uid) -> Mapping[str, WorkerReading]:
        """By name, those that have told lately."""


# Keys --------------------------------------------------------------------------------------------


class Keys(Protocol):
    """Small texts under paths such as `muster/default/demo/mesh-ready/node-1`, where those who wait for them look.

    A place that cannot be reached raises `errors.Unavailable` and may be asked again; a path that is a directory to
    `put`, or that has no name in it, raises `errors.InvalidRequest`.
    """

    async def put(self, path: str, value: str) -> None: ...

    async def delete(self, path: str) -> None:
        """Remove that key and everything below it. What is not there is no error."""

    async def list(self, prefix: str) -> Mapping[str, str]:
        """Path → value of every key below the prefix; empty if there is none."""


# Packages ----------------------------------------------------------------------------------------


class Packages(Protocol):
    """Code that was sent, until no training needs it. A package is known in the namespace that it was sent to."""

    def kept(self) -> Sequence[KeptPackage]: ...

    def find(self, namespace: str, digest: str) -> KeptPackage | None: ...

    async def keep(
        self, namespace: str, digest: str, source: Path, now: datetime, needed: Callable[[], Collection[str]]
    ) -> KeptPackage:
        """Take that file, which was checked, for good. Unused packages of the namespace make room for it.

        `needed` returns the digests that trainings of the namespace name. Raises `errors.QuotaExceeded` if the
        namespace has no room left.
        """

    async def renew(self, namespace: str, digest: str, now: datetime) -> None:
        """Somebody is about to use one that is here."""

    async def file(self, namespace: str, digest: str) -> Path:
        """Where it can be read. Raises `errors.NotFound`."""

    async def remove(self, namespace: str, digest: str) -> None:
        """What is not there is no error."""


class Clock(Protocol):
    def now(self) -> datetime:
        """The time of day, for people. It can be set, so nothing is measured with it."""

    def steady(self) -> datetime:
        """For all that is measured, over restarts too: it goes on evenly, and may be far from the time of day."""

    def monotonic(self) -> float:
        """The same in seconds, within this process."""

    def mark(self) -> Mark:
        """What a control plane that comes after this one needs to go on."""

"""How are trainings kept by the Kubernetes API? As objects of the kind Training, seen through one watch.

What is read here comes from the watch alone, so that everyone sees one order of changes, whoever made them: a write is
done when the watch has shown it. `resourceVersion` is the version: compare-and-set is the server's. The server also
decides a training's uid, generation and times; what is put asks for the rest.

A training is put in at most two requests, one for its spec and labels, one for its status; the control plane changes
one of them at a time. To mark it for removal is a DELETE, which our finalizer holds up until the control loop has
removed everything; then the finalizer goes. The journal and the records are `kube_log`'s.
"""

from __future__ import annotations

import asyncio
import logging
import re
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from muster import errors
from muster.core.edits import first_status
from muster.kube.client import MERGE_PATCH, InDoubt, Json, KubeApi, Mirror, passes
from muster.kube.events import Announcer
from muster.ports import Change, Clock, Filter, Stored, Version, Write
from muster.store.kube_log import KEEP_EVENTS, KubeLog
from muster.store.ledger import KEEP_CHANGES, Entry, Ledger, LedgerStore, check_expectation, closed, pack
from muster.types.codec import Invalid, to_wire
from muster.types.event import Event
from muster.types.training import API_VERSION, KIND, REQUEST, UNREADABLE, Key, Spec, Status, Training

log = logging.getLogger("muster.store")

ALL = "/apis/muster.dev/v1alpha1/trainings"
FINALIZER = "muster.dev/training"
SEEN_S = 10.0  # how long the watch may take to show what was written
HEARD_S = 0.25  # and what others wrote
FIRST_RETRY_S, LONGEST_RETRY_S = 0.05, 1.0
_MOST_TRIES = 20
_ALL = Filter()
_LONGEST_NOTE = 1000


@dataclass(frozen=True)
class _Extras:
    """What an object carries beside the training itself."""

    finalizers: tuple[str, ...] = ()
    owners: tuple[Json, ...] = ()

    @property
    def is_ours(self) -> bool:
        return FINALIZER in self.finalizers


class _Tries:
    """Asks again when an answer was lost: only the next one tells whether it was carried out."""

    def __init__(self) -> None:
        self.in_doubt = False
        self._pause_s = FIRST_RETRY_S
        self._until = asyncio.get_running_loop().time() + SEEN_S

    async def pause(self, error: errors.Unavailable) -> None:
        """Or raise it, where asking again helps nobody."""
        self.in_doubt = self.in_doubt or isinstance(error, InDoubt)
        if not self.in_doubt or not error.retryable or asyncio.get_running_loop().time() > self._until:
            raise error
        await asyncio.sleep(self._pause_s)
        self._pause_s = min(LONGEST_RETRY_S, self._pause_s * 2)


class KubeStore(LedgerStore):
    def __init__(self, api: KubeApi, ledger: Ledger, journal: KubeLog, clock: Clock | None) -> None:
        """Use `open`."""
        super().__init__(ledger)
        self._api = api
        self._log = journal
        self._clock = clock
        self._mirror = Mirror(api, ALL, self)
        self._announcer = Announcer(api)
        self._extras: dict[Key, _Extras] = {}
        self._turns: weakref.WeakValueDictionary[Key, asyncio.Lock] = weakref.WeakValueDictionary()
        self._removing: set[Key] = set()
        self._waiting: dict[Key, list[tuple[Version, asyncio.Future[None]]]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._opened = False

    @classmethod
    async def open(
        cls,
        api: KubeApi,
        namespace: str,
        identity: str,
        *,
        keep_changes: int = KEEP_CHANGES,
        keep_events: int = KEEP_EVENTS,
        clock: Clock | None = None,
    ) -> Self:
        """Read everything and begin to watch. The log is kept in that namespace."""
        ledger = Ledger(keep=keep_changes, clock=clock)
        journal = KubeLog(api, namespace, identity, commit=ledger.commit, value=ledger.record, keep=keep_events)
        store = cls(api, ledger, journal, clock)
        records, last_event = await journal.open()
        ledger.load((), records, 0, last_event)
        await store._mirror.start()
        journal.start()
        store._keep(store._mirror.run())
        store._keep(store._announcer.run())
        return store

    async def until_fenced(self) -> str:
        """Until another control plane has taken over; says how that was noticed."""
        return await self._log.until_fenced()

    def _keep(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def events(
        self, *, namespace: str | None = None, training: str | None = None, uid: str | None = None, after: int = 0
    ) -> list[Event]:
        return self._log.find(namespace, training, uid, after)

    async def close(self) -> None:
        if self._ledger.closed:
            return
        await self._log.close()
        self._ledger.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for waiters in self._waiting.values():
            for _, waiter in waiters:
                if not waiter.done():
                    waiter.set_exception(closed())
        self._waiting.clear()

    # Writing -------------------------------------------------------------------------------------

    async def write(self, write: Write) -> Stored | None:
        if self._ledger.closed:
            raise closed()
        if write.put is not None and write.delete is not None:
            raise errors.InvalidRequest("one write cannot both put and delete")
        self._ledger.check(write)
        key = write.put.key if write.put is not None else write.delete
        if key is None:
            await self._journal(write, None)
            return None
        # One at a time for each object, so that its events stand in the order of its versions.
        async with self._turns.setdefault(key, asyncio.Lock()):
            if write.put is not None:
                stored = await self._put(write.put, write.expect)
                noted = self._journal(write, stored)
            else:
                stored = None
                noted = self._journal(write, await self._remove(key, write.expect))
        await noted
        return stored

    def _journal(self, write: Write, about: Stored | None) -> asyncio.Future[None]:
        """Its place in the journal is decided now; it is there when the answer comes."""
        if not write.events and not write.records:
            done = asyncio.get_running_loop().create_future()
            done.set_result(None)
            return done
        entry = self._ledger.prepare(Write(events=write.events, records=write.records), about)
        written = self._log.append(entry)
        written.add_done_callback(lambda done: self._announce(done, entry))
        return written

    def _announce(self, written: asyncio.Future[None], entry: Entry) -> None:
        """Only what is in the journal: the copy never tells more."""
        if not written.cancelled() and written.exception() is None:
            self._announcer.offer(noted.event for noted in entry.events)

    async def _put(self, training: Training, expect: Version | None) -> Stored:
        key, tries = training.key, _Tries()
        for _ in range(_MOST_TRIES):
            before = self.get(key)
            if tries.in_doubt and before is not None and _is_as_asked(training, before.training):
                return before
            check_expectation(key, before, Write(put=training, expect=expect))
            try:
                return await (self._create(training) if before is None else self._replace(training, before))
            except errors.AlreadyExists:
                await self._hear(key, 0)
                if expect == 0 and not tries.in_doubt:
                    raise
            except errors.Conflict:
                await self._hear(key, before.version if before is not None else 0)
            except errors.Unavailable as error:
                await tries.pause(error)
        raise errors.Unavailable(f"training {key} changes too fast to be written")

    async def _create(self, training: Training) -> Stored:
        metadata = _metadata(training, _Extras(finalizers=(FINALIZER,)))
        if training.uid:
            metadata["annotations"] = {**metadata["annotations"], REQUEST: training.uid}
        body = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": to_wire(training.spec)}
        made = await self._api.request("POST", _collection(training.key), body=body)
        if training.status in (Status(), first_status(training.spec)):
            return await self._seen(training.key, made)
        return await self._write_status(training.key, _version(made), training.status)

    async def _replace(self, training: Training, before: Stored) -> Stored:
        """Ask for what differs: spec, labels and annotations; removal; status."""
        old, version = before.training, before.version
        extras = self._extras.get(training.key, _Extras())
        asked, had = training.metadata, old.metadata
        stored: Stored | None = None
        if training.spec != old.spec or asked.labels != had.labels or asked.annotations != had.annotations:
            if wrong := had.annotations.get(UNREADABLE):  # what we know of it is not all that there is
                raise errors.InvalidRequest(
                    f"{training.key} cannot be read: {wrong}", hint="correct it with kubectl edit"
                )
            metadata = {**_metadata(training, extras), "resourceVersion": str(version)}
            body = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": to_wire(training.spec)}
            made = await self._api.request("PUT", _path(training.key), body=body)
            version = _version(made)
            stored = await self._seen(training.key, made)
        if asked.deletion_timestamp is not None and had.deletion_timestamp is None:
            if not extras.is_ours:
                version = _version(await self._claim(training.key, version, extras))
            stored = await self._mark(training.key, version)
        elif training.status != old.status:
            stored = await self._write_status(training.key, version, training.status)
        return stored or before

    async def _write_status(self, key: Key, version: Version, status: Status) -> Stored:
        metadata = {"name": key.name, "namespace": key.namespace, "resourceVersion": str(version)}
        body = {"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "status": to_wire(status)}
        return await self._seen(key, await self._api.request("PUT", _path(key) + "/status", body=body))

    async def _mark(self, key: Key, version: Version) -> Stored:
        """Begin the removal; the finalizer holds it up."""
        only = {"preconditions": {"resourceVersion": str(version)}}
        return await self._seen(key, await self._api.request("DELETE", _path(key), body=only))

    async def _claim(self, key: Key, version: Version, extras: _Extras) -> Json:
        """Put our finalizer on it."""
        about = {"resourceVersion": str(version), "finalizers": [*extras.finalizers, FINALIZER]}
        return await self._api.request("PATCH", _path(key), body={"metadata": about}, content_type=MERGE_PATCH)

    async def _remove(self, key: Key, expect: Version | None) -> Stored:
        """Remove it for good: mark it, if nobody has, then take the finalizer away."""
        tries, last = _Tries(), self.get(key)
        for _ in range(_MOST_TRIES):
            before = self.get(key)
            if tries.in_doubt and last is not None and (before is None or before.uid != last.uid):
                return last
            if not tries.in_doubt or before is None or before.training.metadata.deletion_timestamp is None:
                check_expectation(key, before, Write(delete=key, expect=expect))
            assert before is not None
            self._removing.add(key)
            try:
                await self._remove_now(key, before)
                return before
            except errors.Conflict:
                await self._hear(key, before.version)
            except errors.Unavailable as error:
                await tries.pause(error)
            finally:
                self._removing.discard(key)
        raise errors.Unavailable(f"training {key} changes too fast to be removed")

    async def _remove_now(self, key: Key, before: Stored) -> None:
        version = before.version
        gone = self._gone(key)
        try:
            if before.training.metadata.deletion_timestamp is None:
                only = {"preconditions": {"resourceVersion": str(version), "uid": before.uid}}
                marked = await self._api.request("DELETE", _path(key), body=only)
                if marked.get("kind") == KIND:
                    version = _version(marked)
            extras = self._extras.get(key, _Extras())
            if extras.is_ours:
                left = [one for one in extras.finalizers if one != FINALIZER]
                about = {"resourceVersion": str(version), "finalizers": left}
                await self._api.request("PATCH", _path(key), body={"metadata": about}, content_type=MERGE_PATCH)
        except errors.NotFound:
            pass  # somebody was quicker; it is gone
        except BaseException:
            gone.cancel()
            raise
        await self._await(gone, f"{key} is not gone")

    # Seeing --------------------------------------------------------------------------------------

    async def _seen(self, key: Key, made: Json) -> Stored:
        """Wait until the watch has shown what was written."""
        version = _version(made)
        await self._catch_up(key, version - 1)
        stored = self.get(key)
        if stored is None:
            raise errors.NotFound(f"training {key} was removed as soon as it was written")
        return stored

    async def _catch_up(self, key: Key, beyond: Version) -> None:
        """Until the watch has shown something newer of that object."""
        known = self.get(key)
        if known is not None and known.version > beyond:
            await asyncio.sleep(0)  # those who listen to changes hear of it first
            return
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, []).append((beyond, waiter))
        await self._await(waiter, f"{key} is not shown")

    async def _hear(self, key: Key, beyond: Version) -> None:
        """The server says that it has changed: the watch tells how, as a rule before long."""
        try:
            async with asyncio.timeout(HEARD_S):
                await self._catch_up(key, beyond)
        except TimeoutError:
            pass

    def _gone(self, key: Key) -> asyncio.Future[None]:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, []).append((2**63, waiter))  # only its end is newer than that
        return waiter

    async def _await(self, waiter: asyncio.Future[None], what: str) -> None:
        try:
            async with asyncio.timeout(SEEN_S):
                await waiter
        except TimeoutError:
            raise errors.Unavailable(f"the Kubernetes API is slow: {what} after {SEEN_S:g} s") from None

    def _wake(self, key: Key, version: Version, *, gone: bool = False) -> None:
        waiters = self._waiting.pop(key, [])
        left = []
        for beyond, waiter in waiters:
            if waiter.done():
                continue
            if gone or version > beyond:
                waiter.set_result(None)
            else:
                left.append((beyond, waiter))
        if left:
            self._waiting[key] = left

    # What the watch tells

    def listed(self, items: Sequence[Json], version: str) -> None:
        """The first list is what there is; a later one says what was missed, as if it had just happened."""
        first, self._opened = not self._opened, True
        seen = {_key(item): item for item in items}
        if first:
            stored = [one for item in items if (one := self._read(item)) is not None]
            self._ledger.load_objects(stored, int(version))
        else:
            self._catch_up_with(seen, int(version))
            self._ledger.advance(int(version))
        for item in items:
            self._welcome(item)

    def _catch_up_with(self, seen: Mapping[Key, Json], version: Version) -> None:
        """In order of versions. Each removal had a version that no object has now: the first such ones stand for it."""
        news = {
            _version(item): item
            for key, item in seen.items()
            if (known := self.get(key)) is None or known.version < _version(item)
        }
        gone = (one.key for one in self.page(_ALL).items if _uid(seen.get(one.key)) != one.uid)
        unused = (at for at in range(self.version + 1, version + 1) if at not in news)
        steps: list[tuple[Version, Key, Json | None]] = [(next(unused, version), key, None) for key in gone]
        steps += [(at, _key(item), item) for at, item in news.items()]
        for at, key, item in sorted(steps, key=lambda step: step[0]):
            if item is None:
                self._drop(key, at)
            else:
                self.changed("MODIFIED", item)

    def changed(self, kind: str, item: Json) -> None:
        key, version = _key(item), _version(item)
        known = self.get(key)
        if kind == "DELETED":
            self._drop(key, version)
            return
        if known is not None and known.version >= version:
            return
        if known is not None and known.uid != item["metadata"]["uid"]:
            self._drop(key, version)
        stored = self._read(item)
        if stored is None:
            self._wake(key, version)
            return
        name: Literal["ADDED", "MODIFIED"] = "ADDED" if self.get(key) is None else "MODIFIED"
        silent = key in self._removing and name == "MODIFIED"
        self._ledger.commit([Entry(Change(version, name, stored), stored.training)], silent=silent)
        self._wake(key, version)
        self._welcome(item)

    def reached(self, version: str) -> None:
        self._ledger.advance(int(version))

    def _drop(self, key: Key, version: Version) -> None:
        known = self.get(key)
        self._extras.pop(key, None)
        if known is not None:
            self._ledger.commit([Entry(Change(max(version, self.version + 1), "DELETED", known))])
        self._wake(key, version, gone=True)

    def _read(self, item: Json) -> Stored | None:
        """The training that an object is, as far as it can be read."""
        key, about = _key(item), item["metadata"]
        try:
            training = training_of(item)
        except Invalid as error:
            known = self.get(key)
            same = known.training.spec if known is not None and known.uid == about["uid"] else None
            try:
                training = with_note(item, error, same)
            except Invalid:  # a status, which is ours: a newer version of us may have written it
                log.warning("training %s cannot be read: %s", key, error)
                return None
        self._extras[key] = _Extras(tuple(about.get("finalizers") or ()), tuple(about.get("ownerReferences") or ()))
        labels = dict(training.metadata.labels)
        return Stored(key, training.uid, _version(item), training.status.phase, labels, pack(training.to_wire()))

    def _welcome(self, item: Json) -> None:
        """One that came around our API gets our finalizer, and its first line in the journal."""
        key, about = _key(item), item["metadata"]
        if FINALIZER in (about.get("finalizers") or ()) or about.get("deletionTimestamp") or self.get(key) is None:
            return
        self._keep(self._try(lambda: self._take_over(key, item)))

    async def _take_over(self, key: Key, item: Json) -> None:
        extras, tries = self._extras.get(key, _Extras()), _Tries()
        while not (tries.in_doubt and self._extras.get(key, _Extras()).is_ours):
            try:
                await self._claim(key, _version(item), extras)
                break
            except errors.Conflict:
                if not tries.in_doubt:
                    return  # the next version comes here as well
                await self._hear(key, _version(item))
                if not self._extras.get(key, _Extras()).is_ours:
                    return
            except errors.Unavailable as error:
                await tries.pause(error)
        if (about := self.get(key)) is None:
            return
        training = about.training
        born = Event(
            "Created", f"applied to the cluster, for {training.spec.world_size.target} workers", actor="kubectl"
        )
        await self._journal(Write(events=(replace(born, at=training.metadata.creation_timestamp),)), about)

    async def _try(self, work: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """Until it is done, or not needed any more: a newer version comes here as well."""
        while True:
            try:
                await work()
                return
            except (errors.Conflict, errors.NotFound):
                return
            except errors.MusterError as error:
                log.warning("%s", error)
                if not passes(error):
                    return
            await asyncio.sleep(SEEN_S)


def training_of(item: Json) -> Training:
    """The training that an object of the API is. Raises Invalid."""
    about = dict(item["metadata"])
    wire = {"metadata": about, "spec": item.get("spec") or {}}
    for name in ("labels", "annotations"):
        if about.get(name) is None:
            about.pop(name, None)
    if item.get("status"):
        wire["status"] = item["status"]
    training = Training.from_wire(wire)
    return training if "status" in wire else replace(training, status=first_status(training.spec))


def _is_as_asked(asked: Training, found: Training) -> bool:
    """Whether a write whose answer was lost has been carried out."""
    extra = {REQUEST: found.metadata.annotations.get(REQUEST, "")}
    return (
        (to_wire(asked.spec), to_wire(asked.status)) == (to_wire(found.spec), to_wire(found.status))
        and asked.metadata.labels == found.metadata.labels
        and {**extra, **asked.metadata.annotations} == {**extra, **found.metadata.annotations}
        and asked.uid in (found.uid, extra[REQUEST])
        and (asked.metadata.deletion_timestamp is None) == (found.metadata.deletion_timestamp is None)
    )


def with_note(item: Json, error: Invalid, spec: Spec | None) -> Training:
    """One whose spec cannot be read: with the spec that it had, or with what is left of it, and what is wrong.

    The note makes it invalid, so that nothing follows from it but a condition.
    """
    bad = {re.split(r"[.\[]", f"{problem.field}.")[1] for problem in error.problems}
    left = {name: value for name, value in item["spec"].items() if name not in bad}
    about = item["metadata"]
    noted = {**about, "annotations": {**(about.get("annotations") or {}), UNREADABLE: str(error)[:_LONGEST_NOTE]}}
    return training_of({**item, "metadata": noted, "spec": left if spec is None else to_wire(spec)})


def _metadata(training: Training, extras: _Extras) -> Json:
    about = training.metadata
    shown: Json = {"name": about.name, "namespace": about.namespace}
    shown |= {"labels": dict(about.labels), "annotations": dict(about.annotations)}
    shown["finalizers"] = list(extras.finalizers)
    return shown | ({"ownerReferences": list(extras.owners)} if extras.owners else {})


def _collection(key: Key) -> str:
    return f"/apis/muster.dev/v1alpha1/namespaces/{key.namespace}/trainings"


def _path(key: Key) -> str:
    return f"{_collection(key)}/{key.name}"


def _key(item: Json) -> Key:
    return Key(item["metadata"]["namespace"], item["metadata"]["name"])


def _uid(item: Json | None) -> str | None:
    return item["metadata"]["uid"] if item is not None else None


def _version(item: Json) -> Version:
    return int(item["metadata"]["resourceVersion"])

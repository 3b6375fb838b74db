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
import secrets
import weakref
from dataclasses import replace
from typing import Self

from muster import errors
from muster.background import Tasks
from muster.backoff import Backoff
from muster.clock import SystemClock
from muster.core.training.edits import first_status
from muster.kube.client import MERGE_PATCH, InDoubt, Informer, Json, KubeApi, passes
from muster.kube.events import EventRecorder
from muster.ports import Clock, Stored, Version, Write
from muster.store.kube_cache import SEEN_S, TrainingCache
from muster.store.kube_key import read_key
from muster.store.kube_leftovers import Leftovers
from muster.store.kube_log import GONE, KEEP_EVENTS, KubeLog
from muster.store.kube_objects import (
    FINALIZER,
    Extras,
    born,
    collection,
    is_as_asked,
    object_of,
    path_of,
    status_of,
    version_of,
)
from muster.store.kube_outbox import OUTBOX, Outbox, Owner, Seal
from muster.store.ledger import KEEP_CHANGES, Entry, Ledger, LedgerStore, check_expectation, closed, subject
from muster.types.event import Event
from muster.types.training import KIND, UNREADABLE, Key, Status, Training

log = logging.getLogger("muster.store")

ALL = "/apis/muster.dev/v1alpha1/trainings"
RETRY = Backoff(0.05, 1.0)
_MOST_TRIES = 20
_PAGE = 100  # objects that are read at once: one may have a megabyte


class _Tries:
    """Asks again when an answer was lost: only the next one tells whether it was carried out."""

    def __init__(self) -> None:
        self.in_doubt = False
        self._failures = 0
        self._until = asyncio.get_running_loop().time() + SEEN_S

    async def pause(self, error: errors.Unavailable) -> None:
        """Or raise it, where asking again helps nobody."""
        self.in_doubt = self.in_doubt or isinstance(error, InDoubt)
        if not self.in_doubt or not error.retryable or asyncio.get_running_loop().time() > self._until:
            raise error
        self._failures += 1
        await asyncio.sleep(RETRY.after(self._failures))


class KubeStore(LedgerStore):
    def __init__(self, api: KubeApi, ledger: Ledger, journal: KubeLog, seal: Seal, clock: Clock | None) -> None:
        """Use `open`."""
        super().__init__(ledger)
        self._api = api
        self._log = journal
        self._seal = seal
        self._leftovers = Leftovers(api, journal, self, seal, self._journal)
        self._clock = clock or SystemClock()
        self._cache = TrainingCache(ledger, first=self._leftovers.find, seen=self._take_over_foreign)
        self._informer = Informer(api, ALL, self._cache, cut=self._cache.cut, page=_PAGE)
        self._recorder = EventRecorder(api)
        self._turns: weakref.WeakValueDictionary[Key, asyncio.Lock] = weakref.WeakValueDictionary()
        self._tasks = Tasks()

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
        journal = KubeLog(
            *(api, namespace, identity),
            commit=ledger.commit,
            value=ledger.record,
            now=ledger.clock.steady,
            keep=keep_events,
        )
        store = cls(api, ledger, journal, Seal(await read_key(api, namespace)), clock)
        records, last_event = await journal.open()
        ledger.load((), records, 0, last_event)
        await store._informer.start()
        journal.start()
        await store._leftovers.settle()
        store._tasks.start(store._informer.run())
        store._tasks.start(store._leftovers.wipe())
        store._tasks.start(store._recorder.run())
        return store

    async def until_fenced(self) -> str:
        """Until another control plane has taken over; says how that was noticed."""
        return await self._log.until_fenced()

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
        return self._log.find(namespace, training, uid, after, before, most)

    async def close(self) -> None:
        if self._ledger.closed:
            return
        await self._log.close()
        self._ledger.close()
        self._tasks.cancel()
        await self._tasks.finish()
        self._cache.close()

    # Writing -------------------------------------------------------------------------------------

    async def write(self, write: Write) -> Stored | None:
        if self._ledger.closed:
            raise closed()
        self._ledger.check(write)
        if (key := subject(write)) is None:
            await self._journal(write, None)
            return None
        # One at a time for each object, so that its events stand in the order of its versions.
        async with self._turns.setdefault(key, asyncio.Lock()):
            if write.delete is not None:
                await self._remove_and_tell(key, write)
                return None
            put = write.put
            assert put is not None
            mark, now = secrets.token_hex(8), self._clock.now()
            write = replace(write, events=tuple(replace(one, at=one.at or now) for one in write.events))
            stored = await self._put(put, write.expect, Outbox(mark, write) if write.events else None)
            noted = self._journal(write, stored, mark)
        await noted
        return stored

    async def _remove_and_tell(self, key: Key, write: Write) -> None:
        """The journal first: of an object that is gone nothing is left to tell of it. Tried again, it is told once."""
        before = self.get(key)
        check_expectation(key, before, write)
        assert before is not None
        mark = f"{GONE}{before.uid}"
        if not self._log.knows(mark):
            await self._journal(write, before, mark)
        await self._remove(key, write.expect)

    def _journal(self, write: Write, about: Stored | None, mark: str = "") -> asyncio.Future[None]:
        """Its place in the journal is decided now; it is there when the answer comes."""
        if not write.events and not write.records:
            done = asyncio.get_running_loop().create_future()
            done.set_result(None)
            return done
        entry = self._ledger.prepare(Write(events=write.events, records=write.records), about)
        written = self._log.append(entry, mark)
        written.add_done_callback(lambda done: self._announce(done, entry))
        return written

    def _announce(self, written: asyncio.Future[None], entry: Entry) -> None:
        """Only what is in the journal: the copy never tells more."""
        if not written.cancelled() and written.exception() is None:
            self._recorder.offer(noted.event for noted in entry.events)

    async def _put(self, training: Training, expect: Version | None, outbox: Outbox | None) -> Stored:
        key, tries = training.key, _Tries()
        for _ in range(_MOST_TRIES):
            before = self.get(key)
            if tries.in_doubt and before is not None and is_as_asked(training, before.training):
                return before
            check_expectation(key, before, Write(put=training, expect=expect))
            try:
                if before is None:
                    return await self._create(training, outbox)
                return await self._replace(training, before, outbox)
            except errors.AlreadyExists:
                await self._cache.hear(key, 0)
                if expect == 0 and not tries.in_doubt:
                    raise
            except errors.Conflict:
                await self._cache.hear(key, before.version if before is not None else 0)
            except errors.Unavailable as error:
                await tries.pause(error)
        raise errors.Unavailable(f"training {key} changes too fast to be written")

    async def _create(self, training: Training, outbox: Outbox | None) -> Stored:
        carried = self._seal.close(outbox, Owner(training.key, request=training.uid))
        body = object_of(training, Extras(finalizers=(FINALIZER,)), carried)
        made = await self._api.request("POST", collection(training.key), body=body)
        if training.status in (Status(), first_status(training.spec)):
            return await self._cache.shown(training.key, made)
        carried = self._seal.close(outbox, Owner(training.key, made["metadata"]["uid"]))
        return await self._write_status(training.key, version_of(made), training.status, carried)

    async def _replace(self, training: Training, before: Stored, outbox: Outbox | None) -> Stored:
        """Ask for what differs: spec, labels and annotations; removal; status."""
        old, version = before.training, before.version
        carried = self._seal.close(outbox, Owner(before.key, before.uid))
        extras = self._cache.extras(training.key)
        asked, had = training.metadata, old.metadata
        stored: Stored | None = None
        if training.spec != old.spec or asked.labels != had.labels or asked.annotations != had.annotations:
            if wrong := had.annotations.get(UNREADABLE):  # what we know of it is not all that there is
                raise errors.InvalidRequest(
                    f"{training.key} cannot be read: {wrong}", hint="correct it with kubectl edit"
                )
            made = await self._api.request(
                "PUT", path_of(training.key), body=object_of(training, extras, carried, version)
            )
            version = version_of(made)
            stored = await self._cache.shown(training.key, made)
        if asked.deletion_timestamp is not None and had.deletion_timestamp is None:
            if not extras.is_ours:
                made = await self._set_finalizers(training.key, version, *extras.finalizers, FINALIZER)
                version = version_of(made)
            stored = await self._mark(training.key, version)
        elif training.status != old.status:
            stored = await self._write_status(training.key, version, training.status, carried)
        return stored or before

    async def _write_status(self, key: Key, version: Version, status: Status, carried: str) -> Stored:
        body = status_of(key, version, status, carried)
        return await self._cache.shown(key, await self._api.request("PUT", path_of(key) + "/status", body=body))

    async def _mark(self, key: Key, version: Version) -> Stored:
        """Begin the removal; the finalizer holds it up."""
        only = {"preconditions": {"resourceVersion": str(version)}}
        return await self._cache.shown(key, await self._api.request("DELETE", path_of(key), body=only))

    async def _set_finalizers(self, key: Key, version: Version, *finalizers: str, carried: str = "") -> Json:
        about: Json = {"resourceVersion": str(version), "finalizers": finalizers}
        if carried:
            about["annotations"] = {OUTBOX: carried}
        return await self._api.request("PATCH", path_of(key), body={"metadata": about}, content_type=MERGE_PATCH)

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
            self._cache.removing.add(key)
            try:
                await self._remove_now(key, before)
                return before
            except errors.Conflict:
                await self._cache.hear(key, before.version)
            except errors.Unavailable as error:
                await tries.pause(error)
            finally:
                self._cache.removing.discard(key)
        raise errors.Unavailable(f"training {key} changes too fast to be removed")

    async def _remove_now(self, key: Key, before: Stored) -> None:
        version = before.version
        try:
            if before.training.metadata.deletion_timestamp is None:
                only = {"preconditions": {"resourceVersion": str(version), "uid": before.uid}}
                marked = await self._api.request("DELETE", path_of(key), body=only)
                if marked.get("kind") == KIND:
                    version = version_of(marked)
            extras = self._cache.extras(key)
            left = [one for one in extras.finalizers if one != FINALIZER]
            if extras.is_ours:
                await self._set_finalizers(key, version, *left)
            if left:
                return  # others hold it up, for as long as they like; nothing of ours is left
        except errors.NotFound:
            pass  # somebody was quicker; it is gone
        await self._cache.gone(before)

    # Trainings that came around our API

    def _take_over_foreign(self, key: Key, item: Json) -> None:
        """One without our finalizer gets it, and its first line in the journal."""
        about = item["metadata"]
        if FINALIZER in (about.get("finalizers") or ()) or about.get("deletionTimestamp") or self.get(key) is None:
            return
        self._tasks.start(self._insist_on_taking_over(key, item))

    async def _insist_on_taking_over(self, key: Key, item: Json) -> None:
        """Until it is done, or not needed any more: a newer version comes here as well."""
        while True:
            try:
                await self._take_over(key, item)
                return
            except (errors.Conflict, errors.NotFound):
                return
            except errors.MusterError as error:
                log.warning("%s", error)
                if not passes(error):
                    return
            await asyncio.sleep(SEEN_S)

    async def _take_over(self, key: Key, item: Json) -> None:
        extras, tries = self._cache.extras(key), _Tries()
        told, mark = born(item), secrets.token_hex(8)
        carried = self._seal.close(Outbox(mark, told), Owner(key, item["metadata"]["uid"]))
        while not (tries.in_doubt and self._cache.extras(key).is_ours):
            try:
                await self._set_finalizers(key, version_of(item), *extras.finalizers, FINALIZER, carried=carried)
                break
            except errors.Conflict:
                if not tries.in_doubt:
                    return  # the next version comes here as well
                await self._cache.hear(key, version_of(item))
                if not self._cache.extras(key).is_ours:
                    return
            except errors.Unavailable as error:
                await tries.pause(error)
        if (about := self.get(key)) is not None:
            await self._journal(told, about, mark)

"""Which trainings does the watch show, and has it shown yet what was just written? What it shows goes to the ledger."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

from muster import errors
from muster.kube.client import Json
from muster.ports import Filter, StoreChange, Stored, Version
from muster.store.kube_objects import Extras, key_of, training_of, uid_of, version_of, with_note
from muster.store.ledger import Entry, Ledger, closed, pack
from muster.types.codec import Invalid
from muster.types.training import Key

log = logging.getLogger("muster.store")

SEEN_S = 10.0  # how long the watch may take to show what was written
HEARD_S = 0.25  # and what others wrote
_NEVER = 2**63  # only an object's end is newer than that
_ALL = Filter()
_LOOKED_AT = (*("namespace", "name", "uid", "resourceVersion", "finalizers", "creationTimestamp", "deletionTimestamp"),)


class TrainingCache:
    """An informer's handler."""

    def __init__(self, ledger: Ledger, *, first: Callable[[Json], None], seen: Callable[[Key, Json], None]) -> None:
        """`first` gets each object of the first list; `seen` each object that is there, as far as `cut` leaves it."""
        self._ledger = ledger
        self._first, self._seen = first, seen
        self._extras: dict[Key, Extras] = {}
        self._waiting: dict[Key, list[tuple[Version, asyncio.Future[None]]]] = {}
        self._opened = False
        self.removing: set[Key] = set()  # of these only the end is told

    def extras(self, key: Key) -> Extras:
        return self._extras.get(key, Extras())

    # Waiting for the watch

    async def shown(self, key: Key, made: Json) -> Stored:
        """The object as it was written, once the watch has shown it."""
        await self._catch_up(key, version_of(made) - 1)
        stored = self._ledger.get(key)
        if stored is None:
            raise errors.NotFound(f"training {key} was removed as soon as it was written")
        return stored

    async def gone(self, one: Stored) -> None:
        known = self._ledger.get(one.key)
        if known is not None and known.uid == one.uid:
            await self._await(one.key, _NEVER, "is not gone")

    async def hear(self, key: Key, beyond: Version) -> None:
        """The server says that it has changed: the watch tells how, as a rule before long."""
        try:
            async with asyncio.timeout(HEARD_S):
                await self._catch_up(key, beyond)
        except TimeoutError:
            pass

    async def _catch_up(self, key: Key, beyond: Version) -> None:
        """Until the watch has shown something newer of that object."""
        known = self._ledger.get(key)
        if known is not None and known.version > beyond:
            await asyncio.sleep(0)  # those who listen to changes hear of it first
        else:
            await self._await(key, beyond, "is not shown")

    async def _await(self, key: Key, beyond: Version, what: str) -> None:
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(key, []).append((beyond, waiter))
        try:
            async with asyncio.timeout(SEEN_S):
                await waiter
        except TimeoutError:
            raise errors.Unavailable(f"the Kubernetes API is slow: {key} {what} after {SEEN_S:g} s") from None

    def _wake(self, key: Key, version: Version) -> None:
        waiters = [(beyond, waiter) for beyond, waiter in self._waiting.pop(key, ()) if not waiter.done()]
        for beyond, waiter in waiters:
            if version > beyond:
                waiter.set_result(None)
        if left := [one for one in waiters if version <= one[0]]:
            self._waiting[key] = left

    def close(self) -> None:
        """Whoever waits is told that nothing will come."""
        for waiters in self._waiting.values():
            for _, waiter in waiters:
                if not waiter.done():
                    waiter.set_exception(closed())
        self._waiting.clear()

    # What the informer tells

    def cut(self, item: Json) -> Json:
        """For `listed`: thousands of whole objects would be much, and to read them all at once would take long."""
        if not self._opened:
            self._first(item)
        about = {name: value for name, value in item["metadata"].items() if name in _LOOKED_AT}
        size = (item.get("spec") or {}).get("worldSize")
        return {"metadata": about, "spec": {"worldSize": size}, "read": self._read(item)}

    def listed(self, items: Sequence[Json], version: str) -> None:
        """The first list is what there is; a later one says what was missed, as if it had just happened."""
        if not self._opened:
            self._opened = True
            stored = [one for item in items if (one := item["read"]) is not None]
            self._ledger.load_objects(stored, int(version))
        else:
            self._catch_up_with({key_of(item): item for item in items}, int(version))
            self._ledger.advance(int(version))
        for item in items:
            self._seen(key_of(item), item)

    def _catch_up_with(self, seen: Mapping[Key, Json], version: Version) -> None:
        """In order of versions. Each removal had a version that no object has now: the first such ones stand for it."""
        news = {
            version_of(item): item
            for key, item in seen.items()
            if (known := self._ledger.get(key)) is None or known.version < version_of(item)
        }
        known_ones = self._ledger.page(_ALL, None, "").items
        gone = (one.key for one in known_ones if uid_of(seen.get(one.key)) != one.uid)
        unused = (at for at in range(self._ledger.version + 1, version + 1) if at not in news)
        steps: list[tuple[Version, Key, Json | None]] = [(next(unused, version), key, None) for key in gone]
        steps += [(at, key_of(item), item) for at, item in news.items()]
        for at, key, item in sorted(steps, key=lambda step: step[0]):
            if item is None:
                self._drop(key, at)
            else:
                self.changed("MODIFIED", item)

    def changed(self, kind: str, item: Json) -> None:
        key, version = key_of(item), version_of(item)
        known = self._ledger.get(key)
        if kind == "DELETED":
            self._drop(key, version)
            return
        if known is not None and known.version >= version:
            return
        if known is not None and known.uid != uid_of(item):
            self._drop(key, version)
            known = None
        stored = item["read"] if "read" in item else self._read(item)
        if stored is None:
            self._wake(key, version)
            return
        name: Literal["ADDED", "MODIFIED"] = "ADDED" if known is None else "MODIFIED"
        silent = key in self.removing and name == "MODIFIED"
        self._ledger.commit([Entry(StoreChange(version, name, stored), stored.training)], silent=silent)
        self._wake(key, version)
        self._seen(key, item)

    def reached(self, version: str) -> None:
        self._ledger.advance(int(version))

    def _drop(self, key: Key, version: Version) -> None:
        known = self._ledger.get(key)
        self._extras.pop(key, None)
        if known is not None:
            self._ledger.commit([Entry(StoreChange(max(version, self._ledger.version + 1), "DELETED", known))])
        self._wake(key, _NEVER + 1)

    def _read(self, item: Json) -> Stored | None:
        """The training that an object is, as far as it can be read."""
        key, about = key_of(item), item["metadata"]
        try:
            training = training_of(item)
        except Invalid as error:
            known = self._ledger.get(key)
            same = known.training.spec if known is not None and known.uid == about["uid"] else None
            try:
                training = with_note(item, error, same)
            except Invalid:  # a status, which is ours: a newer version of us may have written it
                log.warning("training %s cannot be read: %s", key, error)
                return None
        self._extras[key] = Extras(tuple(about.get("finalizers") or ()), tuple(about.get("ownerReferences") or ()))
        labels = dict(training.metadata.labels)
        return Stored(key, training.uid, version_of(item), training.status.phase, labels, pack(training.to_wire()))

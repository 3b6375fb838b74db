"""Carries out what `core.training.queueing` says of queued trainings, where the cluster has Kueue.

It looks at all of them whenever a training or a Workload has changed, and now and then. Where there is no Kueue it does
nothing: then somebody else turns `spec.suspend`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from muster import errors
from muster.backends.kube import workloads
from muster.backends.kube.render import Json
from muster.backends.kube.workloads import Place
from muster.core.training import queueing
from muster.core.training.queueing import Admit, Finish, GiveBack, Queue, Withdraw
from muster.kube.client import Informer, KubeApi
from muster.ports import Clock, Filter, Store, Stored, Write
from muster.types.event import Event
from muster.types.training import QUEUE, Training, Uid

log = logging.getLogger("muster.kube")

PATH = f"/apis/{workloads.VERSION}"
OURS = {"labelSelector": "muster.dev/training-uid"}
LOOK_AGAIN_S = 1.0  # after something could not be done
ASK_AGAIN_S = 60.0  # whether there is a Kueue by now
LOOK_EVERY_S = 5.0
TOGETHER_S = 0.05  # what changes at once is looked at once


class Queues:
    """`pod` renders a worker's Pod of a training; `alive` says how many of its workers there are."""

    def __init__(
        self,
        api: KubeApi,
        store: Store,
        clock: Clock,
        *,
        pod: Callable[[Training], Json],
        alive: Callable[[Uid], int],
    ) -> None:
        self._api = api
        self._store = store
        self._clock = clock
        self._pod = pod
        self._alive = alive
        self._items: dict[str, Json] = {}  # by the uid of their training
        self._places: dict[tuple[str, ...], Place] = {}
        self._changed = asyncio.Event()
        self._informer = Informer(api, f"{PATH}/workloads", self, OURS)
        self._there = False

    def place(self, uid: Uid) -> Place | None:
        """What its Pods are to have beside their own; None if nobody said."""
        item = self._items.get(uid)
        return self._places.get(workloads.flavors(item)) if item is not None else None

    # What the informer tells

    def listed(self, items: Sequence[Json], version: str) -> None:
        self._items = {_uid(item): item for item in items}
        self.wake()

    def changed(self, kind: str, item: Json) -> None:
        if kind == "DELETED":
            self._items.pop(_uid(item), None)
        else:
            self._items[_uid(item)] = item
        self.wake()

    def reached(self, version: str) -> None:
        """Nothing depends on it."""

    # Looking

    def wake(self) -> None:
        self._changed.set()

    async def open(self) -> None:
        """Read what there is, if there is a Kueue: Pods that are started from now on have their places."""
        try:
            await self._informer.start()
            self._there = True
        except errors.NotFound:
            return
        except errors.Forbidden as error:
            log.warning("whether there is Kueue cannot be said: %s", error)
            return
        for item in list(self._items.values()):
            await self._learn(item)

    async def run(self) -> None:
        """For ever."""
        self._store.subscribe(lambda change: self.wake())
        following: asyncio.Task[None] | None = None
        try:
            while True:
                if self._there and following is None:
                    following = asyncio.create_task(self._informer.run())
                if await self._look():
                    await self._until_changed()
        finally:
            if following is not None:
                following.cancel()

    async def _until_changed(self) -> None:
        """Or until it is time to see whether the last workers of one that was evicted are gone."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._changed.wait(), LOOK_EVERY_S)
        await asyncio.sleep(TOGETHER_S)
        self._changed.clear()

    async def _look(self) -> bool:
        """False if it has to be tried again soon."""
        queued = [one for one in self._store.page(Filter()).items if QUEUE in one.labels]
        if queued and not self._there:
            await self.open()
            if not self._there:
                await asyncio.sleep(ASK_AGAIN_S)
                return False
        done = True
        for stored in queued:
            try:
                await self._settle(stored)
            except errors.MusterError as error:
                log.warning("%s: its queue cannot be served now: %s", stored.key, error)
                done = False
        if not done:
            await asyncio.sleep(LOOK_AGAIN_S)
        return done

    async def _settle(self, stored: Stored) -> None:
        training, item = stored.training, self._items.get(stored.uid)
        known = workloads.read(item) if item is not None else None
        match queueing.verdict(training, known, self._alive(stored.uid)):
            case Queue() if item is None:
                await self._queue(training)
            case Admit(target=target, spares=spares, why=why):
                assert item is not None
                await self._learn(item)
                await self._turn(stored, suspend=False, target=target, spares=spares, event=Event("Unqueued", why))
            case Withdraw(target=target, spares=spares, why=why):
                told = Event("Requeued", why, "Warning")
                await self._turn(stored, suspend=True, target=target, spares=spares, event=told)
            case GiveBack(why=why):
                assert item is not None
                given = workloads.with_condition(item, "QuotaReserved", False, "Pending", why, self._clock.now())
                if any(one.get("type") == "Admitted" for one in given["status"]["conditions"]):
                    given = workloads.with_condition(given, "Admitted", False, "NoReservation", why, self._clock.now())
                await self._write_status(given)
            case Finish(why=why):
                assert item is not None
                reason = "Succeeded" if training.status.phase == "succeeded" else "Failed"
                await self._write_status(
                    workloads.with_condition(item, "Finished", True, reason, why, self._clock.now())
                )

    async def _queue(self, training: Training) -> None:
        path = f"{PATH}/namespaces/{training.key.namespace}/workloads"
        body = workloads.workload(training, self._pod(training))
        try:
            self._items[training.uid] = await self._api.request("POST", path, body=body)
        except errors.AlreadyExists:
            self._items[training.uid] = await self._api.request("GET", f"{path}/{body['metadata']['name']}")

    async def _learn(self, item: Json) -> None:
        """Where its flavors are."""
        names = workloads.flavors(item)
        if names and names not in self._places:
            found = [await self._api.request("GET", f"{PATH}/resourceflavors/{name}") for name in names]
            self._places[names] = workloads.placed(found)

    async def _turn(self, stored: Stored, *, suspend: bool, target: int, spares: int, event: Event) -> None:
        training = stored.training
        size = replace(training.spec.world_size, target=target)
        spec = replace(training.spec, suspend=suspend, world_size=size, spares=spares)
        about = replace(training.metadata, generation=training.generation + 1)
        put = replace(training, metadata=about, spec=spec)
        await self._store.write(Write(put=put, expect=stored.version, events=(event,)))

    async def _write_status(self, item: Json) -> None:
        about = item["metadata"]
        path = f"{PATH}/namespaces/{about['namespace']}/workloads/{about['name']}/status"
        self._items[_uid(item)] = await self._api.request("PUT", path, body=item)


def _uid(item: Json) -> str:
    return str(item["metadata"].get("labels", {}).get("muster.dev/training-uid", ""))

"""When does code that was sent go again? With the last training that names it; what nobody named, after a while."""

from __future__ import annotations

import asyncio
import logging

from muster import errors
from muster.background import Tasks
from muster.core import packages as rules
from muster.ports import Clock, Filter, Packages, Store, StoreChange

log = logging.getLogger("muster.control")

LOOK_EVERY_S = 600.0


class PackageTidier:
    def __init__(self, store: Store, packages: Packages, clock: Clock) -> None:
        self._store = store
        self._packages = packages
        self._clock = clock
        self._tasks = Tasks()

    def start(self) -> None:
        self._store.subscribe(self._changed)
        self._tasks.start(self._keep_looking())

    async def stop(self) -> None:
        self._tasks.cancel()
        await self._tasks.finish()

    def _changed(self, change: StoreChange) -> None:
        if change.type == "DELETED" and rules.names_package(change.stored.raw):
            left = change.stored.training.spec.package
            self._tasks.start(self.look((change.stored.key.namespace, left) if left is not None else None))

    async def _keep_looking(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(LOOK_EVERY_S)

    async def look(self, left: tuple[str, str] | None = None) -> None:
        named = set()
        for stored in self._store.page(Filter()).items:
            if rules.names_package(stored.raw) and (digest := stored.training.spec.package) is not None:
                named.add((stored.key.namespace, digest))
        for one in rules.unused(self._packages.kept(), named, self._clock.now(), left):
            try:
                await self._packages.remove(one.namespace, one.digest)
            except errors.MusterError as error:
                log.warning("package %s… cannot be removed now: %s", one.digest[:19], error)

"""Where are those told who wait for a training's mesh: which keys are there, and which have to be?

Level-triggered: `want` says what has to be found, as often as anyone likes. One task per training makes it so and
tries again for as long as the keys cannot be reached; nothing else waits for that. A training whose keys may exist is
written down first, so that a control plane which comes back removes what is left of one that has ended.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping

from muster import errors
from muster.backoff import Backoff
from muster.core.keeping import MESH
from muster.ports import Keys, Record, Store, Write, insist
from muster.types.training import Key

log = logging.getLogger("muster.mesh")

KIND = MESH
RETRY = Backoff(0.1, 5.0)
AT_ONCE = 16


class Publisher:
    def __init__(self, store: Store, keys: Keys) -> None:
        self._store = store
        self._keys = keys
        self._wanted: dict[Key, Mapping[str, str]] = {}
        self._there: dict[Key, dict[str, str]] = {}  # as far as it is known
        self._tasks: dict[Key, asyncio.Task[None]] = {}

    def want(self, key: Key, wanted: Mapping[str, str]) -> None:
        """Name → value below the training's prefix; nothing else is to be found there."""
        idle = key not in self._tasks and key not in self._there
        if not wanted and idle and self._store.record(KIND, str(key)) is None:
            return
        self._wanted[key] = wanted
        if key not in self._tasks:
            self._tasks[key] = asyncio.get_running_loop().create_task(self._keep_at(key))

    def withdraw(self, key: Key) -> asyncio.Task[None] | None:
        """What says how an earlier round was must not be found any more; None when there is nothing of the kind."""
        self.want(key, {})
        return self._tasks.get(key)

    def clean_up(self, but: Collection[Key]) -> None:
        """Remove what a control plane before us left of trainings that are not among these."""
        for kept in self._store.records(KIND).values():
            key = Key(str(kept["namespace"]), str(kept["training"]))
            if key not in but:
                self.want(key, {})

    async def stop(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _keep_at(self, key: Key) -> None:
        try:
            await self._make_true(key)
        finally:
            del self._tasks[key]  # in one step with the last look: nothing wanted later is missed

    async def _make_true(self, key: Key) -> None:
        failures = 0
        while self._wanted.get(key) != self._there.get(key):
            try:
                await self._apply(key, self._wanted[key])
                failures = 0
            except errors.MusterError as error:
                self._there.pop(key, None)  # an order that was not answered may have been carried out
                if not failures:
                    log.warning("%s: its mesh cannot be made known, trying again: %s", key, error)
                failures += 1
                await asyncio.sleep(RETRY.after(failures))
            if not self._wanted[key] and not self._there.get(key, True):
                del self._wanted[key], self._there[key]
                await self._note(key, None)

    async def _apply(self, key: Key, wanted: Mapping[str, str]) -> None:
        """What must not be found goes first: who finds both believes the better news."""
        below = key.mesh_prefix
        if key not in self._there:
            await self._note(key, {"namespace": key.namespace, "training": key.name})
            found = await self._keys.list(below)
            self._there[key] = {path.removeprefix(f"{below}/"): value for path, value in found.items()}
        there = self._there[key]
        if not wanted:
            await self._keys.delete(below)
            there.clear()
        for name in [name for name in there if name not in wanted]:
            await self._keys.delete(f"{below}/{name}")
            del there[name]
        missing = [(name, value) for name, value in wanted.items() if there.get(name) != value]
        for at in range(0, len(missing), AT_ONCE):
            some = missing[at : at + AT_ONCE]
            puts = (self._keys.put(f"{below}/{name}", value) for name, value in some)
            for failure in await asyncio.gather(*puts, return_exceptions=True):
                if failure is not None:
                    raise failure
            there.update(some)

    async def _note(self, key: Key, value: Mapping[str, str] | None) -> None:
        await insist(self._store, Write(records=(Record(KIND, str(key), value),), lazy=True))

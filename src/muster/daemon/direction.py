"""What do the control plane and its coordinator tell each other? They run on two threads, each with a loop of its own.

The coordinator never waits for the control plane: it answers workers whatever the API, the store or the reconciling is
doing. What it has to tell is handed over and dealt with when there is time.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from muster.background import LoopThread, Tasks
from muster.control.loop import RUN_KIND, TOKEN_KIND
from muster.core.world import records
from muster.ports import Record, Store, Write, insist
from muster.types.frames import MetricsFrame, RunRecord
from muster.types.run_event import RunEvent
from muster.types.training import Uid
from muster.types.world import RunId
from muster.world.direct import DirectedWorlds
from muster.world.service import Coordinator

MOST_UNHEARD = 1_000  # messages about numbers that wait until there is time for them: more are dropped
LAST_WRITES_S = 3.0  # how long what is still to be written may hold up a stop


class Listens(Protocol):
    """The coordinator, as whoever tells it where to listen sees it."""

    async def start(self, host: str, port: int) -> tuple[str, int]: ...


class Hears(Protocol):
    """The control plane, as its coordinator speaks to it."""

    def run_changed(self, uid: Uid) -> None: ...

    def run_told(self, uid: Uid, event: RunEvent) -> None: ...

    def run_measured(self, uid: Uid, worker: str, told: MetricsFrame) -> None: ...

    def withdraw(self, uid: Uid) -> asyncio.Task[None] | None:
        """A round is about to start: remove what was told of the mesh of the one before. None if nothing was."""


class Direction:
    """Made where the control plane runs. It is the coordinator's director, and keeps its records in the store."""

    def __init__(self, store: Store, hears: Hears) -> None:
        self._store = store
        self._hears = hears
        self._here = asyncio.get_running_loop()
        self._thread = LoopThread("coordinator", preferred=True)
        self._changed: dict[RunId, None] = {}  # that the control plane has not been told of
        self._unheard = 0  # messages about numbers, of all runs
        self._writes = Tasks()
        self._coordinator = Coordinator(state=self, director=self, on_event=self._told, on_metrics=self._measured)
        self.worlds = DirectedWorlds(self._coordinator, self._thread)
        self._thread.start()

    async def start(self, host: str, port: int) -> tuple[str, int]:
        return await self._thread.run(self._coordinator.start(host, port))

    async def stop(self) -> None:
        await self._thread.run(self._coordinator.stop())
        await asyncio.to_thread(self._thread.stop)
        with contextlib.suppress(TimeoutError):  # a disk without room: members bring back what is not written
            async with asyncio.timeout(LAST_WRITES_S):
                await self._writes.finish()

    # What the coordinator says, on its thread

    def token_of(self, run_id: RunId) -> str | None:
        kept = self._store.record(TOKEN_KIND, run_id)
        return str(kept["token"]) if kept else None

    def settled(self, run_id: RunId) -> None:
        if run_id not in self._changed:
            self._changed[run_id] = None
            self._hand_over(self._tell_changed, run_id)

    def before_release(self, run_id: RunId) -> asyncio.Future[None]:
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._hand_over(self._withdraw, run_id, ready)
        return ready

    def _told(self, run_id: RunId, event: RunEvent) -> None:
        self._hand_over(self._hears.run_told, Uid(run_id), event)

    def _measured(self, run_id: RunId, worker: str, told: MetricsFrame) -> None:
        """A picture may lack points; the control plane's memory may not fill with them."""
        if self._unheard < MOST_UNHEARD:
            self._unheard += 1
            self._hand_over(self._hear_measured, Uid(run_id), worker, told)

    def records(self) -> Mapping[RunId, Mapping[str, Any]]:
        return {RunId(uid): dict(kept) for uid, kept in self._store.records(RUN_KIND).items()}

    def save(self, run_id: RunId, record: RunRecord) -> None:
        self._hand_over(self._write, Record(RUN_KIND, run_id, records.write(record)))

    def forget(self, run_id: RunId) -> None:
        self._hand_over(self._write, Record(RUN_KIND, run_id, None))

    def _hand_over(self, hear: Callable[..., None], *told: object) -> None:
        self._here.call_soon_threadsafe(hear, *told)

    # What follows from it, on the control plane's

    def _tell_changed(self, run_id: RunId) -> None:
        del self._changed[run_id]  # before it is looked at: what changes from now on is told again
        self._hears.run_changed(Uid(run_id))

    def _hear_measured(self, uid: Uid, worker: str, told: MetricsFrame) -> None:
        self._unheard -= 1
        self._hears.run_measured(uid, worker, told)

    def _withdraw(self, run_id: RunId, ready: asyncio.Future[None]) -> None:
        def let_go(_: object = None) -> None:
            self._thread.loop.call_soon_threadsafe(_set, ready)

        task = self._hears.withdraw(Uid(run_id))
        if task is None:
            let_go()
        else:
            task.add_done_callback(let_go)

    def _write(self, record: Record) -> None:
        self._writes.start(insist(self._store, Write(records=(record,), lazy=True)))


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)

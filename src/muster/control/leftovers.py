"""What is left of a training that somebody removed around us? Its workers, its run and its records are cleared up."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Iterable, Mapping

from muster import errors
from muster.background import Tasks
from muster.control.work_queue import RETRY, sentence
from muster.core import keeping
from muster.ports import Backend, Record, Store, Worlds, Write
from muster.types.training import Uid

log = logging.getLogger("muster.control")


def records(uid: Uid) -> tuple[Record, ...]:
    """What is kept beside a training goes with it."""
    return tuple(Record(kind, uid, None) for kind in (keeping.TOKEN, keeping.CURVES))


class Leftovers:
    def __init__(self, store: Store, backends: Mapping[str, Backend], worlds: Worlds, tasks: Tasks) -> None:
        self._store = store
        self._backends = backends
        self._worlds = worlds
        self._tasks = tasks

    def clear(self, uid: Uid) -> None:
        """Nothing is to do after our own removal."""
        left = [backend for backend in self._backends.values() if backend.workers(uid)]
        if left or self._worlds.look(uid) is not None or self._store.record(keeping.TOKEN, uid) is not None:
            self._worlds.close(uid)
            self._tasks.start(self._clear_up(uid, left))

    async def _clear_up(self, uid: Uid, backends: Iterable[Backend]) -> None:
        for attempt in itertools.count(1):
            try:
                if await self._cleared(uid, backends):
                    return
            except errors.MusterError as error:
                log.warning("what is left of %s cannot be cleared up, trying again: %s", uid, sentence(error))
            await asyncio.sleep(RETRY.after(attempt))

    async def _cleared(self, uid: Uid, backends: Iterable[Backend]) -> bool:
        """End its workers; once they are gone, forget them."""
        for backend in backends:
            for worker in backend.workers(uid):
                if worker.alive:
                    await backend.stop(uid, worker.name, why="its training is gone", kill=True)
            if any(worker.alive for worker in backend.workers(uid)):
                return False
            await backend.forget(uid)
        await self._store.write(Write(records=records(uid), lazy=True))
        return True

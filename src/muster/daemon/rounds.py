"""Which rounds of which trainings are over, so that nothing of them is left that could use a GPU?

Pools ask this for pipelines that say that they run as ranks of a training. In doubt the answer is that they may live.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from muster.control.loop import TOKEN_KIND
from muster.core.world import closing
from muster.ports import Backend, Filter, Store, Stored, Worlds
from muster.types.training import TERMINAL, Key, Uid


class TrainingRounds:
    def __init__(
        self, store: Store, worlds: Worlds, backends: Mapping[str, Backend], key_of: Callable[[Uid], Key | None]
    ) -> None:
        self._store = store
        self._worlds = worlds
        self._backends = backends
        self._key_of = key_of

    def knows(self, training: str) -> bool:
        """Whether workers were ever started for a training of that uid, and it has not been removed."""
        return self._store.record(TOKEN_KIND, training) is not None

    def over(self, training: str, number: int) -> str:
        """The round is followed by another or called back, and all its members are gone; or so are all workers.

        It says no more than that: those who look at a pool may have no right to look at the training.
        """
        uid = Uid(training)
        run = self._worlds.look(uid)
        if run is not None and closing.over(run.run, number, asyncio.get_running_loop().time()):
            return f"round {number} of its training is over"
        if any(worker.alive for backend in self._backends.values() for worker in backend.workers(uid)):
            return ""
        stored = self._stored(uid)
        if stored is None:
            return "its training is gone"
        return "its training has ended" if stored.phase in TERMINAL else ""

    def _stored(self, uid: Uid) -> Stored | None:
        key = self._key_of(uid)
        known = None if key is None else self._store.get(key)
        if known is not None and known.uid == uid:
            return known
        return next((one for one in self._store.page(Filter()).items if one.uid == uid), None)

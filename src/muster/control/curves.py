"""What is known of how each training learns, and what its workers use? What counts as a point is `core.curves`'s.

Workers tell what ranks logged; steps, speed and the size of the world are looked at here, every few seconds. Curves are
held in memory while a training lives and written down now and then, within a budget of bytes: what was not written yet
when this process is killed, workers tell again. What workers use is of the moment, and is not written down.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Mapping

from muster import errors
from muster.background import Tasks
from muster.core import keeping
from muster.core.curves import MOST_OF_ALL, Curve, KeptCurves, Point, TrainingCurves, WorkerReading
from muster.ports import Clock, Filter, Record, RunView, Store, StoreChange, Worlds, Write
from muster.types.codec import Invalid, from_wire, to_wire
from muster.types.frames import MetricsFrame
from muster.types.training import TERMINAL, Uid

log = logging.getLogger("muster.control")

LOOK_S = 2.0
LOOKS_PER_S = 1_000  # of trainings: of very many each is looked at less often
CHUNK = 200  # trainings that are looked at before others get a turn
WRITE_EVERY_S = 10.0
BYTES_PER_S = 1 << 20  # that are written, over all trainings
POINTS_IN_MEMORY = 500_000  # over all trainings that live
LEAST_ROOM = 150  # points of one of them
MOST_BYTES_KEPT = 64 << 20  # of those that have ended: then those go that ended first in the namespace that has most
LAST_WRITES_S = 3.0  # how long that may hold up a stop
SILENT_S = 60.0  # a worker that has said nothing of what it uses for so long is not shown
MOST_WORKERS = 20_000  # of one training that are shown
OLDEST_S = 7 * 86_400.0  # of a number that is told


class CurveKeeper:
    def __init__(self, store: Store, worlds: Worlds, clock: Clock, *, bytes_per_s: float = BYTES_PER_S) -> None:
        self._store = store
        self._worlds = worlds
        self._clock = clock
        self._bytes_per_s = bytes_per_s
        self._live: dict[Uid, None] = {}
        self._ended: dict[Uid, str] = {}  # that are still stored, with their namespaces
        self._held: dict[Uid, TrainingCurves] = {}
        self._workers: dict[Uid, dict[str, WorkerReading]] = {}
        self._unwritten: dict[Uid, None] = {}
        self._one_ended = asyncio.Event()
        self._kept_bytes: dict[Uid, int] = {}  # of those that have ended, in that order
        self._tasks = Tasks()

    # Life

    def start(self) -> None:
        self._store.subscribe(self._changed)
        for stored in self._store.page(Filter()).items:
            if stored.phase in TERMINAL:
                self._ended[stored.uid] = stored.key.namespace
            else:
                self._live[stored.uid] = None
        kept = self._store.records(keeping.CURVES)
        for uid in sorted(kept.keys() & self._ended.keys(), key=lambda uid: _written_at(kept[uid])):
            self._kept_bytes[Uid(uid)] = _size(kept[uid])
        self._tasks.start(self._keep_looking())
        self._tasks.start(self._keep_writing(orphans=[uid for uid in kept if not self._knows(Uid(uid))]))

    async def stop(self) -> None:
        """Write down what is not yet, if it can be written now."""
        self._tasks.cancel()
        await self._tasks.finish()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAST_WRITES_S):
                for uid in list(self._unwritten):
                    await self._write(uid)

    def _changed(self, change: StoreChange) -> None:
        uid = change.stored.uid
        if change.type == "DELETED":
            for known in (self._live, self._ended, self._held, self._workers, self._unwritten, self._kept_bytes):
                known.pop(uid, None)
        elif change.stored.phase not in TERMINAL:
            self._live[uid] = None
        elif uid not in self._ended:
            self._live.pop(uid, None)
            self._workers.pop(uid, None)
            self._ended[uid] = change.stored.key.namespace
            steps = [rank.step for rank in change.stored.training.status.ranks if rank.step is not None]
            if uid in self._held or steps:
                self._of(uid).ended(steps[0] if steps else None, self._now())
                self._unwritten[uid] = None
                self._one_ended.set()

    def _knows(self, uid: Uid) -> bool:
        return uid in self._live or uid in self._ended

    def _now(self) -> float:
        return self._clock.now().timestamp()

    # What is told

    def measured(self, uid: Uid, worker: str, told: MetricsFrame) -> None:
        """A worker says what its rank logged, and what it uses."""
        if not self._knows(uid):
            return
        now = self._now()
        if told.use is not None and uid in self._live:
            readings = self._workers.setdefault(uid, {})
            if worker in readings or len(readings) < MOST_WORKERS:
                readings.setdefault(worker, WorkerReading()).take(told.use, now, len(readings))
        if not told.points or told.round is None:
            return
        curves = self._of(uid)
        for one in told.points:
            if 0 <= one.name < len(told.names):
                at = now - min(max(0.0, one.age_s), OLDEST_S)
                point = None if one.value is None else Point(one.step, at, one.value)
                curves.log(told.round, one.seq, told.names[one.name], point)
        self._unwritten[uid] = None

    # What is looked at

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(max(LOOK_S, len(self._live) / LOOKS_PER_S))
            await self.look()

    async def look(self) -> None:
        """How far every training that lives has got, and with how many workers."""
        for count, uid in enumerate([*self._live], 1):
            view = self._worlds.look(uid) if uid in self._live else None
            if view is not None and view.run.recovery_until is None:
                self._look_at(uid, view)
            self._drop_silent(uid)
            if count % CHUNK == 0:
                await asyncio.sleep(0)

    def _look_at(self, uid: Uid, view: RunView) -> None:
        current, now = view.run.running, self._now()
        if current is None and uid not in self._held:
            return
        curves = self._of(uid)
        changed = curves.sized(len(current.up) if current is not None else 0, now)
        if current is not None and current.progress:
            rank = min(current.progress)
            mark = current.progress[rank]
            changed |= curves.reached(current.number, rank, mark.step, mark.at, now)
        if changed:
            self._unwritten[uid] = None

    def _drop_silent(self, uid: Uid) -> None:
        readings, since = self._workers.get(uid, {}), self._now() - SILENT_S
        for name in [name for name, one in readings.items() if one.at < since]:
            del readings[name]

    # What is asked

    def curves(self, uid: Uid) -> Mapping[str, Curve]:
        held = self._held.get(uid) or self._restored(uid)
        return held.curves if held is not None else {}

    def workers(self, uid: Uid) -> Mapping[str, WorkerReading]:
        return self._workers.get(uid, {})

    def _of(self, uid: Uid) -> TrainingCurves:
        if uid not in self._held:
            self._held[uid] = self._restored(uid) or TrainingCurves()
        room = POINTS_IN_MEMORY // max(1, len(self._held))
        self._held[uid].make_room(min(MOST_OF_ALL, max(LEAST_ROOM, room)))
        return self._held[uid]

    def _restored(self, uid: Uid) -> TrainingCurves | None:
        kept = self._store.record(keeping.CURVES, uid)
        if kept is None:
            return None
        try:
            return TrainingCurves.restored(from_wire(KeptCurves, dict(kept), strict=False))
        except Invalid as error:
            log.warning("the curves of %s cannot be read: %s", uid, error)
            return None

    # What is written

    async def _keep_writing(self, orphans: list[str]) -> None:
        for uid in orphans:  # of trainings that disappeared while nobody looked
            await self._put(Record(keeping.CURVES, uid, None))
        loop = asyncio.get_running_loop()
        due = loop.time() + WRITE_EVERY_S
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(due):
                    await self._one_ended.wait()
            # Of one whose workers are gone: nobody would tell them again. Others have their turn, however many end.
            last_words = self._one_ended.is_set() and loop.time() < due
            self._one_ended.clear()
            if not last_words:
                due = loop.time() + WRITE_EVERY_S
            for uid in [uid for uid in self._unwritten if not last_words or uid in self._ended]:
                if self._store.trouble is None:
                    await asyncio.sleep(await self._write(uid) / self._bytes_per_s)

    async def _write(self, uid: Uid) -> int:
        """Its size in bytes, as far as it was written."""
        held = self._held.get(uid)
        if uid not in self._unwritten or held is None:
            return 0
        del self._unwritten[uid]
        ended = uid in self._ended
        value = to_wire(held.kept(self._now(), ended=ended))
        if not await self._put(Record(keeping.CURVES, uid, value)):
            if self._knows(uid):
                self._unwritten.setdefault(uid, None)
            return 0
        if ended and uid not in self._unwritten and uid in self._ended:
            self._held.pop(uid, None)
            self._kept_bytes[uid] = _size(value)
            await self._make_room()
        return _size(value)

    async def _make_room(self) -> None:
        """For the namespace that has most, at its own cost: nobody drives out what others have."""
        while sum(self._kept_bytes.values()) > MOST_BYTES_KEPT and len(self._kept_bytes) > 1:
            taken = Counter[str]()
            for uid, size in self._kept_bytes.items():
                taken[self._ended[uid]] += size
            [(most, _)] = taken.most_common(1)
            eldest = next(uid for uid in self._kept_bytes if self._ended[uid] == most)
            del self._kept_bytes[eldest]
            await self._put(Record(keeping.CURVES, eldest, None))

    async def _put(self, record: Record) -> bool:
        try:
            await self._store.write(Write(records=(record,), lazy=True))
            return True
        except errors.MusterError as error:
            log.warning("the curves of %s cannot be written: %s", record.key, error)
            return False


def _written_at(kept: Mapping[str, object]) -> float:
    at = kept.get("at")
    return float(at) if isinstance(at, int | float) else 0.0


def _size(kept: Mapping[str, object]) -> int:
    curves = kept.get("curves")
    return sum(len(str(one)) for one in curves.values()) if isinstance(curves, Mapping) else 0

"""What makes a training due for a look, and what becomes of the plan? Decisions are `core.training.reconcile`'s."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from muster import errors
from muster.background import Tasks
from muster.control import leftovers
from muster.control.leftovers import Leftovers
from muster.control.observe import Observer
from muster.control.pool_claims import PoolClaims
from muster.control.publish import Publisher
from muster.control.work_queue import WorkQueue
from muster.core import keeping
from muster.core.training import lifecycle, present, reconcile
from muster.core.training.admission import backend_of
from muster.core.training.edits import marks
from muster.core.training.hiding import Hiding
from muster.core.training.reconcile import Plan
from muster.ports import Backend, Clock, Filter, Record, Store, StoreChange, Stored, Worlds, Write, insist
from muster.sharing.trainings import Trainings
from muster.types.codec import to_wire
from muster.types.event import Event
from muster.types.state import KeptState
from muster.types.training import SUSPENDED, TERMINAL, Key, Status, Training, Uid
from muster.types.worker import Worker

log = logging.getLogger("muster.control")

STEP_WRITES_PER_S = 200.0  # steps alone are written at most this often, over all trainings
ALIVE_EVERY_S = 5.0  # how exactly the end of a worker is known that died while nobody looked
SCAN_CHUNK = 200  # ended trainings that are looked at before others get a turn, at the start
TOKEN_KIND = keeping.TOKEN
ALIVE_KIND, ALIVE_KEY = keeping.CONTROL, "alive"
RUN_KIND = keeping.RUN
_EVERYTHING = Filter()


class Loop:
    def __init__(
        self,
        store: Store,
        backends: Mapping[str, Backend],
        worlds: Worlds,
        clock: Clock,
        *,
        publisher: Publisher | None = None,
        delay_s: float = 0.0,
        step_writes_per_s: float = STEP_WRITES_PER_S,
        alive_every_s: float | None = ALIVE_EVERY_S,
        most_starts: Mapping[str, int] | None = None,
    ) -> None:
        """`delay_s` holds every look back by that long: it shows that no wait believes an old status.

        `alive_every_s`: how often word is left of what time it is; None for never. `most_starts`: how many workers may
        start at once, by backend.
        """
        self._store = store
        self._backends = backends
        self._worlds = worlds
        self._clock = clock
        self._alive_every_s = alive_every_s
        self._step_writes_per_s = step_writes_per_s
        self._observer = Observer(backends, worlds, clock, self._marks, most_starts=most_starts)
        self._publisher = publisher
        self._queue = WorkQueue(self._look, self._failed, delay_s=delay_s)
        self._steps_at: dict[Key, datetime] = {}
        self._unwritten: list[Event] = []
        self._tasks = Tasks()
        self._leftovers = Leftovers(store, backends, worlds, self._tasks)
        self.handled = 0

    # Life

    def start(self) -> None:
        """Look at everything that lives, then at what has ended: it may be due for removal."""
        self._store.subscribe(self._changed)
        ended, uids = [], set()
        for stored in self._store.page(_EVERYTHING).items:
            uids.add(stored.uid)
            if lifecycle.NEXT[stored.phase]:
                self._observer.know(stored.training)
                self.wake(stored.key)
            else:
                ended.append(stored.key)
        if self._publisher is not None:
            self._publisher.clean_up(but=self._observer.known())
        self._tasks.start(self._scan(ended))
        for uid in self._store.records(TOKEN_KIND).keys() - uids:
            self._leftovers.clear(Uid(uid))  # it disappeared while nobody looked
        if self._alive_every_s is not None:
            self._tasks.start(self._stay_alive(self._alive_every_s))

    async def stop(self) -> None:
        """Finish what is being written; workers go on."""
        await self._queue.stop()
        self._tasks.cancel()
        await self._tasks.finish()
        if self._publisher is not None:
            await self._publisher.stop()
        self._write_events()

    async def idle(self) -> None:
        """Until nothing is due and nothing is being handled."""
        await self._queue.idle()

    async def _scan(self, keys: list[Key]) -> None:
        for at in range(0, len(keys), SCAN_CHUNK):
            for key in keys[at : at + SCAN_CHUNK]:
                stored = self._store.get(key)
                if stored is not None and _needs_a_look(stored.training, self._store):
                    self._observer.know(stored.training)
                    self.wake(key)
            await asyncio.sleep(0)

    async def _stay_alive(self, every_s: float) -> None:
        """Leave word of when this process was last alive, for whoever starts after it."""
        while True:
            kept = Record(ALIVE_KIND, ALIVE_KEY, to_wire(self._clock.mark()))
            try:
                await self._store.write(Write(records=(kept,), lazy=True))
            except errors.Unavailable as error:
                log.warning("cannot tell that it lives: %s", error)
            await asyncio.sleep(every_s)

    # What makes a training due

    def wake(self, key: Key) -> None:
        self._queue.wake(key)

    def run_changed(self, uid: Uid) -> None:
        """The coordinator has something new about a training's world."""
        if (key := self._observer.key_of(uid)) is not None:
            self.wake(key)

    def use_pool(self, name: str, pool: Trainings, *, counted: bool = False) -> None:
        """The GPUs of that backend are given by a pool, or only `counted` there. To be told before the start."""
        backend = self._backends[name]
        claims = PoolClaims(pool, backend, self._worlds, self._clock, self.note, self._look_again, counted=counted)
        live = [one.training for one in self._store.page(_EVERYTHING).items if one.phase not in TERMINAL]
        self._observer.use_pool(name, claims, live)
        pool.heard_by(lambda uid: self.run_changed(Uid(uid)))

    def workers(self, uid: Uid, backend: str) -> Sequence[Worker]:
        """A training's workers, with the GPUs of a pool that are theirs."""
        return self._observer.workers(uid, backend)

    def _look_again(self, uid: Uid, after_s: float) -> None:
        async def later() -> None:
            await asyncio.sleep(after_s)
            self.workers_changed(uid)

        self._tasks.start(later())

    def key_of(self, uid: Uid) -> Key | None:
        """Of a training that was looked at."""
        return self._observer.key_of(uid)

    def withdraw(self, uid: Uid) -> asyncio.Task[None] | None:
        """A round of that training is about to start: remove what was told of the one before. None if nothing was."""
        key = self._observer.key_of(uid)
        return self._publisher.withdraw(key) if self._publisher is not None and key is not None else None

    def workers_changed(self, uid: Uid) -> None:
        """A worker came or went."""
        self._observer.workers_changed(uid)
        self.run_changed(uid)

    def note(self, uid: Uid, event: Event) -> None:
        """Something that happened to a training, for the journal."""
        key = self._observer.key_of(uid)
        if key is None:
            return
        if not self._unwritten:
            asyncio.get_running_loop().call_soon(self._write_events)
        told = replace(event, namespace=key.namespace, training=key.name, uid=uid, at=self._clock.now())
        stored = self._store.get(key)
        self._unwritten.append(told if stored is None else Hiding(stored.training.spec).event(told))

    def _write_events(self) -> None:
        events, self._unwritten = self._unwritten, []
        if events:
            self._tasks.start(self._journal(events))

    async def _journal(self, events: Iterable[Event]) -> None:
        await insist(self._store, Write(events=tuple(events), lazy=True))

    def _changed(self, change: StoreChange) -> None:
        if change.type == "DELETED":
            self._observer.forget(change.stored.training)
            self._queue.forget(change.stored.key)
            self._leftovers.clear(change.stored.uid)
        else:
            self._observer.know(change.stored.training)
        self.wake(change.stored.key)

    # Handling

    def _failed(self, key: Key, why: str) -> None:
        if (stored := self._store.get(key)) is not None:
            self.note(stored.uid, Event("ReconcileFailed", f"{why}; trying again", "Warning"))

    async def _look(self, key: Key) -> None:
        stored = self._store.get(key)
        if stored is None:
            return
        self.handled += 1
        now = self._clock.steady()
        training = stored.training
        plan = reconcile.reconcile(training, self._observer.look(training), now)
        if self._publisher is not None and training.spec.mesh.required:
            # Before anything is waited for: what is true now may not be later.
            self._publisher.want(key, plan.mesh)
        await self._carry_out(stored, plan)
        # After these there is another object, or none.
        replaced = any(isinstance(action, reconcile.Remove | reconcile.Suspend) for action in plan.actions)
        if not replaced:
            await self._write_status(stored, plan, now)
            if plan.wake_at is not None:
                self._queue.wake_in(key, (plan.wake_at - self._clock.steady()).total_seconds())
        if (following := self._observer.next_to_start()) is not None and following != key:
            self.wake(following)

    async def _carry_out(self, stored: Stored, plan: Plan) -> None:
        training = stored.training
        starts: list[reconcile.StartWorker] = []
        for action in plan.actions:
            match action:
                case reconcile.OpenRun(settings=settings, target=target, lent=lent):
                    view = self._worlds.look(training.uid)
                    if view is not None and view.run.lent.keys() - lent.keys():
                        await self._observer.written()  # who has its GPUs back uses them at once
                    self._worlds.open(training.uid, settings, target, lent)
                case reconcile.EndRun(state=state, reason=reason, message=message):
                    self._worlds.end(training.uid, state, reason, message)
                case reconcile.Confirm(outcome=outcome):
                    self._worlds.confirm(training.uid, reconcile.world_outcome(outcome))
                case reconcile.MarkDead(names=names):
                    self._worlds.mark_dead(training.uid, names)
                case reconcile.Place(spots=spots):
                    self._worlds.place(training.uid, spots)
                case reconcile.LetGo():
                    self._worlds.let_go(training.uid)
                case reconcile.CloseRun():
                    self._worlds.close(training.uid)
                case reconcile.StartWorker():
                    starts.append(action)
                case reconcile.StopWorker(name=name, why=why, kill=kill):
                    await self._backend(training).stop(training.uid, name, why=why, kill=kill)
                case reconcile.Suspend(why=why):
                    await self._suspend(stored, why)
                case reconcile.Remove(why=why):
                    await self._remove(stored, why)
        if starts:
            await self._start_workers(training, starts)

    def _backend(self, training: Training) -> Backend:
        return self._backends[backend_of(training.spec, self._backends)]

    async def _start_workers(self, training: Training, starts: list[reconcile.StartWorker]) -> None:
        backend, each = self._backend(training), training.spec.resources.gpus
        token = await self._token(training)
        await self._observer.written()
        begun = []
        for one in starts:
            gpus = tuple(range(each)) if one.gpus is None else one.gpus
            begun.append(asyncio.ensure_future(backend.start(training, one.name, gpus, token)))
        # All are waited for: one that is still under way must not be begun again because another one failed.
        for done in await asyncio.gather(*begun, return_exceptions=True):
            if isinstance(done, BaseException):
                raise done

    async def _token(self, training: Training) -> str:
        """The secret that this training's workers prove to the coordinator; the same after a restart."""
        if (kept := self._store.record(TOKEN_KIND, training.uid)) is not None:
            return str(kept["token"])
        token = secrets.token_urlsafe(24)
        kept = {"token": token, "marks": marks(training.spec)}
        await self._store.write(Write(records=(Record(TOKEN_KIND, training.uid, kept),), lazy=True))
        return token

    def _marks(self, uid: Uid) -> Mapping[str, str]:
        kept = self._store.record(TOKEN_KIND, uid) or {}
        found: Mapping[str, str] = kept.get("marks") or {}
        return found

    async def _suspend(self, stored: Stored, why: str) -> None:
        training = stored.training
        about = replace(training.metadata, generation=training.generation + 1)
        put = replace(training, metadata=about, spec=replace(training.spec, suspend=True))
        await self._store.write(Write(put=put, expect=stored.version, events=(Event(SUSPENDED, why),)))

    async def _remove(self, stored: Stored, why: str) -> None:
        training = stored.training
        self._worlds.close(training.uid)
        if (backend := self._backends.get(backend_of(training.spec, self._backends))) is not None:
            await backend.forget(training.uid)
        gone = Event("Deleted", why)
        left = leftovers.records(training.uid)
        await self._store.write(Write(delete=stored.key, expect=stored.version, events=(gone,), records=left))

    async def _write_status(self, stored: Stored, plan: Plan, now: datetime) -> None:
        training, hiding = stored.training, Hiding(stored.training.spec)
        status, events = hiding.status(plan.status), tuple(map(hiding.event, plan.events))
        if status == training.status and not events:
            return
        if broken := lifecycle.broken_rules(training.status, status):
            raise errors.InternalError(f"{stored.key}: {'; '.join(broken)}")
        only_steps = not events and _steady(status) == _steady(training.status)
        # After a restart nobody knows when they were written last: they count from the first look.
        too_soon = now < self._steps_at.setdefault(stored.key, now) + self._step_interval()
        if only_steps and (too_soon or self._store.trouble is not None):
            return
        self._steps_at[stored.key] = now
        put = replace(training, status=status)
        await self._store.write(Write(put=put, expect=stored.version, events=events, lazy=only_steps))

    def _step_interval(self) -> timedelta:
        return max(reconcile.STEP_REFRESH, timedelta(seconds=self._observer.live / self._step_writes_per_s))


def _steady(status: Status) -> Status:
    """What does not change with every step."""
    kept = status.kept_state
    if kept is not None:
        kept = KeptState(resumed=kept.resumed, refused=kept.refused, lost=kept.lost)
    ranks = tuple(replace(rank, step=None) for rank in status.ranks)
    return replace(status, ranks=ranks, workers=present.steady(status.workers), kept_state=kept)


def _needs_a_look(training: Training, store: Store) -> bool:
    """An ended training about which something is left to do."""
    return (
        training.metadata.deletion_timestamp is not None
        or training.spec.ttl_seconds_after_finished is not None
        or training.generation > training.status.observed_generation
        or store.record(RUN_KIND, training.uid) is not None
    )

"""What do trainings want of a pool, and what may they use of it? Between the control loop and the pool's planner.

Whoever looks at a training asks here. On the way the pool is told where its workers are, and which GPUs nothing of
theirs is left on: both are looked up each time, so that nothing is lost with this process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from muster.core.training import metering, places
from muster.core.training.admission import Grant
from muster.core.world import lending
from muster.core.world.run import Run
from muster.ports import Backend, Clock, Worlds
from muster.sharing.trainings import Trainings
from muster.types.event import WORKER_BACK, WORKER_LENT, Event
from muster.types.sharing import Crew, gpus_of, mask_of
from muster.types.training import Training, Uid, problems_of
from muster.types.worker import Worker
from muster.types.world import Role

CLEARED = timedelta(seconds=10)  # how long a process of a worker that has ended may be waited for
OVERDUE_S = 10.0  # beyond the grace, for ranks to leave GPUs that somebody else gets
SOON_AFTER_S = 0.05
Note = Callable[[Uid, Event], None]
Again = Callable[[Uid, float], None]


@dataclass
class _Known:
    """What was seen of a training at the last look."""

    parked: frozenset[str] | None = None  # None: not looked at since this process began
    held: frozenset[int] = frozenset()
    waiting: frozenset[int] = frozenset()  # masks of GPUs that its workers waited for
    grew_at: float | None = None  # when it got GPUs on which it does not train yet
    grew_in: int | None = None  # the round that was out then


@dataclass
class _Where:
    """Where its workers are."""

    using: int = 0
    ready: int = 0
    resting: int = 0
    parked: dict[str, int] = field(default_factory=dict)  # worker → mask of GPUs that it waits for
    vacated: int = 0


class PoolClaims:
    def __init__(
        self,
        pool: Trainings,
        backend: Backend,
        worlds: Worlds,
        clock: Clock,
        note: Note,
        again: Again,
        *,
        counted: bool = False,
    ) -> None:
        """`again` is to have a training looked at, so many seconds later. `counted`: the platform gives workers their
        devices, and takes them back with the worker alone; the pool's numbers only say how many there are."""
        self._counted = counted
        self._places: dict[Uid, dict[str, int]] = {}  # where they are counted: worker → mask
        self._pool, self._backend, self._worlds, self._clock, self._note = pool, backend, worlds, clock, note
        self._again = again
        self._awaited: set[tuple[Uid, str]] = set()  # what is to be over at some time, and will then be looked at
        self._known: dict[Uid, _Known] = {}

    def begin(self, live: Sequence[Training]) -> list[Uid]:
        """After a restart: what workers have that run is theirs, whatever the journal says; who is gone has nothing.

        Returns those that have ended, and of whose workers something may still run."""
        for training in live:
            self.know(training)
            there = self._pool.masks(training.uid)
            found = [mask_of(one.gpus) for one in self._there(training.uid)]
            if self._counted:
                found = self._unplaced(training)
            self._pool.adopt(training.uid, [mask for mask in found if mask not in there])
            self.know(training)  # what it has now is in use
        uids = {training.uid for training in live}
        ended = [Uid(uid) for uid in self._pool.known() if uid not in uids]
        return [uid for uid in ended if not self.forget(uid)]

    def know(self, training: Training) -> None:
        """It wants GPUs, or other ones than before; or none for now."""
        where = self._where(training)
        self._known.setdefault(training.uid, _Known())
        if where.vacated:
            self._pool.left(training.uid, where.vacated)
        self._pool.declare(self._crew(training, where))

    def forget(self, uid: Uid) -> bool:
        """It wants none any more; says whether it has none. What its workers still have is theirs until they are gone,
        and what they started with them."""
        if there := self._there(uid):
            self._pool.ends(uid, mask_of(gpu for worker in there for gpu in worker.gpus))
            return False
        self._known.pop(uid, None)
        self._places.pop(uid, None)
        self._awaited = {one for one in self._awaited if one[0] != uid}
        self._pool.withdraw(uid)
        return True

    async def written(self) -> None:
        await self._pool.written()

    # Looking

    def workers(self, uid: Uid) -> list[Worker]:
        """Its workers, each with the GPUs of the pool that it has."""
        found = list(self._backend.workers(uid))
        if not self._counted or not any(one.gpus for one in found):
            return found
        now, view = self._clock.steady(), self._worlds.look(uid)
        there = [one.name for one in found if one.gpus and _is_there(one, now)]
        lent = view.run.lent if view is not None else {}
        held, leaving = self._pool.held(uid), self._pool.leaving(uid)
        self._places[uid] = mine = places.assigned(self._places.get(uid, {}), there, held, leaving, lent)
        return [replace(one, gpus=tuple(gpus_of(mine.get(one.name, 0)))) for one in found]

    def _unplaced(self, training: Training) -> list[int]:
        """Free places for workers that run, and for whom the journal has none."""
        free, each = list(self._pool.free()), training.spec.resources.gpus
        now = self._clock.steady()
        there = sum(bool(one.gpus) and _is_there(one, now) for one in self._backend.workers(training.uid))
        missing = there - len(self._pool.masks(training.uid))
        return [mask_of(free[at * each : (at + 1) * each]) for at in range(min(missing, len(free) // each))]

    def grant(self, training: Training) -> Grant:
        uid, where = training.uid, self._where(training)
        why = {mask: lease.reason for mask, lease in self._pool.leaving(uid).items()}
        if where.vacated:
            self._pool.left(uid, where.vacated)
        self._pool.declare(self._crew(training, where))
        before = set(self._pool.held(uid))
        standing = self._pool.settled(uid)
        held = self._pool.held(uid)
        if not before.issuperset(held):  # what it is told of now it may use at once
            self._pool.declare(self._crew(training, self._where(training)))
        self._account(training, where, held, why)
        lent = {name: self._why(uid, mask) for name, mask in where.parked.items() if mask not in held}
        leaving = self._pool.leaving(uid)
        workers = self.workers(uid)
        for worker in workers:
            if worker.alive and worker.gpus and mask_of(worker.gpus) in leaving:
                lent[worker.name] = leaving[mask_of(worker.gpus)].reason
        grace = training.spec.stop_grace_seconds + OVERDUE_S
        late = {mask for mask, one in leaving.items() if self._pool.age_of(one) > grace}
        for mask, one in leaving.items():
            if mask not in late:
                self._await(uid, f"{mask} since {one.since}", grace - self._pool.age_of(one))
        room = max(0, _most(training) - len(held))
        return Grant(
            workers=len(held),
            admitted=standing.admitted,
            reason=standing.reason,
            message=standing.message,
            places=tuple(tuple(gpus_of(mask)) for mask in held),
            lent=lent,
            overdue=tuple(one.name for one in workers if one.alive and mask_of(one.gpus) in late),
            surplus=self._done_with(uid, lent) if self._counted else tuple(sorted(lent.keys() & where.parked)[room:]),
        )

    def _where(self, training: Training) -> _Where:
        uid, found = training.uid, _Where()
        view = self._worlds.look(uid)
        run = view.run if view is not None else None
        held, leaving = set(self._pool.held(uid)), self._pool.leaving(uid)
        for worker in self._there(uid):
            mask = mask_of(worker.gpus)
            if mask in held:
                found.using |= mask
                role = _role(run, worker.name)
                found.ready |= mask if role is not None else 0
                found.resting |= mask if role is Role.SPARE else 0
            elif self._counted:
                found.using |= mask  # what it was given is its own until it is gone
            elif worker.alive and lending.vacated(run, worker.name, self._clock.monotonic()):
                found.parked[worker.name] = mask
            elif mask in leaving:
                found.using |= mask
            elif worker.alive:
                found.parked[worker.name] = mask  # nobody has said yet that it may have no rank: that follows now
        found.using |= _to_be_used(training, held, found.using)
        found.vacated = mask_of(gpu for mask in leaving for gpu in gpus_of(mask)) & ~found.using
        return found

    def _there(self, uid: Uid) -> list[Worker]:
        """Workers of which something may use GPUs. One that has ended is looked at again when that is long enough."""
        now, found = self._clock.steady(), []
        for worker in self.workers(uid):
            if not worker.gpus or not _is_there(worker, now):
                continue
            found.append(worker)
            if worker.ended_at is not None:
                self._await(uid, worker.name, (worker.ended_at + CLEARED - now).total_seconds())
        return found

    def _done_with(self, uid: Uid, lent: Mapping[str, str]) -> tuple[str, ...]:
        """Workers that have to go, and may: the others train without them, and need nothing that they have."""
        view, now = self._worlds.look(uid), self._clock.monotonic()
        run = view.run if view is not None else None
        return tuple(name for name in sorted(lent) if run is not None and lending.dispensable(run, name, now))

    def _await(self, uid: Uid, what: str, left_s: float) -> None:
        """Have it looked at when that time is over, if nothing happens before: once for each."""
        if (uid, what) not in self._awaited:
            self._awaited.add((uid, what))
            self._again(uid, left_s + SOON_AFTER_S)

    def _crew(self, training: Training, where: _Where) -> Crew:
        """What a training asks for; one that is to end, or that nothing follows from, asks for nothing more."""
        spec, created = training.spec, training.metadata.creation_timestamp
        assert created is not None
        ends = _ends(training)
        return Crew(
            training=training.uid,
            name=str(training.key),
            gpus_each=spec.resources.gpus,
            min=0 if ends else spec.world_size.min,
            wanted=0 if ends else spec.world_size.target + spec.spares,
            most=0 if ends else _most(training),
            elasticity=spec.elasticity,
            priority=spec.priority,
            created=created.timestamp(),
            admitted=training.status.holds("Admitted"),
            using=where.using,
            ready=where.ready,
            resting=where.resting,
            parked=mask_of(gpu for mask in where.parked.values() for gpu in gpus_of(mask)),
        )

    def _why(self, uid: Uid, mask: int) -> str:
        shown = ", ".join(map(str, gpus_of(mask)))
        return f"GPU {shown} is {self._pool.with_whom(mask) or 'free'}"

    # What it costs

    def _account(self, training: Training, where: _Where, held: list[int], why: Mapping[int, str]) -> None:
        """Journal who stopped and who began to use its GPUs, and measure how long a return takes."""
        known = self._known.setdefault(training.uid, _Known())
        if self._counted:  # who lends its GPUs ends, and what is told of that is enough
            self._measure(training.uid, known, held, set(held))
            return
        workers = {one.name: one for one in self._backend.workers(training.uid) if one.alive and one.gpus}
        parked = frozenset(name for name in where.parked if where.parked[name] not in held)
        if training.spec.elasticity != "fixed" or known.parked or parked:
            for name in sorted(parked - (known.parked or frozenset())):
                mask = where.parked[name]
                self._told(training.uid, WORKER_LENT, workers[name], why.get(mask) or self._why(training.uid, mask))
            back = workers.keys() - parked if known.parked is None else known.parked - parked
            for name in sorted(back & workers.keys()):
                if mask_of(workers[name].gpus) in held:
                    self._told(training.uid, WORKER_BACK, workers[name], "it has its GPUs again")
        known.parked = parked
        self._measure(training.uid, known, held, set(where.parked.values()))

    def _told(self, uid: Uid, reason: str, worker: Worker, why: str) -> None:
        steady = self._clock.steady()
        data = {"worker": worker.name, "gpus": list(worker.gpus), **metering.when(self._clock.now(), steady)}
        self._note(uid, Event(reason, f"{worker.name}: {why}", data=data))

    def _measure(self, uid: Uid, known: _Known, held: list[int], parked: set[int]) -> None:
        """How long a return takes, by those who waited. One that has to be started first says nothing about them."""
        now, before = self._clock.monotonic(), known.held
        known.held = frozenset(held)
        view = self._worlds.look(uid)
        current = view.run.running if view is not None else None
        new, waited = known.held - before, known.waiting | parked
        known.waiting = frozenset(parked)
        if new and new <= waited:
            if known.grew_at is None:
                known.grew_at, known.grew_in = now, current.number if current is not None else None
        elif new or before - known.held:
            known.grew_at = None
        if known.grew_at is None or current is None or view is None or current.number == known.grew_in:
            return
        if current.world_size >= view.run.target and len(current.up) == current.world_size:
            self._pool.returned(uid, now - known.grew_at)
            known.grew_at = None


def _most(training: Training) -> int:
    size = training.spec.world_size
    return (size.max if training.spec.elasticity == "fill" else size.target) + training.spec.spares


def _to_be_used(training: Training, held: Iterable[int], using: int) -> int:
    """Places on which it may be starting workers right now: they must not be taken for empty."""
    empty = sorted(mask for mask in held if not mask & using)
    if _ends(training) or not empty:
        return 0
    started = sum(bool(mask & using) for mask in held)
    return mask_of(gpu for mask in empty[: max(0, _most(training) - started)] for gpu in gpus_of(mask))


def _ends(training: Training) -> bool:
    """Whether it is to end, or nothing follows from it: it asks for nothing more."""
    spec = training.spec
    ends = spec.cancel is not None or training.metadata.deletion_timestamp is not None or training.is_terminal
    return ends or spec.suspend or training.status.outcome is not None or bool(problems_of(training))


def _is_there(worker: Worker, now: datetime) -> bool:
    """Whether a process of it may use its GPUs."""
    if worker.ended_at is None:
        return True
    return not worker.cleared and now - worker.ended_at < CLEARED


def _role(run: Run | None, name: str) -> Role | None:
    """Of a worker that has joined."""
    return next((one.role for one in run.members.values() if one.name == name), None) if run is not None else None

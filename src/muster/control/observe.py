"""What is there for a training: its run, its workers, and what it may have beside the others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

from muster.control.pool_claims import PoolClaims
from muster.core.training import pacing, reconcile
from muster.core.training.admission import Grant, backend_of, suspended
from muster.core.training.edits import altered
from muster.core.training.pacing import StartAllowance, StartRequest
from muster.core.training.status import Observed
from muster.core.world import safe_state
from muster.ports import Backend, Clock, Worlds
from muster.types.training import Key, Training, Uid
from muster.types.worker import Worker

INSTALLING = timedelta(minutes=30)  # what a worker that makes an environment first may take to join its world


class Observer:
    """Keeps track of which trainings live and what they ask for, so that looking at one does not mean reading all."""

    def __init__(
        self,
        backends: Mapping[str, Backend],
        worlds: Worlds,
        clock: Clock,
        marks: Callable[[Uid], Mapping[str, str]] = lambda uid: {},
        *,
        most_starts: Mapping[str, int] | None = None,
    ) -> None:
        """`marks` says what a training's fixed fields were when its workers were started.

        `most_starts` has the backends that run all workers on one machine, and how many may start there at once.
        """
        self._marks = marks
        self._backends = backends
        self._worlds = worlds
        self._clock = clock
        self._keys: dict[Uid, Key] = {}
        self._live: set[Uid] = set()
        self._pools: dict[str, PoolClaims] = {}  # by backend
        self._wanting: dict[Uid, str] = {}  # trainings that want GPUs of a pool, with their backend's name
        self._joined: dict[Uid, set[str]] = {}
        self._absent: dict[Uid, dict[str, datetime]] = {}
        self._most_starts = dict(most_starts or {})
        self._requests: dict[Uid, StartRequest] = {}
        self._allowed: dict[Uid, tuple[int, datetime]] = {}

    @property
    def live(self) -> int:
        return len(self._live)

    def know(self, training: Training) -> None:
        uid = training.uid
        self._keys[uid] = training.key
        if training.is_terminal:
            self._live.discard(uid)
            self._release(uid)
            self._requests.pop(uid, None)
            self._allowed.pop(uid, None)
            return
        self._live.add(uid)
        name = backend_of(training.spec, self._backends)
        backend = self._backends.get(name)
        if training.spec.resources.gpus and backend is not None and name in self._pools:
            self._wanting[uid] = name
            self._pools[name].know(training)

    def forget(self, training: Training) -> None:
        uid = training.uid
        self._live.discard(uid)
        self._release(uid)
        self._requests.pop(uid, None)
        self._allowed.pop(uid, None)
        for kept in (self._keys, self._joined, self._absent):
            kept.pop(uid, None)

    def _release(self, uid: Uid) -> None:
        if (name := self._wanting.get(uid)) is not None:
            self._pools[name].forget(uid)

    def key_of(self, uid: Uid) -> Key | None:
        return self._keys.get(uid)

    def known(self) -> frozenset[Key]:
        return frozenset(self._keys.values())

    def use_pool(self, name: str, claims: PoolClaims, live: Sequence[Training]) -> None:
        """GPUs of that backend are given by a pool from now on."""
        self._pools[name] = claims
        mine = [one for one in live if one.spec.resources.gpus and backend_of(one.spec, self._backends) == name]
        self._wanting.update(dict.fromkeys(claims.begin(mine), name))

    def workers_changed(self, uid: Uid) -> None:
        """Of one that has ended somebody else may have what its last worker had."""
        if uid in self._wanting and uid not in self._live:
            self._release(uid)

    async def written(self) -> None:
        """Until what pools have decided cannot be lost: only then is a worker started on it."""
        for claims in self._pools.values():
            await claims.written()

    def workers(self, uid: Uid, backend: str) -> Sequence[Worker]:
        """With the GPUs of a pool that are theirs."""
        return (self._pools[backend] if backend in self._pools else self._backends[backend]).workers(uid)

    def look(self, training: Training) -> Observed:
        name = backend_of(training.spec, self._backends)
        backend = self._backends.get(name)
        grant = self._grant(training, name, backend)
        workers = tuple(self.workers(training.uid, name)) if backend is not None else ()
        view = self._worlds.look(training.uid)
        seen = Observed(
            run=view.run if view is not None else None,
            reason=view.reason if view is not None else "",
            confirmed=view.confirmed if view is not None else False,
            workers=workers,
            absent_since=self._absences(training, backend, workers) if backend is not None else {},
            grant=grant,
            backend=name,
            altered=altered(training.spec, self._marks(training.uid)),
            kept=safe_state.kept(view.run, self._clock.monotonic()) if view is not None else None,
            ahead=self._clock.now() - self._clock.steady(),
        )
        return replace(seen, starts=self._allowance(training, seen, name)) if name in self._most_starts else seen

    # Starts, on a machine that starts only so many workers at once

    def _allowance(self, training: Training, seen: Observed, name: str) -> StartAllowance:
        """What is allowed counts as starting until the next look, which sees the workers themselves."""
        uid, now = training.uid, self._clock.steady()
        self._allowed.pop(uid, None)
        actives, spares = reconcile.lacking(training, seen, now)
        if not actives + spares:
            self._requests.pop(uid, None)
            return StartAllowance()
        since = self._requests[uid].since if uid in self._requests else now
        self._requests[uid] = StartRequest(uid, since, actives, spares)
        found = pacing.allow(uid, self._requests.values(), self._starting(name, now), self._most_starts[name])
        started = found.count or 0
        if started:
            self._allowed[uid] = started, now
        if started >= actives + spares:
            del self._requests[uid]
        else:
            held = StartRequest(uid, since, max(0, actives - started), spares - max(0, started - actives))
            self._requests[uid] = held
        return found

    def _starting(self, name: str, now: datetime) -> int:
        """Workers that have not joined yet, or still import what their ranks need."""
        count = sum(allowed for allowed, at in self._allowed.values() if now - at < pacing.STARTING)
        for uid in self._live:
            young = [one for one in self._backends[name].workers(uid) if _is_young(one, now)]
            view = self._worlds.look(uid) if young else None
            members = {member.name: member for member in view.run.members.values()} if view is not None else {}
            count += sum(one.name not in members or bool(members[one.name].doing) for one in young)
        return count

    def next_to_start(self) -> Key | None:
        """The training that has waited longest for a worker's start, if one may start now."""
        now = self._clock.steady()
        waiting = min(self._requests.values(), key=lambda one: (not one.actives, one.since, one.uid), default=None)
        if waiting is None or waiting.uid in self._allowed:
            return None
        free = any(self._starting(name, now) < most for name, most in self._most_starts.items())
        return self._keys.get(waiting.uid) if free else None

    def _grant(self, training: Training, name: str, backend: Backend | None) -> Grant:
        spec = training.spec
        if backend is None:
            known = ", ".join(self._backends)
            return Grant(0, False, "UnknownBackend", f"there is no backend {spec.backend!r} here; there is: {known}")
        if spec.suspend:
            if spec.resources.gpus and name in self._pools:
                self._pools[name].know(training)  # what its last workers leave is for others
            return suspended(training)
        capacity, wanted = backend.capacity(), spec.world_size.target + spec.spares
        if spec.resources.gpus and name in self._pools:
            return self._pools[name].grant(training)
        if capacity is None:
            return Grant(wanted, True, "Admitted", "the cluster places its workers")
        if spec.resources.gpus == 0:
            return Grant(wanted, True, "Admitted", "it needs no GPU")
        need, workers = spec.world_size.min * spec.resources.gpus, spec.world_size.min
        told = f"needs {need} GPUs ({workers} workers × {spec.resources.gpus}), there are only 0 here"
        return Grant(0, False, "InsufficientGPUs", f"{told}: it can never start")

    def _absences(self, training: Training, backend: Backend, workers: tuple[Worker, ...]) -> Mapping[str, datetime]:
        """Since when a worker that runs, and should be known to the coordinator, has not been."""
        view = self._worlds.look(training.uid)
        if view is None or view.run.recovery_until is not None or view.run.outcome is not None:
            return {}
        here = {member.name for member in view.run.members.values()}
        joined = self._joined.setdefault(training.uid, set())
        joined |= here
        absent, now = self._absent.setdefault(training.uid, {}), self._clock.steady()
        patience = max(backend.patience, INSTALLING) if training.spec.requirements else backend.patience
        for worker in workers:
            late = worker.name in joined or now - worker.started_at > patience
            if worker.alive and not worker.waiting and worker.name not in here and late:
                absent.setdefault(worker.name, now)
            else:
                absent.pop(worker.name, None)
        return dict(absent)


def _is_young(worker: Worker, now: datetime) -> bool:
    return worker.alive and not worker.stopping and now - worker.started_at < pacing.STARTING

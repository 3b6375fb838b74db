"""What is there for a training: its run, its workers, and what it may have beside the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import datetime, timedelta

from muster.core.training.admission import Claim, Grant, admit, backend_of, suspended
from muster.core.training.edits import altered
from muster.core.training.status import NOT_LOOKED_AT, Observed
from muster.core.world import safe_state
from muster.ports import Backend, Clock, Worlds
from muster.types.training import Key, Training, Uid, problems_of
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
    ) -> None:
        """`marks` says what a training's fixed fields were when its workers were started."""
        self._marks = marks
        self._backends = backends
        self._worlds = worlds
        self._clock = clock
        self._keys: dict[Uid, Key] = {}
        self._live: set[Uid] = set()
        self._claims: dict[Uid, tuple[str, Claim]] = {}  # of those that want GPUs, with their backend's name
        self._grants: dict[str, Mapping[Uid, Grant]] = {}  # by backend, until something that counts has changed
        self._joined: dict[Uid, set[str]] = {}
        self._absent: dict[Uid, dict[str, datetime]] = {}

    @property
    def live(self) -> int:
        return len(self._live)

    def know(self, training: Training) -> None:
        uid = training.uid
        self._keys[uid] = training.key
        if training.is_terminal:
            self._live.discard(uid)
            self._ask_for(uid, None)
            return
        self._live.add(uid)
        name = backend_of(training.spec, self._backends)
        backend = self._backends.get(name)
        asks = training.spec.resources.gpus and backend is not None and backend.capacity() is not None
        self._ask_for(uid, (name, _claim(training)) if asks else None)

    def forget(self, training: Training) -> None:
        uid = training.uid
        self._live.discard(uid)
        self._ask_for(uid, None)
        for kept in (self._keys, self._joined, self._absent):
            kept.pop(uid, None)

    def _ask_for(self, uid: Uid, claim: tuple[str, Claim] | None) -> None:
        if claim == self._claims.get(uid):
            return
        self._grants.clear()
        if claim is None:
            del self._claims[uid]
        else:
            self._claims[uid] = claim

    def key_of(self, uid: Uid) -> Key | None:
        return self._keys.get(uid)

    def known(self) -> frozenset[Key]:
        return frozenset(self._keys.values())

    def workers_changed(self) -> None:
        self._grants.clear()

    def waiting(self) -> Iterable[Key]:
        """Trainings whose share may change when somebody else's does."""
        return [claim.key for _, claim in self._claims.values()]

    def look(self, training: Training) -> Observed:
        name = backend_of(training.spec, self._backends)
        backend = self._backends.get(name)
        workers = tuple(backend.workers(training.uid)) if backend is not None else ()
        view = self._worlds.look(training.uid)
        return Observed(
            run=view.run if view is not None else None,
            reason=view.reason if view is not None else "",
            confirmed=view.confirmed if view is not None else False,
            workers=workers,
            absent_since=self._absences(training, backend, workers) if backend is not None else {},
            grant=self._grant(training, name, backend),
            backend=name,
            altered=altered(training.spec, self._marks(training.uid)),
            kept=safe_state.kept(view.run, self._clock.monotonic()) if view is not None else None,
            ahead=self._clock.now() - self._clock.steady(),
        )

    def _grant(self, training: Training, name: str, backend: Backend | None) -> Grant:
        spec = training.spec
        if backend is None:
            known = ", ".join(self._backends)
            return Grant(0, False, "UnknownBackend", f"there is no backend {spec.backend!r} here; there is: {known}")
        if spec.suspend:
            return suspended(training)
        capacity, wanted = backend.capacity(), spec.world_size.target + spec.spares
        if capacity is None:
            return Grant(wanted, True, "Admitted", "the cluster places its workers")
        if spec.resources.gpus == 0:
            return Grant(wanted, True, "Admitted", "it needs no GPU")
        if name not in self._grants:
            claims = [
                replace(claim, have=have, admitted=claim.admitted or have > 0)
                for where, claim in self._claims.values()
                if where == name
                for have in [sum(worker.alive for worker in backend.workers(claim.uid))]
            ]
            self._grants[name] = admit(claims, capacity.gpus)
        return self._grants[name].get(training.uid, NOT_LOOKED_AT)

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


def _claim(training: Training) -> Claim:
    """What a training asks for; one that is to end, or that nothing follows from, asks for nothing more."""
    spec, created = training.spec, training.metadata.creation_timestamp
    assert created is not None
    ends = spec.cancel is not None or training.metadata.deletion_timestamp is not None or bool(problems_of(training))
    ends = ends or spec.suspend
    return Claim(
        key=training.key,
        uid=training.uid,
        created_at=created,
        min=0 if ends else spec.world_size.min,
        wanted=0 if ends else spec.world_size.target + spec.spares,
        gpus_each=spec.resources.gpus,
        priority=spec.priority,
        admitted=training.status.holds("Admitted"),
    )

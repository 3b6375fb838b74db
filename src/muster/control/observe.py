"""What is there for a training: its run, its workers, and what it may have beside the others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timedelta

from muster.core.admission import Claim, Grant, admit
from muster.core.truth import Observed
from muster.ports import Backend, Clock, Store, Worlds
from muster.types.training import Key, Training, Uid
from muster.types.worker import Worker

JOIN_PATIENCE = timedelta(seconds=90)  # a worker gives up by itself when it cannot join for a minute
FREE = Grant(0, True, "Admitted", "it needs no GPU")


class Observer:
    """Keeps track of which trainings live, so that looking at one does not mean reading all."""

    def __init__(self, store: Store, backends: Mapping[str, Backend], worlds: Worlds, clock: Clock) -> None:
        self._store = store
        self._backends = backends
        self._worlds = worlds
        self._clock = clock
        self._keys: dict[Uid, Key] = {}
        self._live: set[Uid] = set()
        self._on_gpus: dict[Uid, Key] = {}
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
            self._on_gpus.pop(uid, None)
        else:
            self._live.add(uid)
            if training.spec.resources.gpus:
                self._on_gpus[uid] = training.key

    def forget(self, training: Training) -> None:
        uid = training.uid
        self._live.discard(uid)
        for kept in (self._keys, self._on_gpus, self._joined, self._absent):
            kept.pop(uid, None)

    def key_of(self, uid: Uid) -> Key | None:
        return self._keys.get(uid)

    def waiting(self) -> Iterable[Key]:
        """Trainings whose share may change when somebody else's does."""
        return list(self._on_gpus.values())

    def look(self, training: Training) -> Observed:
        backend = self._backends.get(training.spec.backend)
        workers = tuple(backend.workers(training.uid)) if backend is not None else ()
        run = self._worlds.look(training.uid)
        return Observed(
            roll=run.roll if run is not None else None,
            reason=run.reason if run is not None else "",
            confirmed=run.confirmed if run is not None else False,
            workers=workers,
            absent_since=self._absences(training, workers),
            grant=self._grant(training, backend),
        )

    def _grant(self, training: Training, backend: Backend | None) -> Grant:
        spec = training.spec
        if backend is None:
            known = ", ".join(self._backends)
            return Grant(0, False, "UnknownBackend", f"there is no backend {spec.backend!r} here; there is: {known}")
        if spec.resources.gpus == 0:
            return Grant(spec.world_size.target + spec.spares, True, FREE.reason, FREE.message)
        claims = [
            claim for key in self._on_gpus.values() if (claim := self._claim(key, spec.backend, backend)) is not None
        ]
        return admit(claims, backend.capacity().gpus).get(training.uid, FREE)

    def _claim(self, key: Key, name: str, backend: Backend) -> Claim | None:
        stored = self._store.get(key)
        if stored is None or stored.training.spec.backend != name or stored.training.is_terminal:
            return None
        training = stored.training
        spec = training.spec
        created = training.metadata.creation_timestamp
        assert created is not None
        ends = spec.cancel is not None or training.metadata.deletion_timestamp is not None
        have = sum(worker.alive for worker in backend.workers(training.uid))
        return Claim(
            key=key,
            uid=training.uid,
            created_at=created,
            min=0 if ends else spec.world_size.min,
            wanted=0 if ends else spec.world_size.target + spec.spares,
            have=have,
            gpus_each=spec.resources.gpus,
            priority=spec.priority,
            admitted=training.status.holds("Admitted") or have > 0,
        )

    def _absences(self, training: Training, workers: tuple[Worker, ...]) -> Mapping[str, datetime]:
        """Since when a worker that runs, and should be known to the coordinator, has not been."""
        run = self._worlds.look(training.uid)
        if run is None or run.roll.recovery_until is not None or run.roll.outcome is not None:
            return {}
        here = {member.name for member in run.roll.members.values()}
        joined = self._joined.setdefault(training.uid, set())
        joined |= here
        absent, now = self._absent.setdefault(training.uid, {}), self._clock.now()
        for worker in workers:
            late = worker.name in joined or now - worker.started_at > JOIN_PATIENCE
            if worker.alive and worker.name not in here and late:
                absent.setdefault(worker.name, now)
            else:
                absent.pop(worker.name, None)
        return dict(absent)

"""How does whoever runs trainings speak with a pool? It says what they want and what is there; it hears what changes.

Nothing here starts or stops a worker. What a training may use is in the pool's state; it is looked at whenever
`changed` says so, and also when nobody says so: the same words twice change nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from muster.core.sharing import leases, workers
from muster.core.sharing.crews import with_whom
from muster.core.sharing.plans import Standing
from muster.sharing.pool_state import PoolState
from muster.types.sharing import WORKERS, Crew, Gpu, LeaseState, WorkerLease, gpus_of

UNKNOWN = Standing(False, "Unknown", "not looked at yet")


class Trainings:
    def __init__(self, state: PoolState) -> None:
        self._state = state

    def heard_by(self, changed: Callable[[str], None]) -> None:
        """From now on that is called, with a training's uid, when what it has or how it fares has changed."""
        self._state.workers_changed = changed

    def declare(self, crew: Crew) -> None:
        """What a training wants and where it has workers."""
        now = self._state.begin()
        self._state.commit(workers.declared(self._state.shares, crew, now))

    def withdraw(self, training: str) -> None:
        """It has no worker any more, and wants none."""
        self._state.begin()
        if (crew := self._state.shares.crews.get(training)) is None:
            return
        gone = tuple(gpu for mask in workers.held(self._state.shares, training) for gpu in gpus_of(mask))
        self._state.commit(workers.withdrawn(self._state.shares, training))
        self._state.note("left", crew.shown, "it has ended", cluster=WORKERS, gpus=gone)

    def ends(self, training: str, using: int) -> None:
        """It wants nothing more, and something of its workers is still on these GPUs."""
        self._state.begin()
        self._state.commit(workers.ending(self._state.shares, training, using))

    def adopt(self, training: str, masks: Iterable[int]) -> None:
        """Workers run that may use these GPUs, whatever the journal says."""
        now = self._state.begin()
        self._state.commit(workers.adopted(self._state.shares, training, masks, now))

    def left(self, training: str, mask: int) -> None:
        """No process of its workers uses these GPUs any more."""
        now, before = self._state.begin(), self._state.shares
        self._state.commit(workers.left(before, training, mask, now))
        if self._state.shares is not before and (crew := before.crews.get(training)) is not None:
            self._state.note("left", crew.shown, "", cluster=WORKERS, gpus=tuple(gpus_of(mask)))

    def returned(self, training: str, took_s: float) -> None:
        """It trains at its new size, so long after it got the GPUs."""
        self._state.begin()
        self._state.commit(workers.measured(self._state.shares, training, return_s=took_s))

    # What is

    def known(self) -> list[str]:
        return list(self._state.shares.crews)

    def held(self, training: str) -> list[int]:
        """Masks of the GPUs that its workers may use, one for each."""
        return workers.held(self._state.shares, training)

    def free(self) -> tuple[Gpu, ...]:
        """What nobody has."""
        return leases.free_gpus(self._state.shares)

    def masks(self, training: str) -> set[int]:
        """Of all that is its own, or is still being left by it."""
        return {one.mask for one in self._state.shares.workers.values() if one.training == training}

    def leaving(self, training: str) -> dict[int, WorkerLease]:
        """Masks of the GPUs that it has to leave."""
        return {
            one.mask: one
            for one in self._state.shares.workers.values()
            if one.training == training and one.state is LeaseState.DRAINING
        }

    def age_of(self, lease: WorkerLease) -> float:
        """For how long it has been as it is."""
        return self._state.begin() - lease.since

    @property
    def standings(self) -> Mapping[str, Standing]:
        """How trainings fare, by their uids."""
        return self._state.standings

    def settled(self, training: str) -> Standing:
        """How it fares, all that was said before considered."""
        if training not in self._state.standings:
            self._state.plan_now()
        return self._state.standings.get(training, UNKNOWN)

    def with_whom(self, mask: int) -> str:
        """Who has these GPUs now, in words."""
        told = [with_whom(self._state.shares, gpu) for gpu in gpus_of(mask)]
        return ", ".join(dict.fromkeys(one for one in told if one is not None))

    async def written(self) -> None:
        """Until nothing that was decided can be lost: only then is a worker started on it."""
        await self._state.written()

"""The control loop where somebody else places the workers, writes the objects and takes them away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from muster import errors
from muster.backoff import Backoff
from muster.control import leftovers
from muster.control.loop import ALIVE_KEY, ALIVE_KIND, TOKEN_KIND, Loop
from muster.core.training.reconcile import LEAVE
from muster.ports import Store, Write
from muster.sharing import ClusterSpec, Pool, Priority, Scheduler
from muster.store.sqlite import SqliteStore
from muster.types.state import Held, Holding, KeptState
from muster.types.training import Cancel, Resources, Training, Uid, WorldSize
from muster.types.worker import Worker
from tests.clocks import HandClock
from tests.memory_store import MemoryStore
from tests.sharing.scripted import Hooks
from tests.simulator.control import SimulatedBackend, SimulatedWorlds
from tests.training_builders import a_training

BOUND_S = 20.0
FULL = "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."


class Cluster(SimulatedBackend):
    """It places workers itself: some have to wait, and some orders are refused."""

    def __init__(self, clock: HandClock, gpus: int | None = None) -> None:
        super().__init__(clock, gpus=gpus)
        self.full: set[str] = set()
        self.refusal: errors.MusterError | None = None
        self.started: list[tuple[str, tuple[int, ...]]] = []
        self.forgotten: list[Uid] = []

    async def start(self, training: Training, name: str, gpus: tuple[int, ...], token: str) -> Worker:
        if self.refusal is not None:
            raise self.refusal
        self.started.append((name, gpus))
        if name not in self.full:
            return await super().start(training, name, gpus, token)
        worker = Worker(name, training.uid, "", self._clock.now(), gpus, waiting=FULL)
        return self._workers.setdefault(training.uid, {}).setdefault(name, worker)

    async def forget(self, uid: Uid) -> None:
        if self.refusal is not None:
            raise self.refusal
        self.forgotten.append(uid)
        await super().forget(uid)

    def runs(self, training: Training, name: str) -> None:
        """A node has been found for it."""
        worker = replace(self._workers[training.uid][name], waiting="", node="node-1", started_at=self._clock.now())
        self._workers[training.uid][name] = worker
        self.changed(worker)


class Site:
    """A control plane with one cluster."""

    def __init__(self, store: Store | None = None, *, gpus: int | None = None, counted: int = 0) -> None:
        self.counted = counted
        self.store: Store = store if store is not None else MemoryStore()
        self.clock = HandClock()
        self.cluster = Cluster(self.clock, gpus)
        self.worlds = SimulatedWorlds(self.clock, lambda uid: self.loop.run_changed(uid))
        self.cluster.changed = self._changed
        self.loop = Loop(self.store, {"kube": self.cluster}, self.worlds, self.clock, alive_every_s=None)
        self.pool = Scheduler(Pool(gpus or counted or 1, gpus or counted or 1))

    def _changed(self, worker: Worker) -> None:
        self.worlds.worker_changed(worker)
        self.loop.workers_changed(worker.uid)

    async def put(self, training: Training) -> Training:
        written = await self.store.write(Write(put=training))
        assert written is not None
        await self.loop.idle()
        return self.get(training)

    def get(self, training: Training) -> Training:
        stored = self.store.get(training.key)
        assert stored is not None
        return stored.training

    async def edit(self, training: Training, **spec: object) -> Training:
        now = self.get(training)
        metadata = replace(now.metadata, generation=now.generation + 1)
        return await self.put(replace(now, metadata=metadata, spec=replace(now.spec, **spec)))  # type: ignore[arg-type]

    async def told(self, reason: str) -> list[str]:
        return [event.message for event in await self.store.events() if event.reason == reason]


def play(scenario: Callable[[Site], Awaitable[None]], make: Callable[[], Site] = Site) -> None:
    async def run() -> None:
        async with asyncio.timeout(BOUND_S):
            site = make()
            await site.pool.start()
            if site.cluster.capacity() is not None or site.counted:
                site.loop.use_pool("kube", site.pool.trainings, counted=bool(site.counted))
            site.loop.start()
            try:
                await scenario(site)
            finally:
                await site.loop.stop()
                await site.pool.stop()
                await site.store.close()

    asyncio.run(run())


async def eventually(look: Callable[[], object]) -> None:
    while not look():
        await asyncio.sleep(0.002)


def message(training: Training, kind: str) -> str:
    condition = training.status.condition(kind)
    return condition.message if condition is not None else ""


# Placing -------------------------------------------------------------------------------------------


def test_who_wants_gpus_is_admitted_at_once_and_each_worker_is_ordered_with_as_many() -> None:
    async def scenario(site: Site) -> None:
        training = await site.put(a_training(world=(2, 2, 2), spares=1, resources=Resources(gpus=2)))
        assert training.status.holds("Admitted") and message(training, "Admitted") == "the cluster places its workers"
        assert training.status.holds("TargetReached")
        assert sorted(site.cluster.started) == [(f"demo-{index}", (0, 1)) for index in range(3)]
        assert not site.pool.shares.crews, "nobody's share depends on another's"

    play(scenario)


def test_a_worker_that_waits_is_told_of_and_given_time_until_it_runs() -> None:
    async def scenario(site: Site) -> None:
        site.cluster.full = {"demo-1"}
        training = await site.put(a_training(world=(1, 2, 2)))
        site.clock.at += site.cluster.patience * 3
        site.loop.wake(training.key)
        await site.loop.idle()
        training = site.get(training)
        assert message(training, "TargetReached") == f"0 of 2 ready: demo-1 waits: {FULL}"
        assert await site.told("WorkerWaiting") == [f"demo-1: {FULL}"]
        assert [worker.name for worker in site.cluster.workers(training.uid) if worker.alive] == ["demo-0", "demo-1"]
        site.cluster.runs(training, "demo-1")
        await site.loop.idle()
        assert site.get(training).status.holds("TargetReached")

    play(scenario)


def test_the_default_backend_is_the_only_one_and_another_name_stays_unknown() -> None:
    async def scenario(site: Site) -> None:
        assert (await site.put(a_training("any"))).status.holds("TargetReached")
        assert (await site.put(a_training("kube", backend="kube"))).status.holds("TargetReached")
        lost = await site.put(a_training("lost", backend="moon"))
        assert message(lost, "Admitted") == "there is no backend 'moon' here; there is: kube"
        deleted = replace(lost, metadata=replace(lost.metadata, deletion_timestamp=site.clock.now()))
        await site.store.write(Write(put=deleted))
        await eventually(lambda: site.store.get(lost.key) is None)

    play(scenario)


def test_nobody_tells_that_it_lives_where_something_else_does() -> None:
    async def scenario(site: Site) -> None:
        await site.put(a_training())
        assert site.store.record(ALIVE_KIND, ALIVE_KEY) is None

    play(scenario)


# Invalid specs -------------------------------------------------------------------------------------


def test_an_invalid_training_starts_nothing_asks_for_nothing_and_goes_on_when_it_is_repaired() -> None:
    async def scenario(site: Site) -> None:
        one = Resources(gpus=1)
        training = await site.put(a_training(world=(3, 2, 1), resources=one))
        assert site.cluster.started == [] and training.status.observed_generation == training.generation
        assert message(training, "Valid").startswith("its spec cannot be acted on: spec.worldSize:")
        other = await site.put(a_training("other", resources=one))
        assert other.status.holds("TargetReached"), "one that cannot start is before nobody"
        assert len(await site.told("InvalidSpec")) == 1
        training = await site.edit(training, world_size=WorldSize(1, 1, 1))
        assert training.status.holds("Valid") and not training.status.holds("Admitted"), "there is one GPU"
        await site.edit(other, cancel=Cancel(site.clock.now(), 0.0))
        await eventually(lambda: site.get(other).is_terminal)
        site.clock.at += LEAVE
        site.loop.wake(other.key)
        await eventually(lambda: site.get(training).status.holds("TargetReached"))

    play(scenario, lambda: Site(gpus=1))


def test_a_world_keeps_its_size_while_its_spec_is_invalid_and_can_be_cancelled() -> None:
    async def scenario(site: Site) -> None:
        training = await site.put(a_training(world=(2, 2, 4)))
        training = await site.edit(training, world_size=WorldSize(4, 3, 4))
        assert training.status.world_size.ready == 2 == training.status.world_size.target
        assert len(site.cluster.started) == 2
        assert not training.status.holds("TargetReached")
        await site.edit(training, cancel=Cancel(site.clock.now(), 0.0))
        await eventually(lambda: site.get(training).status.phase == "cancelled")

    play(scenario)


# Removed around us ---------------------------------------------------------------------------------


def gone(site: Site, uids: Iterable[Uid]) -> bool:
    return all(
        site.worlds.look(uid) is None
        and not site.cluster.workers(uid)
        and uid in site.cluster.forgotten
        and site.store.record(TOKEN_KIND, uid) is None
        for uid in uids
    )


def test_what_belonged_to_a_training_that_disappears_is_cleared_up_also_after_a_refusal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def scenario(site: Site) -> None:
        training = await site.put(a_training(world=(2, 2, 2)))
        assert training.status.holds("TargetReached")
        site.cluster.refusal = errors.Unavailable("no answer")
        await site.store.write(Write(delete=training.key))
        await eventually(lambda: site.worlds.look(training.uid) is None)
        site.cluster.refusal = None
        await eventually(lambda: gone(site, [training.uid]))
        assert (await site.put(a_training("demo", uid="another"))).status.holds("TargetReached")

    monkeypatch.setattr(leftovers, "RETRY", Backoff(0.01, 30.0))
    play(scenario)


def test_our_own_removal_leaves_nothing_to_clear_up() -> None:
    async def scenario(site: Site) -> None:
        training = await site.put(a_training(ttl_seconds_after_finished=0.0))
        await site.edit(training, cancel=Cancel(site.clock.now(), 0.0))
        await eventually(lambda: site.get(training).is_terminal)
        site.clock.at += LEAVE
        site.loop.wake(training.key)
        await eventually(lambda: site.store.get(training.key) is None)
        await site.loop.idle()
        assert site.cluster.forgotten == [training.uid], "once"

    play(scenario)


def test_what_disappeared_while_nobody_looked_is_cleared_up_at_the_start(tmp_path: Path) -> None:
    async def run() -> None:
        async with asyncio.timeout(BOUND_S):
            site = Site(SqliteStore.open(tmp_path / "muster.db"))
            site.loop.start()
            training = await site.put(a_training(world=(2, 2, 2)))
            kept = await site.put(a_training("kept"))
            await site.loop.stop()
            await site.store.write(Write(delete=training.key))
            again = Site(site.store)
            again.cluster._workers = site.cluster._workers
            again.loop.start()
            await eventually(lambda: gone(again, [training.uid]))
            assert [worker.alive for worker in again.cluster.workers(kept.uid)] == [True]
            await again.loop.stop()
            await site.store.close()

    asyncio.run(run())


# Not allowed ---------------------------------------------------------------------------------------


def test_a_missing_permission_is_told_in_the_servers_words_and_with_what_to_do() -> None:
    async def scenario(site: Site) -> None:
        said, hint = 'pods is forbidden: User "x" cannot create resource "pods"', "muster kube install grants it"
        site.cluster.refusal = errors.Forbidden(said, hint=hint)
        await site.put(a_training())
        await site.loop.idle()
        await eventually(lambda: not site.loop._unwritten)
        assert await site.told("ReconcileFailed") == [f"{said} ({hint}); trying again"]
        site.cluster.refusal = None
        await eventually(lambda: site.store.get(a_training().key).training.status.holds("TargetReached"))  # type: ignore[union-attr]

    play(scenario)


# What changes with every step ------------------------------------------------------------------------


def test_state_that_is_kept_anew_with_every_step_is_written_once_a_second() -> None:
    async def scenario(site: Site) -> None:
        training = await site.put(a_training(world=(2, 2, 2)))
        await eventually(lambda: site.get(training).status.holds("TargetReached"))

        async def committed(step: int, refused: str = "") -> KeptState:
            held = (Held(0, 2, 0, step, 1), Held(1, 2, 0, step, 1))
            site.worlds.holds(training.uid, Holding(held, refused=refused))
            await site.loop.idle()
            kept = site.get(training).status.kept_state
            assert kept is not None
            return kept

        assert (await committed(1)).step == 1, "that there is any is told at once"
        written = site.store.version
        assert {(await committed(step)).step for step in range(2, 50)} == {1}
        assert site.store.version == written
        site.clock.at += timedelta(seconds=1)
        assert (await committed(50)).step == 50
        written = site.store.version
        assert (await committed(51, refused="no room")).step == 51, "trouble is told at once"
        assert site.store.version > written

    play(scenario)


# GPUs of a cluster that were given to a pool ---------------------------------------------------------


def has(site: Site, training: Training, ready: int) -> Callable[[], bool]:
    """So many workers train, and there are no others."""

    def look() -> bool:
        alive = [one for one in site.cluster.workers(training.uid) if one.alive]
        return site.get(training).status.world_size.ready == len(alive) == ready

    return look


def test_what_a_filling_training_has_of_a_cluster_goes_to_another_with_its_workers_and_comes_back() -> None:
    async def scenario(site: Site) -> None:
        fills = await site.put(a_training("fills", world=(1, 1, 3), resources=Resources(gpus=1), elasticity="fill"))
        await eventually(has(site, fills, 3))
        rival = await site.put(a_training("rival", world=(2, 2, 2), resources=Resources(gpus=1)))
        await eventually(has(site, rival, 2))
        await eventually(has(site, fills, 1))
        assert not await site.told("FieldIgnored")
        held = site.pool.snapshot().workers
        assert sorted(one.training for one in held.values()) == ["default/fills", "default/rival", "default/rival"]
        await site.edit(rival, cancel=Cancel(site.clock.now(), 0.0))
        await eventually(lambda: site.get(rival).is_terminal)
        site.clock.at += timedelta(minutes=2)  # whatever it costs to start workers is worth it by now
        site.loop.wake(fills.key)
        await eventually(has(site, fills, 3))

    play(scenario, lambda: Site(counted=3))


def test_workers_that_run_when_a_pool_is_first_there_are_given_places() -> None:
    async def scenario(site: Site) -> None:
        old = await site.put(a_training("old", world=(2, 2, 2), resources=Resources(gpus=1)))
        assert has(site, old, 2)()
        later = Scheduler(Pool(3, 3))
        await later.start()
        try:
            site.loop.use_pool("kube", later.trainings, counted=True)
            site.loop.wake(old.key)
            await site.loop.idle()
            assert has(site, old, 2)() and len(later.snapshot().workers) == 2
            waits = await site.put(a_training("waits", world=(2, 2, 2), resources=Resources(gpus=1)))
            assert not waits.status.holds("Admitted") and has(site, waits, 0)()
        finally:
            await site.loop.stop()
            await later.stop()

    play(scenario)


def test_what_a_return_takes_is_measured_of_workers_that_waited_for_their_gpus() -> None:
    async def scenario(site: Site) -> None:
        fills = await site.put(a_training("fills", world=(1, 1, 3), resources=Resources(gpus=1), elasticity="fill"))
        await eventually(lambda: site.get(fills).status.world_size.ready == 3)
        assert site.pool.shares.crews[fills.uid].return_s is None, "its workers had to be started"
        clusters = {"actor_train": ClusterSpec([2]), "actor_infer": ClusterSpec([2])}
        await site.pool.register_pipeline("p1", clusters, Hooks())
        await site.pool.admit_pipeline("p1")
        await site.pool.request_gpus("p1", "actor_train", Priority.ACTOR_TRAINING)
        await site.pool.notify_release_gpus("p1", "actor_train")
        await eventually(lambda: site.get(fills).status.world_size.ready == 3)
        await eventually(lambda: site.pool.shares.crews[fills.uid].return_s is not None)

    play(scenario, lambda: Site(gpus=3))

"""Thousands of random operations, with hooks that fail, hang and die: is everybody answered, and every state sound?"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from muster.core.sharing.planner import plan
from muster.core.sharing.plans import SharePlan
from muster.errors import MusterError
from muster.sharing import ClusterSpec, Pool, Priority, ProgressReport, Scheduler, SharingEvent
from muster.sim import virtual
from muster.types.sharing import Shares, gpus_of
from tests.core.sharing.invariants import broken, broken_by
from tests.sharing.scripted import Hooks

POOL = Pool(gpus=8, gpus_per_node=4)
BOUND_S = 60.0  # longer than any hook call with its retry
STEPS = [0.0, 0.5, 2.0, 0.0, 0.5, 2.0, 0.0, 0.5, 2.0, "raise", "hang", "cancel"]
FIXED = [
    ("actor_train", Priority.ACTOR_TRAINING),
    ("actor_train", Priority.OLD_LOG_PROBS),
    ("critic", Priority.CRITIC_TRAINING),
    ("reference", Priority.REF_LOG_PROBS),
    ("actor_infer", Priority.INITIALIZATION),
]


class Moody(Hooks):
    """Hooks with moods. They note it if two pipelines have the same GPU awake."""

    def __init__(self, storm: Storm, name: str) -> None:
        super().__init__()
        self._dice, self._owners, self._wrong, self._name = storm.dice, storm.owners, storm.wrong, name
        self._map = storm.maps[name]["actor_infer"].bundles

    async def _step(self, step: Any) -> None:
        await super()._step(self._dice.choice(STEPS))

    async def expand(self, ranks: Any) -> None:
        for gpus in ranks.values():
            for gpu in gpus:
                if self._owners.get(gpu, self._name) != self._name:
                    self._wrong.append(f"GPU {gpu} goes to {self._name} and is awake at {self._owners[gpu]}")
                self._owners[gpu] = self._name
        await super().expand(ranks)

    async def shrink(self, ranks: Any) -> None:
        await super().shrink(ranks)
        for rank in ranks:
            for gpu in self._map[rank]:
                if self._owners.get(gpu) == self._name:
                    del self._owners[gpu]


class Storm:
    """Random pipelines that do random things to one scheduler."""

    def __init__(self, seed: int, journal: Path | None) -> None:
        self.dice = random.Random(seed)
        self.journal = journal
        self.outcomes: Counter[str] = Counter()
        self.calls: list[asyncio.Task[None]] = []
        self.owners: dict[int, str] = {}
        self.maps = {f"p{number}": self._clusters() for number in range(5)}
        self.wrong: list[str] = []
        self.plans = 0
        self.scheduler = self._scheduler()
        self.restarting = False

    def _scheduler(self) -> Scheduler:
        return Scheduler(
            POOL,
            self.journal,
            hook_timeout_s=3.0,
            reattach_timeout_s=20.0,
            min_turn_s=1.0,
            planner=self._planned,
            on_event=self._check,
        )

    def _planned(self, shares: Shares, now: float) -> SharePlan:
        found = plan(shares, now)
        self.plans += 1
        self.wrong += broken_by(shares, found)
        return found

    def _clusters(self) -> dict[str, ClusterSpec]:
        def some() -> ClusterSpec:
            return ClusterSpec(self.dice.sample(range(POOL.gpus), self.dice.randint(1, 4)))

        size = self.dice.choice([1, 1, 2, 4])
        starts = self.dice.sample(range(0, POOL.gpus, size), self.dice.randint(1, POOL.gpus // size))
        infer = ClusterSpec([gpu for start in starts for gpu in range(start, start + size)], size)
        return {"actor_train": some(), "critic": some(), "reference": some(), "actor_infer": infer}

    def _check(self, event: SharingEvent) -> None:
        self.wrong += [one for one in broken(self.scheduler.shares) if "in part" not in one]
        snapshot = self.scheduler.snapshot()
        lost = set(self.scheduler.shares.lost_gpus)
        every = sorted([*snapshot.leases, *snapshot.idle, *(lost - set(snapshot.leases))])
        if every != list(range(POOL.gpus)):
            self.wrong.append(f"after {event}: {every}")

    async def run(self, count: int) -> None:
        await self.scheduler.start()
        for name in self.maps:
            await self._register(name)
        for _ in range(count):
            self.calls.append(asyncio.create_task(self._answered(self._operation())))
            await asyncio.sleep(self.dice.choice([0.0, 0.0, 0.1, 1.0]))
            assert not self.wrong, self.wrong[:3]
        await asyncio.sleep(BOUND_S)
        for name in self.maps:
            await self._unregister(name)
        _, unanswered = await asyncio.wait(self.calls, timeout=BOUND_S)
        assert not unanswered, f"{len(unanswered)} callers were never answered"
        for call in self.calls:
            if not call.cancelled():
                call.result()  # anything but a refusal is a fault
        await self.scheduler.stop()
        assert self.plans > count / 4

    async def _answered(self, call: Awaitable[Any]) -> None:
        try:
            await call
            self.outcomes["done"] += 1
        except MusterError as error:
            self.outcomes[type(error).__name__] += 1
        except asyncio.CancelledError:
            self.outcomes["cancelled"] += 1

    def _operation(self) -> Coroutine[Any, Any, Any]:
        name = self.dice.choice(list(self.maps))
        kinds: list[tuple[int, Callable[[str], Coroutine[Any, Any, Any]]]] = [
            (20, self._generate),
            (20, self._fixed),
            (20, self._progress),
            (15, self._release),
            (8, self._swap),
            (8, lambda name: self.scheduler.await_release_gpus(name, timeout=self._wait())),
            (5, self.scheduler.clear_progress),
            (8, self._register),
            (1, self._unregister),
            (1, lambda name: self._whole(self._node())),
            (6, self._cancel),
            (1, lambda name: self._whole(self._restart())),
        ]
        (operation,) = self.dice.choices([one for _, one in kinds], [weight for weight, _ in kinds])
        return operation(name)

    def _wait(self) -> float | None:
        return self.dice.choice([0.0, 1.0, 50.0, None])

    async def _generate(self, name: str) -> None:
        estimate = self.dice.choice([None, 3, 20])
        await self.scheduler.request_gpus(name, "actor_infer", Priority.GENERATION, estimate, self._wait())

    async def _fixed(self, name: str) -> None:
        cluster, priority = self.dice.choice(FIXED)
        gpus = await self.scheduler.request_gpus(name, cluster, priority, timeout=self._wait())
        assert gpus == list(self.maps[name][cluster].gpus)

    async def _swap(self, name: str) -> None:
        (release, _), (request, priority) = self.dice.sample(FIXED, 2)
        self._sleep(name, release)
        await self.scheduler.notify_release_then_request_gpus(name, release, request, priority, timeout=self._wait())

    async def _progress(self, name: str) -> None:
        stream = self.dice.choice([None, "a", "b"])
        await self.scheduler.report_progress(ProgressReport(name, self.dice.randint(0, 12), 10, stream))

    async def _register(self, name: str) -> None:
        await self.scheduler.register_pipeline(name, clusters=self.maps[name], hooks=Moody(self, name))
        await self.scheduler.admit_pipeline(name)

    async def _release(self, name: str) -> None:
        cluster = self.dice.choice(list(self.maps[name]))
        self._sleep(name, cluster)
        await self.scheduler.notify_release_gpus(name, cluster)

    async def _unregister(self, name: str) -> None:
        self._forget(lambda gpu, owner: owner == name)
        await self.scheduler.unregister_pipeline(name)

    def _sleep(self, name: str, cluster: str) -> None:
        """Whoever releases what it holds has put it to sleep before."""
        leases = self.scheduler.snapshot().leases
        if cluster == "actor_infer" and name not in self.scheduler.snapshot().quarantined:
            self._forget(lambda gpu, owner: owner == name and gpu in leases and leases[gpu].state == "held")

    def _forget(self, gone: Callable[[int, str], bool]) -> None:
        for gpu in [gpu for gpu, owner in self.owners.items() if gone(gpu, owner)]:
            del self.owners[gpu]

    async def _whole(self, work: Coroutine[Any, Any, None]) -> None:
        """Not for callers to cancel: nodes and restarts are nobody's request."""
        await asyncio.shield(asyncio.ensure_future(work))

    async def _node(self) -> None:
        node = self.dice.randrange(2)
        down = {
            gpu
            for bundle, lease in self.scheduler.shares.leases.items()
            for gpu in gpus_of(lease.mask)
            if any(POOL.node_of(one) == node for one in gpus_of(lease.mask))
        }
        self._forget(lambda gpu, owner: gpu in down)
        await self.scheduler.lose_node(node)
        await asyncio.sleep(2.0)
        await self.scheduler.restore_node(node)

    async def _cancel(self, name: str) -> None:
        waiting = [call for call in self.calls[-200:] if not call.done() and call is not asyncio.current_task()]
        if waiting:
            self.dice.choice(waiting).cancel()

    async def _restart(self) -> None:
        if self.journal is None or self.restarting:
            return
        self.restarting = True
        before = self.scheduler.snapshot()
        await self.scheduler.stop()
        assert self.scheduler.snapshot() == before
        self.scheduler = self._scheduler()
        await self.scheduler.start()
        assert self.scheduler.snapshot() == before
        self.restarting = False
        for one in self.maps:
            if one in set(self.scheduler.shares.pipelines) and self.dice.random() < 0.8:
                await self._answered(self._register(one))


def weather(seed: int, count: int, journal: Path | None = None) -> Counter[str]:
    async def story() -> Counter[str]:
        storm = Storm(seed, journal)
        await storm.run(count)
        return storm.outcomes

    return virtual.run(story())


@pytest.mark.parametrize("seed", range(4))
def test_every_waiter_is_answered_and_every_state_is_sound_over_ten_thousand_operations(
    seed: int, tmp_path: Path
) -> None:
    outcomes = weather(seed, 2_500, tmp_path / "j")
    assert outcomes["done"] > 500
    assert {"cancelled", "GrantTimeout", "PipelineQuarantined", "RequestRefused", "WouldDeadlock"} <= set(outcomes)

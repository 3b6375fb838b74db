"""Does the scheduler keep its promises when anything may happen? Random operations, and hooks that fail, hang and die.

A history is a function of its seed. After every operation the state is checked, and so is every plan before it is
carried out; in the end the scheduler is stopped, and whoever still waits must have been answered.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from muster.core.sharing.planner import plan
from muster.core.sharing.plans import SharePlan
from muster.errors import MusterError
from muster.sharing.scheduler import Scheduler
from muster.sim import virtual
from muster.types.sharing import GENERATION_CLUSTER, ClusterSpec, Pool, Priority, ProgressReport, Shares
from tests.core.sharing import invariants

Planner = Callable[[Shares, float], SharePlan]

GPUS, PIPELINES = 8, 5
HOOK_TIMEOUT_S = 20.0
ANSWER_WITHIN_S = 60.0  # after a stop; cancelled hook calls may take a while to end
_FIXED = (Priority.INITIALIZATION, Priority.ACTOR_TRAINING, Priority.OLD_LOG_PROBS)


@dataclass
class Disorder:
    """What came of it."""

    operations: int = 0
    broken: list[str] = field(default_factory=list)
    unanswered: int = 0
    outcomes: Counter[str] = field(default_factory=Counter)

    def __add__(self, other: Disorder) -> Disorder:
        return Disorder(
            self.operations + other.operations,
            self.broken + other.broken,
            self.unanswered + other.unanswered,
            self.outcomes + other.outcomes,
        )


def run(seed: int, operations: int, planner: Planner = plan) -> Disorder:
    async def main() -> Disorder:
        return await _Disorder(seed, planner).run(operations)

    return virtual.run(main())


class _Hooks:
    """Usually does what it should; now and then fails, hangs, or is dead from then on."""

    def __init__(self, source: random.Random) -> None:
        self._source = source
        self._dead = False

    async def shrink(self, ranks: Sequence[int]) -> None:
        await self._behave(2.0)

    async def expand(self, ranks: Mapping[int, Sequence[int]]) -> None:
        await self._behave(6.0)

    async def _behave(self, usual_s: float) -> None:
        chance = self._source.random()
        self._dead = self._dead or chance < 0.01
        if self._dead or chance < 0.06:
            raise ConnectionError("the engine does not answer")
        await asyncio.sleep(1e6 if chance < 0.09 else usual_s * self._source.random())


class _Disorder:
    def __init__(self, seed: int, planner: Planner) -> None:
        self._source = random.Random(seed)
        self._seed = seed
        self._planner = planner
        self._history = Disorder()
        self._tasks: dict[asyncio.Task[None], None] = {}  # in the order in which they began
        self._scheduler = Scheduler(
            Pool(GPUS, GPUS), hook_timeout_s=HOOK_TIMEOUT_S, reserve_after_s=10, planner=self._planned
        )
        self._clusters = {f"p{at}": self._some_clusters() for at in range(PIPELINES)}

    async def run(self, operations: int) -> Disorder:
        await self._scheduler.start()
        for name in self._clusters:
            await self._try(self._enter(name))
        for _ in range(operations):
            self._begin(self._pick())
            await asyncio.sleep(self._source.choice((0, 0, 0.5, 3)))
            self._history.operations += 1
            self._check(invariants.broken(self._scheduler.shares), "state")
        await self._scheduler.stop()
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=ANSWER_WITHIN_S)
        self._history.unanswered = len(self._tasks)
        return self._history

    def _planned(self, shares: Shares, now: float) -> SharePlan:
        made = self._planner(shares, now)
        self._check(invariants.broken_by(shares, made), "plan")
        return made

    def _check(self, found: Sequence[str], where: str) -> None:
        at = self._history.operations
        self._history.broken += [f"seed {self._seed}, operation {at}, {where}: {text}" for text in found]

    def _some_clusters(self) -> dict[str, ClusterSpec]:
        size = self._source.choice((1, 1, 2))
        start = self._source.randrange(0, GPUS, 2)
        train = [start, start + 1]
        infer = range(GPUS) if self._source.random() < 0.6 else range(self._source.choice((0, 2, 4)), GPUS)
        return {
            "actor_train": ClusterSpec(gpus=train),
            "critic": ClusterSpec(gpus=[self._source.randrange(GPUS)]),
            GENERATION_CLUSTER: ClusterSpec(gpus=infer, tp_size=size, slots_per_bundle=8),
        }

    def _begin(self, operation: Coroutine[Any, Any, object]) -> None:
        task = asyncio.get_running_loop().create_task(self._try(operation))
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)

    async def _try(self, operation: Awaitable[object]) -> None:
        """Refusals are answers too; anything that is not ours is a fault."""
        try:
            await operation
            self._history.outcomes["done"] += 1
        except MusterError as error:
            self._history.outcomes[type(error).__name__] += 1
        except asyncio.CancelledError:
            self._history.outcomes["cancelled"] += 1
        except (RuntimeError, LookupError, ValueError, AssertionError) as error:
            self._check([f"{type(error).__name__}: {error}"], "answer")

    def _pick(self) -> Coroutine[Any, Any, object]:
        name = self._source.choice(list(self._clusters))
        table: tuple[tuple[int, Callable[[str], Coroutine[Any, Any, object]]], ...] = (
            (6, self._generate),
            (8, self._progress),
            (4, self._fixed),
            (4, self._release),
            (2, self._swap),
            (3, self._leave),
            (2, self._scheduler.clear_progress),
            (5, self._enter),
            (2, self._impatient),
            (1, self._scheduler.unregister_pipeline),
        )
        (operation,) = self._source.choices([call for _, call in table], [weight for weight, _ in table])
        return operation(name)

    async def _enter(self, name: str) -> None:
        await self._scheduler.register_pipeline(name, clusters=self._clusters[name], hooks=_Hooks(self._source))
        await self._scheduler.admit_pipeline(name)

    async def _generate(self, name: str) -> None:
        estimate, timeout = self._source.choice((None, 8, 64)), self._source.choice((None, 5.0, 60.0))
        await self._scheduler.request_gpus(
            name, GENERATION_CLUSTER, Priority.GENERATION, step_target_estimate=estimate, timeout=timeout
        )

    async def _progress(self, name: str) -> None:
        await self._scheduler.report_progress(
            ProgressReport(name, completed=self._source.randrange(64), target=self._source.choice((32, 64)))
        )

    async def _fixed(self, name: str) -> None:
        cluster, timeout = self._source.choice(("actor_train", "critic")), self._source.choice((None, 5.0, 60.0))
        await self._scheduler.request_gpus(name, cluster, self._source.choice(_FIXED), timeout=timeout)

    async def _release(self, name: str) -> None:
        cluster = self._source.choice(("actor_train", "actor_train", "critic", GENERATION_CLUSTER))
        await self._scheduler.notify_release_gpus(name, cluster)

    async def _swap(self, name: str) -> None:
        release = self._source.choice(("actor_train", "critic", GENERATION_CLUSTER))
        await self._scheduler.notify_release_then_request_gpus(
            name, release=release, request="actor_train", priority=Priority.ACTOR_TRAINING, timeout=30.0
        )

    async def _leave(self, name: str) -> None:
        await self._scheduler.await_release_gpus(name, GENERATION_CLUSTER, timeout=self._source.choice((None, 5.0)))

    async def _impatient(self, name: str) -> None:
        """Somebody who waits is cancelled."""
        others = [task for task in self._tasks if task is not asyncio.current_task()]
        if others:
            self._source.choice(others).cancel()

"""How does a pipeline that shares its GPUs run? The loop of one, with every call that it makes to the scheduler.

A rollout says what it needs before it sends the first prompt, then reports how far it is. The training stages ask for
their GPUs as a whole. Before a stage gives them back, its processes have dropped what they held.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from muster.demos import tasks
from muster.demos.generation import GenerationStage
from muster.demos.occupancy import Occupancy
from muster.demos.orders import INFER, TRAIN, Generate, Group
from muster.demos.processes import DemoProcesses, RankProcess
from muster.demos.tasks import Task
from muster.demos.training import TrainingStage
from muster.sharing import ClusterSpec, PipelineClient, Priority
from muster.sharing.remote import RemoteScheduler

ANSWERS = 16  # per prompt, generated together
_SPREAD = 0.7  # of the time that a prompt takes: most are quick, a few make the tail
_LONGEST = 6.0  # times the median
_JUDGING = 100.0  # digits' time, in place of code that is run or a judge that is asked: no GPU is needed for it


@dataclass(frozen=True)
class Recipe:
    """What a pipeline is."""

    name: str
    letter: str
    task: Task
    train_gpus: tuple[int, ...]
    infer_gpus: tuple[int, ...]
    prompts: int
    pace_s: float  # per digit, in the median
    rollouts: int
    seed: int

    @property
    def judging_s(self) -> float:
        return _JUDGING * self.pace_s

    @property
    def clusters(self) -> Mapping[str, ClusterSpec]:
        return {
            TRAIN: ClusterSpec(gpus=self.train_gpus),
            INFER: ClusterSpec(gpus=self.infer_gpus, slots_per_bundle=ANSWERS),
        }

    def orders(self, rollout: int) -> list[Generate]:
        """A rollout's prompts. What is sampled depends on the seed and the weights alone, not on who gets which GPU."""
        dice = random.Random(f"{self.seed}/{self.name}/{rollout}")
        return [
            Generate(
                prompt,
                ANSWERS,
                seed=dice.getrandbits(32),
                pace_s=self.pace_s * min(_LONGEST, dice.lognormvariate(0.0, _SPREAD)),
            )
            for prompt in tasks.prompts(self.prompts, dice)
        ]

    def groups(self, orders: list[Generate], answers: list[tuple[tasks.Digits, ...]]) -> tuple[Group, ...]:
        """What was said, with what it earned."""
        return tuple(
            Group(order.prompt, said, tuple(self.task.reward(order.prompt, one) for one in said))
            for order, said in zip(orders, answers, strict=True)
        )


class DemoPipeline:
    """One pipeline, with a process for every GPU of every stage."""

    def __init__(
        self,
        recipe: Recipe,
        scheduler: RemoteScheduler,
        processes: DemoProcesses,
        folder: Path,
        occupancy: Occupancy,
        say: Callable[[str], None],
    ) -> None:
        self.recipe, self._scheduler, self._occupancy, self._say = recipe, scheduler, occupancy, say
        name, spec = recipe.name, recipe.clusters[INFER]
        self.trainers = [processes.start(f"{name} trainer {rank}", TRAIN) for rank in range(len(recipe.train_gpus))]
        self.generators = [processes.start(f"{name} generator {rank}", INFER) for rank in range(len(recipe.infer_gpus))]
        folder.mkdir()
        self.training = TrainingStage(self.trainers, folder)
        self.generation = GenerationStage(
            self.generators, spec, lambda: self.training.newest, occupancy, recipe.letter.lower()
        )
        self._client = PipelineClient(scheduler, name)
        self.rewards: list[float] = []

    @property
    def ranks(self) -> list[RankProcess]:
        return self.trainers + self.generators

    async def register(self) -> None:
        """Make it known to the scheduler."""
        name = self.recipe.name
        await self._scheduler.register_pipeline(name, clusters=self.recipe.clusters, hooks=self.generation)
        await self._scheduler.admit_pipeline(name)

    async def run(self) -> None:
        name = self.recipe.name
        await self.training.join()
        gpus = await self._scheduler.request_gpus(name, TRAIN, Priority.INITIALIZATION)
        async with self._on(gpus):
            await self.training.begin(self.recipe.seed)
        await self._scheduler.notify_release_gpus(name, TRAIN)
        for rollout in range(self.recipe.rollouts):
            await self._step(rollout)

    async def _step(self, rollout: int) -> None:
        name, started = self.recipe.name, self._occupancy.clock()
        groups = await self._generate(rollout)
        generated = self._occupancy.clock()
        await asyncio.sleep(self.recipe.judging_s)
        judged = self._occupancy.clock()
        gpus = await self._scheduler.request_gpus(name, TRAIN, Priority.OLD_LOG_PROBS)
        async with self._on(gpus):
            await self.training.load()
            old = await self.training.log_probs(groups)
        gpus = await self._scheduler.notify_release_then_request_gpus(
            name, release=TRAIN, request=TRAIN, priority=Priority.ACTOR_TRAINING
        )
        async with self._on(gpus):
            await self.training.load()
            await self.training.learn(groups, old, seed=rollout)
            await self.training.publish()
        await self._scheduler.notify_release_gpus(name, TRAIN)
        self._tell(rollout, generated - started, self._occupancy.clock() - judged)

    async def _generate(self, rollout: int) -> tuple[Group, ...]:
        orders = self.recipe.orders(rollout)
        target = len(orders) * ANSWERS
        await self._client.signal_rollout_demand(rollout, target)
        await self._client.begin_progress_batch(target)
        answers = await self.generation.answer(orders, self._client.bump_completed)
        await self._client.end_progress_batch()
        await self._scheduler.await_release_gpus(self.recipe.name, INFER)  # nobody goes on with the old weights
        groups = self.recipe.groups(orders, answers)
        self.rewards.append(fmean(reward for group in groups for reward in group.rewards))
        return groups

    @asynccontextmanager
    async def _on(self, gpus: list[int]) -> AsyncIterator[None]:
        """A training stage on GPUs that were granted; it has left them at the end of the block."""
        self._occupancy.take(gpus, self.recipe.letter)
        yield
        await self.training.unload()
        self._occupancy.give(gpus, self.recipe.letter)

    def _tell(self, rollout: int, generating_s: float, training_s: float) -> None:
        self._say(
            f"{self.recipe.name} rollout {rollout + 1}/{self.recipe.rollouts}: mean reward {self.rewards[-1]:.3f}, "
            f"generated in {generating_s:.1f} s, trained in {training_s:.1f} s"
        )

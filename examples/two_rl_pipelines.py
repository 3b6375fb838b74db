"""Two RL pipelines learn on the same four GPUs: each trains on a pair of its own, both generate wherever there is room.

The scheduler runs inside this program, GPUs are imitated and the policy is a bandit's, so neither a GPU nor torch is
needed and the whole shape of a pipeline fits on two pages. `muster share demo` does it with torch and real processes.

    .venv/bin/python examples/two_rl_pipelines.py
"""

from __future__ import annotations

import argparse
import asyncio
import math
import random
from collections.abc import Mapping, Sequence

from muster.sharing import ClusterSpec, Pool, Priority, Scheduler
from muster.sharing.hooks import PipelineClient

GPUS, ARMS = 4, 6
MOVE_S, TRAIN_S, LOOK_S = 0.02, 0.1, 0.02


class Bandit:
    """A policy over arms that pay differently, learned from rewards above the mean."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.pays = [self.random.random() for _ in range(ARMS)]
        self.logits = [0.0] * ARMS

    def play(self) -> tuple[int, float]:
        arm = self.random.choices(range(ARMS), [math.exp(logit) for logit in self.logits])[0]
        return arm, self.pays[arm] + self.random.gauss(0, 0.05)

    def learn(self, played: Sequence[tuple[int, float]]) -> float:
        mean = sum(reward for _, reward in played) / len(played)
        for arm, reward in played:
            self.logits[arm] += 0.5 * (reward - mean)
        return mean


class Engine:
    """Generation that can be moved: a worker per bundle that is awake. These two calls are what the scheduler needs."""

    def __init__(self, policy: Bandit) -> None:
        self.policy = policy
        self.awake: set[int] = set()
        self.some = asyncio.Event()

    async def shrink(self, ranks: Sequence[int]) -> None:
        self.awake -= set(ranks)
        if not self.awake:
            self.some.clear()
        await asyncio.sleep(MOVE_S)

    async def expand(self, ranks: Mapping[int, Sequence[int]]) -> None:
        await asyncio.sleep(MOVE_S)
        self.awake |= set(ranks)
        self.some.set()

    async def generate(self, client: PipelineClient, batch: int) -> list[tuple[int, float]]:
        played: list[tuple[int, float]] = []
        while len(played) < batch:
            await self.some.wait()
            playing = set(self.awake)
            await asyncio.sleep(self.policy.random.uniform(0.01, 0.05))  # a trajectory takes its time
            for _ in playing & self.awake:  # what is no longer awake is played again elsewhere
                played.append(self.policy.play())
                await client.bump_completed()
        return played


async def pipeline(scheduler: Scheduler, name: str, pair: list[int], batch: int, steps: int) -> None:
    policy = Bandit(seed=batch)
    engine = Engine(policy)
    clusters = {"actor_train": ClusterSpec(gpus=pair), "actor_infer": ClusterSpec(gpus=list(range(GPUS)))}
    await scheduler.register_pipeline(name, clusters=clusters, hooks=engine)
    await scheduler.admit_pipeline(name)
    client = PipelineClient(scheduler, name)
    for step in range(steps):
        await client.signal_rollout_demand(step, batch)  # recorded first: nobody loses their turn
        await client.begin_progress_batch(batch)
        played = await engine.generate(client, batch)
        await client.end_progress_batch()
        gpus = await scheduler.request_gpus(name, "actor_train", Priority.ACTOR_TRAINING)
        await asyncio.sleep(TRAIN_S)
        print(
            f"{name} step {step}: mean reward {policy.learn(played):.3f} of {max(policy.pays):.3f}, trained on {gpus}"
        )
        await scheduler.await_release_gpus(name, "actor_infer")  # new weights: all of it has to come down
        await scheduler.notify_release_gpus(name, "actor_train")
    await scheduler.unregister_pipeline(name)


async def look(scheduler: Scheduler, lanes: list[str]) -> None:
    """Who has each GPU, again and again: a or b generates, A or B trains."""
    while True:
        held = scheduler.snapshot().leases
        for gpu in range(GPUS):
            name = held[gpu].pipeline if gpu in held else "."
            lanes[gpu] += name.upper() if gpu in held and held[gpu].cluster == "actor_train" else name
        await asyncio.sleep(LOOK_S)


async def main(steps: int) -> None:
    scheduler, lanes = Scheduler(Pool(gpus=GPUS, gpus_per_node=GPUS), min_turn_s=0.1), [""] * GPUS
    await scheduler.start()
    looking = asyncio.create_task(look(scheduler, lanes))
    await asyncio.gather(pipeline(scheduler, "a", [0, 1], 12, steps), pipeline(scheduler, "b", [2, 3], 48, steps))
    looking.cancel()
    await scheduler.stop()
    print("\n".join(f"GPU {gpu}  {lane[:110]}" for gpu, lane in enumerate(lanes)))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8)
    asyncio.run(main(parser.parse_args().steps))

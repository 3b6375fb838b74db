"""A pipeline in a process of its own: runs out and trains through a remote scheduler, and says what it does.

sharer.py URL NAME TRAIN_GPU,… ROLLOUTS
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping, Sequence

from muster.sharing import ClusterSpec, PipelineClient, Priority
from muster.sharing.remote import connect

BATCH = 16
SAMPLE_S = 0.01  # how long a sample takes, so that two pipelines meet


def say(text: str) -> None:
    print(text, flush=True)


class Engine:
    """Which ranks are awake, and nothing else."""

    def __init__(self) -> None:
        self.awake: set[int] = set()

    async def shrink(self, ranks: Sequence[int]) -> None:
        self.awake -= set(ranks)
        say(f"shrunk {sorted(ranks)}")

    async def expand(self, ranks: Mapping[int, Sequence[int]]) -> None:
        self.awake |= set(ranks)
        say(f"expanded {sorted(ranks)}")

    async def vacated(self, gpus: Sequence[int]) -> bool:
        return not self.awake & set(gpus)


async def main(url: str, name: str, train: list[int], infer: list[int], rollouts: int) -> None:
    engine = Engine()
    async with await connect(url) as scheduler:
        clusters = {"actor_train": ClusterSpec(train), "actor_infer": ClusterSpec(infer)}
        await scheduler.register_pipeline(name, clusters, engine)
        await scheduler.admit_pipeline(name)
        say("registered")
        client = PipelineClient(scheduler, name)
        for number in range(rollouts):
            await client.signal_rollout_demand(f"r{number}", BATCH)
            await client.begin_progress_batch(BATCH)
            for _ in range(BATCH):
                await asyncio.sleep(SAMPLE_S)
                await client.bump_completed()
            await client.end_progress_batch()
            await scheduler.await_release_gpus(name)
            got = await scheduler.request_gpus(name, "actor_train", Priority.ACTOR_TRAINING, timeout=60)
            await scheduler.notify_release_gpus(name, "actor_train")
            say(f"rollout {number} trained on {got}")
        await scheduler.unregister_pipeline(name)
    say("done")


if __name__ == "__main__":
    _, at, who, *maps, count = sys.argv
    trained, inferred = ([int(gpu) for gpu in one.split(",")] for one in maps)
    asyncio.run(main(at, who, trained, inferred, int(count)))

"""A process in which two pipelines share GPUs as fast as they can and say what they were promised, until it is killed.

Each line is a promise that was kept in the journal before it was made: a pipeline, then `open TARGET`, `clear`, `hold`
or `free`.
"""

from __future__ import annotations

import asyncio
import random
import sys

from muster.sharing import ClusterSpec, Pool, Priority, ProgressReport, Scheduler
from tests.sharing.scripted import Hooks, generating, training

MAPS = {
    "p1": {"actor_train": ClusterSpec([0, 1]), "actor_infer": ClusterSpec([0, 1, 2, 3])},
    "p2": {"actor_train": ClusterSpec([1, 2]), "actor_infer": ClusterSpec([0, 1, 2, 3])},
}


async def work(path: str, seed: int) -> None:
    scheduler = Scheduler(Pool(gpus=4, gpus_per_node=4), path)
    await scheduler.start()
    for name, clusters in MAPS.items():
        await scheduler.register_pipeline(name, clusters=clusters, hooks=Hooks())
        await scheduler.admit_pipeline(name)
    for name in MAPS:
        await scheduler.await_release_gpus(name)
        await scheduler.notify_release_gpus(name, "actor_train")
    print("ready", flush=True)
    await asyncio.gather(*(take_part(scheduler, name, random.Random(f"{name} {seed}")) for name in MAPS))


async def take_part(scheduler: Scheduler, name: str, dice: random.Random) -> None:
    def promised(what: str) -> None:
        print(name, what, flush=True)

    while True:
        target = dice.randint(1, 1000)
        await generating(scheduler, name, target)
        promised(f"open {target}")
        await scheduler.report_progress(ProgressReport(name, 0, target + 1))
        promised(f"open {target + 1}")
        await scheduler.await_release_gpus(name)
        promised("clear")
        await training(scheduler, name)
        promised("hold")
        await scheduler.notify_release_then_request_gpus(name, "actor_train", "actor_train", Priority.OLD_LOG_PROBS)
        promised("hold")
        await scheduler.notify_release_gpus(name, "actor_train")
        promised("free")


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1], int(sys.argv[2])))

"""A process that runs a scheduler as fast as it can and says what it was promised, until it is killed.

Each line is a promise that was kept in the journal before it was made: `hold GPUS`, `free`, `open TARGET`, `clear`.
"""

from __future__ import annotations

import asyncio
import random
import sys

from muster.sharing import Pool, Priority, ProgressReport, Scheduler
from tests.sharing.scripted import FOUR, Hooks, generating, training


async def work(path: str, seed: int) -> None:
    dice = random.Random(seed)
    scheduler = Scheduler(Pool(gpus=4, gpus_per_node=4), path)
    await scheduler.start()
    await scheduler.register_pipeline("p1", clusters=FOUR, hooks=Hooks())
    await scheduler.admit_pipeline("p1")
    await scheduler.await_release_gpus("p1")
    await scheduler.notify_release_gpus("p1", "actor_train")
    print("ready", flush=True)
    while True:
        target = dice.randint(1, 1000)
        await generating(scheduler, "p1", target)
        print(f"open {target}", flush=True)
        await scheduler.report_progress(ProgressReport("p1", 0, target + 1))
        print(f"open {target + 1}", flush=True)
        await scheduler.await_release_gpus("p1")
        print("clear", flush=True)
        await training(scheduler, "p1")
        print("hold", flush=True)
        await scheduler.notify_release_then_request_gpus("p1", "actor_train", "actor_train", Priority.OLD_LOG_PROBS)
        print("hold", flush=True)
        await scheduler.notify_release_gpus("p1", "actor_train")
        print("free", flush=True)


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1], int(sys.argv[2])))

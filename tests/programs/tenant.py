"""A rank whose training is a pipeline of a pool: takes the GPUs of its stage, and never gives them back.

tenant.py URL TOKEN FOLDER
It leaves its pid in FOLDER/holds-ROUND when it has them, and ends when there is FOLDER/go, without a word to the pool.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from muster.sharing import ClusterSpec, Priority
from muster.sharing.remote import connect


class Engine:
    async def shrink(self, ranks: Sequence[int]) -> None: ...

    async def expand(self, ranks: Mapping[int, Sequence[int]]) -> None: ...


async def main(url: str, token: str, folder: Path) -> None:
    scheduler = await connect(url, token)
    clusters = {"actor_train": ClusterSpec([0, 1]), "actor_infer": ClusterSpec([0, 1, 2, 3])}
    await scheduler.register_pipeline("p1", clusters, Engine())
    await scheduler.admit_pipeline("p1")
    number = int(os.environ["MUSTER_ROUND"])
    # Each round begins with another stage: what is left of the round before does not answer it.
    await scheduler.request_gpus("p1", "actor_train", Priority.ACTOR_TRAINING if number else Priority.OLD_LOG_PROBS)
    draft = folder / f"draft-{number}"
    draft.write_text(str(os.getpid()))
    draft.rename(folder / f"holds-{number}")
    while not (folder / "go").exists():
        await asyncio.sleep(0.02)
    os._exit(0)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))

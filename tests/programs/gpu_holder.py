"""A pipeline that holds its training GPUs until it is killed, and may start a child first.

gpu_holder.py URL KIND [PIDS]

KIND: none; hook (the pipeline hangs in a hook); or the way in which it starts a child: before (before it registers),
spawned (with the environment), forked (without exec), emptied (with an empty environment), orphaned (by a shell that
exits).
PIDS: the pids that it registers; {liar} stands for its own.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence

from muster.sharing import ClusterSpec, Priority
from muster.sharing.remote import connect

LONG = ("sleep", "600")


class Engine:
    def __init__(self, *, hangs: bool) -> None:
        self.hangs = hangs

    async def shrink(self, ranks: Sequence[int]) -> None: ...

    async def expand(self, ranks: Mapping[int, Sequence[int]]) -> None:
        if self.hangs:
            print("expanding", flush=True)
            await asyncio.Event().wait()


def start(kind: str) -> int:
    if kind == "orphaned":
        shell = subprocess.run(["sh", "-c", "sleep 600 >&2 & echo $!"], stdout=subprocess.PIPE, check=True)
        return int(shell.stdout)
    if kind == "forked":
        if child := os.fork():
            return child
        os.setsid()
        time.sleep(600)
        os._exit(0)
    env = {"PATH": os.environ["PATH"], "MARK_OF_TEST": os.environ["MARK_OF_TEST"]} if kind == "emptied" else None
    return subprocess.Popen(LONG, env=env, start_new_session=True).pid


async def main(url: str, kind: str, pids: str) -> None:
    if kind == "before":
        print("child", start(kind), flush=True)
    async with await connect(url) as scheduler:
        if pids:
            scheduler.name_ranks([int(one) for one in pids.replace("{liar}", str(os.getpid())).split(",")])
        clusters = {"actor_train": ClusterSpec([0, 1]), "actor_infer": ClusterSpec([0, 1, 2, 3])}
        await scheduler.register_pipeline("p1", clusters, Engine(hangs=kind == "hook"))
        await scheduler.admit_pipeline("p1")
        if kind == "hook":
            await scheduler.request_gpus("p1", "actor_infer", Priority.GENERATION, 8)
        await scheduler.request_gpus("p1", "actor_train", Priority.ACTOR_TRAINING)
        if kind not in ("none", "before"):
            print("child", start(kind), flush=True)
        print("holds", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3] if len(sys.argv) > 3 else ""))

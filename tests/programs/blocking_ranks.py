"""A pipeline that blocks, on one rank or several: blocking_ranks.py WHAT.

`holds`: it trains until it is interrupted. `works`: each rank generates and trains twice, and says on what.
`fails`: rank 1 fails in its training.
The control plane and the ranks are in the environment.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Mapping, Sequence

from muster.sharing.sync import SharedPool, connect


class Engine:
    def __init__(self) -> None:
        self.awake: set[int] = set()

    async def shrink(self, ranks: Sequence[int]) -> None:
        self.awake -= set(ranks)

    async def expand(self, ranks: Mapping[int, Sequence[int]]) -> None:
        self.awake |= set(ranks)


def works(pool: SharedPool, engine: Engine) -> None:
    for step in range(2):
        with pool.generation(step, 4) as rollout:
            with rollout.turn() as turn:
                assert engine.awake, "it is awake here, on this rank"
                print("generates on", turn.gpus, flush=True)
            rollout.completed(2)
        assert not engine.awake
        with pool.training() as stage:
            print("trains on", stage.gpus, flush=True)


def main(what: str) -> None:
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    engine = Engine()
    pool = connect("p1", gpus=[0, 1], engine=engine)
    if size > 1:
        import torch.distributed

        torch.distributed.init_process_group("gloo")
    if what == "works":
        works(pool, engine)
        print("ends", flush=True)
        return
    with pool.training():
        print("holds", flush=True)
        if what == "holds":
            signal.pause()
        elif rank == 1:
            raise ValueError("no memory")
    print("went on", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

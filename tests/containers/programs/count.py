"""A rank that counts with the others over gloo, from where the furthest of them was, and remembers where it is.

usage: count.py STEPS [FOLDER]    FOLDER: where it remembers; ranks of one Pod have one
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import muster

STEP_S = 0.05


def main() -> None:
    last, folder = int(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else "/tmp")
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    noted = folder / "step"
    start = torch.tensor([int(noted.read_text()) if noted.exists() else 0])
    dist.all_reduce(start, op=dist.ReduceOp.MAX)
    step = int(start)
    print(f"round {os.environ['MUSTER_ROUND']}: rank {rank} of {world} from step {step}", flush=True)
    while step < last:
        together = torch.ones(1)
        dist.all_reduce(together)
        assert together.item() == world
        step += 1
        muster.progress(step)
        draft = folder / f"step.{rank}"
        draft.write_text(str(step))
        draft.rename(noted)
        time.sleep(STEP_S)
    print(f"rank {rank} is done at step {step}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

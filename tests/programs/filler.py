"""A training that may have any size: each step is an all-reduce, and its state is kept.

usage: filler.py DIR SECONDS_PER_STEP    DIR/stop: the end. DIR/steps.log has a line for each begin of a rank, for each
step whose commit has returned on rank 0, and for each that rank 0 knew to be safe: what (begin, step, safe), time,
round, ranks, step, rank, devices of this rank
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import muster

folder, pause = Path(sys.argv[1]), float(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, ranks, number = dist.get_rank(), dist.get_world_size(), os.environ["MUSTER_ROUND"]
weights, stop = torch.zeros(1 << 12), torch.zeros(1)
state = muster.State(weights=weights, overhead=1.0)
told = os.open(folder / "steps.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)


def tell(what: str, step: int) -> None:
    devices = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    os.write(told, f"{what} {time.time():.6f} {number} {ranks} {step} {rank} {devices}\n".encode())


step = safe = state.restore()
tell("begin", step)
while True:
    grown = torch.ones(1 << 12) / ranks
    dist.all_reduce(grown)
    weights += grown
    time.sleep(pause)
    step += 1
    state.commit(step)
    if rank == 0:
        tell("step", step)
        if (state.saved.step or 0) > safe:
            safe = state.saved.step or 0
            tell("safe", safe)
    muster.progress(step)
    stop.fill_(float((folder / "stop").exists()))
    dist.all_reduce(stop)
    if stop.item():
        break

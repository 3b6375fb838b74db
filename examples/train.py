"""A small DDP training on gloo that survives anything: it saves every step and continues from what it finds.

It runs under muster, under torchrun, and alone: python examples/train.py CHECKPOINT [--steps N]
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import muster

parser = argparse.ArgumentParser()
parser.add_argument("checkpoint", type=Path)
parser.add_argument("--steps", type=int, default=200)
given = parser.parse_args()

if "RANK" not in os.environ:  # nobody launched it: a world of one
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
attempt = os.environ.get("MUSTER_ROUND") or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
step = 0
if given.checkpoint.exists():
    saved = torch.load(given.checkpoint)
    model.load_state_dict(saved["model"])
    step = saved["step"]
print(f"round {attempt}: rank {rank} of {dist.get_world_size()} starts at step {step}\n", end="")  # lines do not mix
trained = DistributedDataParallel(model)
optimizer = torch.optim.Adam(trained.parameters(), lr=0.01)
while step < given.steps:
    x = torch.randn(64, 8)
    loss = ((trained(x) - x.square().sum(dim=1, keepdim=True)) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    muster.progress(step)
    muster.log(loss=loss.item())
    if rank == 0:
        draft = given.checkpoint.with_suffix(".new")
        torch.save({"model": model.state_dict(), "step": step}, draft)
        draft.rename(given.checkpoint)
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}")
    time.sleep(0.02)
dist.destroy_process_group()

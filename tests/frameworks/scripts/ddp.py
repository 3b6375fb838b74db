"""DDP with a checkpoint of its own every few steps: ddp.py FOLDER STEPS EVERY PAUSE."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

folder, steps, every, pause = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
trained = DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
folder.mkdir(parents=True, exist_ok=True)
checkpoint = folder / "checkpoint.pt"
step = 0
if checkpoint.exists():
    saved = torch.load(checkpoint)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    step = saved["step"]
place = f"rank {rank}/{world} pid {os.getpid()}"
print(f"begins at step {step} as {place} at {time.monotonic():.4f}\n", end="", flush=True)
while step < steps:
    x = torch.randn(16, 8)
    loss = ((trained(x) - x.square().sum(dim=1, keepdim=True)) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    print(f"step {step} of {place} at {time.monotonic():.4f}\n", end="", flush=True)
    if step % every == 0 and rank == 0:
        draft = checkpoint.with_suffix(".new")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, draft)
        draft.rename(checkpoint)
    time.sleep(pause)
print(f"ends at step {step} as rank {rank}/{world}\n", end="", flush=True)
dist.destroy_process_group()

"""FSDP2 with torch's distributed checkpoint: fsdp2_dcp.py FOLDER STEPS EVERY PAUSE."""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

folder, steps, every, pause = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
mesh = init_device_mesh("cpu", (world,))
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(12, 24), torch.nn.ReLU(), torch.nn.Linear(24, 12))
for layer in (model[0], model[2]):
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
folder.mkdir(parents=True, exist_ok=True)
# dcp writes .metadata last: a folder without it is not whole
whole = sorted(path.parent for path in folder.glob("step-*/.metadata"))
step = 0
if whole:
    weights, moments = get_state_dict(model, optimizer)
    saved = {"model": weights, "optimizer": moments, "step": 0}
    dcp.load(saved, checkpoint_id=whole[-1])
    set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    step = saved["step"]
place = f"rank {rank}/{world} pid {os.getpid()}"
print(f"begins at step {step} as {place} at {time.monotonic():.4f}\n", end="", flush=True)
while step < steps:
    x = torch.randn(16, 12)
    loss = ((model(x) - x.square()) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    print(f"step {step} of {place} at {time.monotonic():.4f}\n", end="", flush=True)
    if step % every == 0:
        weights, moments = get_state_dict(model, optimizer)
        dcp.save({"model": weights, "optimizer": moments, "step": step}, checkpoint_id=folder / f"step-{step:06d}")
    time.sleep(pause)
print(f"ends at step {step} as rank {rank}/{world}\n", end="", flush=True)
dist.destroy_process_group()

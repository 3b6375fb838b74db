"""A real DDP training on gloo that continues from its checkpoint. usage: ddp.py DIR"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import muster

folder = Path(sys.argv[1])
checkpoint = folder / "checkpoint.pt"
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
step = 0
if checkpoint.exists():
    saved = torch.load(checkpoint)
    model.load_state_dict(saved["model"])
    step = saved["step"]
trained = DistributedDataParallel(model)
optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
told = {"RANK": rank, "WORLD_SIZE": world, "MUSTER_ROUND": os.environ["MUSTER_ROUND"], "from_step": step}
note = folder / f"start-{os.environ['MUSTER_ROUND']}-{rank}-{os.getpid()}.json"
note.with_suffix(".new").write_text(json.dumps(told))
note.with_suffix(".new").rename(note)
while True:
    x = torch.randn(8, 4)
    loss = ((trained(x) - x.sum(dim=1, keepdim=True)) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    step += 1
    muster.progress(step)
    if rank == 0:
        torch.save({"model": model.state_dict(), "step": step}, checkpoint.with_suffix(".new"))
        checkpoint.with_suffix(".new").rename(checkpoint)
    stop = torch.tensor(float((folder / "go").exists()))
    dist.all_reduce(stop, op=dist.ReduceOp.MIN)
    if stop.item():
        break
    time.sleep(0.01)
total = torch.stack([parameter.sum() for parameter in model.parameters()]).sum()
same = [torch.zeros(()) for _ in range(world)]
dist.all_gather(same, total.detach())
assert all(torch.equal(same[0], other) for other in same), "replicas differ"
dist.destroy_process_group()

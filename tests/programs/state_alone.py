"""A rank without an agent: `state_alone.py FOLDER STEPS`. Ranks add up, and each has a number of its own."""

from __future__ import annotations

import os
import sys
from datetime import timedelta

import torch
import torch.distributed as dist

import muster

dist.init_process_group("gloo")
rank = dist.get_rank()
total, own = torch.zeros(1, dtype=torch.float64), torch.full((1,), float(rank))
state = muster.State(durable=sys.argv[1], durable_every=timedelta(0), total=total, own=own)
begin = state.restore()
for step in range(begin, int(sys.argv[2])):
    part = torch.full((1,), float(step * (rank + 1)), dtype=torch.float64)
    dist.all_reduce(part)
    total += part
    state.commit(step + 1)
print(f"{os.environ['RANK']} went on from {begin} and came to {total.item() + own.item()}")
dist.destroy_process_group()

"""A training that keeps its state only in a folder: `durable.py FOLDER STEPS`. It prints its steps and totals."""

from __future__ import annotations

import sys
from datetime import timedelta

import torch

import muster

total = torch.zeros(1000, dtype=torch.float64)
state = muster.State(durable=sys.argv[1], durable_every=timedelta(0), total=total)
begin = state.restore()
print(f"begins at {begin} with {total[0].item():g}", flush=True)
for step in range(begin, int(sys.argv[2])):
    total += step
    state.commit(step + 1)
    state.wait()
print(f"ends with {total[0].item():g}", flush=True)

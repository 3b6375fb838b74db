"""Keeps its state with muster.State, step after step. usage: keeper.py SECONDS_PER_STEP STEPS"""

import sys
import time

import torch

import muster

seconds, steps = float(sys.argv[1]), int(sys.argv[2])
weights = torch.zeros(1 << 16)
state = muster.State(weights=weights)
begun = state.restore()
print(f"from step {begun}", flush=True)
for step in range(begun, steps):
    weights += 1
    time.sleep(seconds)
    state.commit(step + 1)

"""Ranks with structured tensors that are easily mistaken for each other: `masks.py FOLDER`.

Each rank begins with masks, one-hot rows and permutations of its own, and changes them at every step. It logs a
hash of its tensors at each step, and after a restore.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

import muster

ROWS, COLUMNS, BLOCK = 64, 4096, 32
rank, number = int(os.environ["RANK"]), int(os.environ["MUSTER_ROUND"])
squares = (torch.arange(ROWS)[:, None] // BLOCK + torch.arange(COLUMNS)[None, :] // BLOCK) % 2
mask = squares.float() if rank == 0 else 1 - squares.float()
one_hot = torch.zeros(16, 4096)
one_hot[:, rank] = 1
permutation = torch.eye(128)[torch.randperm(128, generator=torch.Generator().manual_seed(rank))]
late = torch.zeros(1 << 16)  # the same on both ranks until a step changes one number
layer = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
kept = (mask, one_hot, permutation, late)
state = muster.State(
    layer=layer,
    optimizer=optimizer,
    overhead=1.0,
    mask=mask,
    one_hot=one_hot,
    permutation=permutation,
    late=late,
)
begin = state.restore()
log = os.open(Path(sys.argv[1]) / "masks.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)


def report(kind: str, step: int) -> None:
    digest = hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in kept)).hexdigest()[:16]
    os.write(log, f"{kind} {number} {rank} {step} {digest} {os.environ['MUSTER_WORKER']}\n".encode())


report("begin", begin)
dist.init_process_group("gloo")
for step in range(begin, 1_000_000):
    one_hot.copy_(one_hot.roll(1, 1))
    permutation.copy_(permutation.roll(1, 0))
    late[(step * 7919 + 1) % len(late)] = rank + 1
    optimizer.step()
    dist.barrier()
    report("commit", step + 1)
    state.commit(step + 1)
    time.sleep(0.05)

"""A small transformer, sharded with FSDP2, that keeps its state with muster.State: it goes on in a world of any size.

It runs under muster, under torchrun, and alone: python examples/fsdp2_transformer.py LOSSES [--steps N]

A batch depends on the step alone, and each rank takes its part of it: so the loss does not depend on how many there
are, but for rounding. Rank 0 appends `STEP LOSS WORLD ROUND` to LOSSES. `fsdp2_survives.py` disturbs it and draws that.
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import muster

BATCH, LENGTH, WORDS, WIDTH = 24, 32, 61, 96  # 24 and 96 are divided by worlds of 1, 2, 3, 4 and 6


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.attention = torch.nn.MultiheadAttention(WIDTH, 4, batch_first=True)
        wide, narrow = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)
        self.inner = torch.nn.Sequential(torch.nn.LayerNorm(WIDTH), wide, torch.nn.GELU(), narrow)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        x = x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0]
        after: torch.Tensor = x + self.inner(x)
        return after


class Transformer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = torch.nn.Embedding(WORDS, WIDTH)
        self.places = torch.nn.Embedding(LENGTH, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.head = torch.nn.Linear(WIDTH, WORDS)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.words(text) + self.places(torch.arange(LENGTH))
        mask = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), diagonal=1)
        for block in self.blocks:
            x = block(x, mask)
        scores: torch.Tensor = self.head(x.flatten(0, 1))
        return scores


def batch(step: int) -> torch.Tensor:
    """Rows in which each word follows from the one before, by a rule that the row has for itself; some are noise."""
    made = torch.Generator().manual_seed(step)
    rules = torch.tensor([[2, 1], [3, 5], [7, 11]])[torch.randint(3, (BATCH,), generator=made)]
    rows = [torch.randint(WORDS, (BATCH,), generator=made)]
    for _ in range(LENGTH):
        rows.append((rows[-1] * rules[:, 0] + rules[:, 1]) % WORDS)
    text = torch.stack(rows, dim=1)
    noise = torch.rand(text.shape, generator=made) < 0.02
    return torch.where(noise, torch.randint(WORDS, text.shape, generator=made), text)


parser = argparse.ArgumentParser()
parser.add_argument("losses", type=Path)
parser.add_argument("--steps", type=int, default=200)
given = parser.parse_args()

if "RANK" not in os.environ:  # nobody launched it: a world of one
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
attempt = int(os.environ.get("MUSTER_ROUND") or os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
torch.set_num_threads(1)
dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
model = Transformer()
mesh = init_device_mesh("cpu", (world,))
for part in [*model.blocks, model]:
    fully_shard(part, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
state = muster.State(model=model, optimizer=optimizer, overhead=1.0)  # steps are short here: keep each of them
step = state.restore()
print(f"round {attempt}: rank {rank} of {world} starts at step {step}\n", end="", flush=True)
while step < given.steps:
    text = batch(step)[rank * BATCH // world : (rank + 1) * BATCH // world]
    loss = functional.cross_entropy(model(text[:, :-1]), text[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    shown = loss.detach() / world
    dist.all_reduce(shown)
    step += 1
    state.commit(step)
    if rank == 0:
        with given.losses.open("a") as out:
            out.write(f"{step} {shown.item()!r} {world} {attempt}\n")
        if step % 10 == 0:
            print(f"step {step}: loss {shown.item():.4f}", flush=True)
state.wait()
dist.destroy_process_group()

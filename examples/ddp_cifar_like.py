"""A small CNN on images like CIFAR's, with DDP: it saves as it goes, and goes on from there after any loss.

Nothing in it is about muster but `muster.progress`, which is optional. The images are generated, so nothing is
downloaded: ten classes, each a pattern of its own under noise.

Alone:         .venv/bin/python examples/ddp_cifar_like.py
With a spare:  .venv/bin/muster run examples/ddp_cifar_like.py --name cifar --workers 2 --spares 1 -- --steps 2000
Kill a worker: .venv/bin/muster kill cifar 1 --worker
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import muster

CLASSES, BATCH = 10, 32


def network() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(4)),
        *(nn.Flatten(), nn.Linear(16 * 2 * 2, CLASSES)),
    )


def batch(patterns: Tensor, step: int, rank: int) -> tuple[Tensor, Tensor]:
    """The same for the same step and rank, also in a later round."""
    draw = torch.Generator().manual_seed(step * 1000 + rank)
    labels = torch.randint(CLASSES, (BATCH,), generator=draw)
    return patterns[labels] + torch.randn(BATCH, 3, 32, 32, generator=draw), labels


def join() -> int:
    """This process's rank in the world that muster made, or in one of its own."""
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    dist.init_process_group("gloo")
    return dist.get_rank()


def main(steps: int, checkpoint: Path, every: int) -> None:
    torch.set_num_threads(1)
    rank = join()
    torch.manual_seed(0)
    patterns = torch.randn(CLASSES, 3, 32, 32)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    done = 0
    if checkpoint.exists():
        saved = torch.load(checkpoint)
        model.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["step"]
    print(f"rank {rank} of {dist.get_world_size()} starts at step {done}", flush=True)
    for step in range(done, steps):
        images, labels = batch(patterns, step, rank)
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        muster.progress(step + 1)
        if rank == 0 and (step + 1) % every == 0:
            save(
                checkpoint, {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            )
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    dist.destroy_process_group()


def save(checkpoint: Path, state: dict[str, object]) -> None:
    """Whole or not at all: a rank can be killed at any moment."""
    draft = checkpoint.with_suffix(".new")
    torch.save(state, draft)
    draft.rename(checkpoint)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--checkpoint", type=Path, default=Path("cifar-like.pt"))
    parser.add_argument("--every", type=int, default=10, help="save and print every so many steps")
    given = parser.parse_args()
    main(given.steps, given.checkpoint, given.every)

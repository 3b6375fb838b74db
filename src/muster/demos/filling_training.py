"""The training that fills: a small network learns a surface, on however many GPUs nobody else uses at the moment.

usage: filling_training.py FOLDER SECONDS_PER_STEP

Run by the ranks of a training of muster. Data parallel over gloo; its state is kept by `muster.State` at every step, so
that a rank can be taken away at any moment. FOLDER/stop is the end. What each rank does with its GPU is written to
FOLDER/steps.log, by the rank itself, as `step_log` reads it.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from muster import State, progress
from muster.demos import step_log

WIDTH = 64
BATCH = 64  # of each rank
RATE, MOMENTUM = 0.1, 0.9


def network() -> nn.Sequential:
    """The same on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))


def points(step: int, rank: int) -> tuple[Tensor, Tensor]:
    """A batch: where, and how high the surface is there."""
    dice = torch.Generator().manual_seed(1_000 * step + rank)
    places = 2 * torch.rand(BATCH, 2, generator=dice) - 1
    return places, torch.sin(3 * places[:, :1]) * torch.cos(2 * places[:, 1:])


def gradients(model: nn.Module, step: int, rank: int) -> tuple[list[Tensor], Tensor]:
    places, heights = points(step, rank)
    loss = (model(places) - heights).square().mean()
    return list(torch.autograd.grad(loss, list(model.parameters()))), loss.detach()


def averaged(parts: list[Tensor], ranks: int) -> list[Tensor]:
    """Over all ranks, in one message."""
    whole = torch.cat([part.reshape(-1) for part in parts])
    if ranks > 1:
        dist.all_reduce(whole)
    pieces = torch.split(whole / ranks, [part.numel() for part in parts])
    return [piece.reshape(part.shape) for piece, part in zip(pieces, parts, strict=True)]


@torch.no_grad()
def improve(model: nn.Module, momentum: list[Tensor], found: list[Tensor]) -> None:
    """By hand: torch's optimizers import a second's worth of compiler at their first use."""
    for parameter, speed, gradient in zip(model.parameters(), momentum, found, strict=True):
        speed.mul_(MOMENTUM).add_(gradient)
        parameter.sub_(speed, alpha=RATE)


def train(folder: Path, pace_s: float) -> None:
    with step_log.StepLog(folder, os.environ) as log:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        rank, ranks = dist.get_rank(), dist.get_world_size()
        model = network()
        momentum = [torch.zeros_like(one) for one in model.parameters()]
        state = State(model=model, momentum=momentum, overhead=1.0)
        step = state.restore()
        log.restored(step, ranks)
        while True:
            log.begins(step + 1)
            found, loss = gradients(model, step, rank)
            time.sleep(pace_s)  # what a GPU would take
            over = torch.tensor([float((folder / step_log.STOP).exists())])
            *found, loss, over = averaged([*found, loss, over], ranks)
            improve(model, momentum, found)
            step += 1
            state.commit(step)
            log.ends(step, loss.item())
            progress(step)
            if over.item():
                return  # all ranks see the same


if __name__ == "__main__":
    train(Path(sys.argv[1]), float(sys.argv[2]))

"""A Lightning Trainer that goes on from memory at the step at which a worker was lost: one line, `KeepState()`.

It runs alone, under torchrun and under muster, on any CPU, without a download:

    python examples/lightning_trainer.py --steps 100
    muster run examples/lightning_trainer.py --name lightning --workers 2 --spares 1 -- --steps 2000
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

import muster.lightning

parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path, default=Path("lightning-checkpoints"))
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step, to have time to kill something")
parser.add_argument("--overhead", type=float, default=0.03, help="share of the time that copies may take")
given = parser.parse_args()
world, here = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


class Model(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1)
        )

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        inputs, wanted = batch
        return torch.nn.functional.mse_loss(self.net(inputs), wanted)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        return [optimizer], [
            {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999), "interval": "step"}
        ]


class Tell(Callback):
    def on_train_start(self, trainer: Any, _: Any) -> None:
        print(f"rank {trainer.global_rank} of {trainer.world_size} begins at step {trainer.global_step}\n", end="")

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.is_global_zero:
            print(f"step {trainer.global_step}", flush=True)
        time.sleep(given.pause)


lightning.seed_everything(0, verbose=False)
x = torch.randn(256, 8)
loader = DataLoader(TensorDataset(x, x.square().sum(dim=1, keepdim=True)), batch_size=8, shuffle=True)
trainer = lightning.Trainer(
    accelerator="auto",
    devices=here,
    num_nodes=world // here,
    strategy="ddp" if world > 1 else "auto",
    max_steps=given.steps,
    max_epochs=-1,
    callbacks=[
        Tell(),
        ModelCheckpoint(given.folder, every_n_train_steps=50, save_last=True),
        muster.lightning.KeepState(overhead=given.overhead),
    ],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
model = Model()
last = given.folder / "last.ckpt"
trainer.fit(model, loader, ckpt_path=str(last) if last.exists() else None)
if trainer.is_global_zero:
    weights = sum(p.sum() for p in model.parameters())
    print(f"ends at step {trainer.global_step} with weights {float(weights):.9f}")

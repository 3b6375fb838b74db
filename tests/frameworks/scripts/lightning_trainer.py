"""Lightning: lightning_trainer.py FOLDER STEPS EVERY PAUSE [WIDTH]."""

import os
import sys
import time
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

folder, steps, every, pause = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
width = int(sys.argv[5]) if len(sys.argv) > 5 else 32
world, here = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))

    def training_step(self, batch, _):
        x, y = batch
        return torch.nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Tell(Callback):
    def on_train_start(self, trainer, module):
        place = f"rank {trainer.global_rank}/{trainer.world_size} pid {os.getpid()}"
        print(f"begins at step {trainer.global_step} as {place} at {time.monotonic():.4f}\n", end="", flush=True)

    def on_train_batch_end(self, trainer, module, *_):
        place = f"rank {trainer.global_rank}/{trainer.world_size} pid {os.getpid()}"
        print(f"step {trainer.global_step} of {place} at {time.monotonic():.4f}\n", end="", flush=True)
        time.sleep(pause)


lightning.seed_everything(0, verbose=False)
x = torch.randn(512, 8)
loader = DataLoader(TensorDataset(x, x.square().sum(dim=1, keepdim=True)), batch_size=8, shuffle=True)
saves = ModelCheckpoint(folder, every_n_train_steps=every, save_last=True, save_top_k=-1)
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=here,
    num_nodes=world // here,
    strategy="ddp" if world > 1 else "auto",
    max_steps=steps,
    max_epochs=-1,
    callbacks=[Tell(), saves],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
last = folder / "last.ckpt"
trainer.fit(Model(), loader, ckpt_path=str(last) if last.exists() else None)
print(f"ends at step {trainer.global_step} as rank {trainer.global_rank}/{trainer.world_size}\n", end="", flush=True)

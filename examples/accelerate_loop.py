"""A loop of one's own with accelerate that goes on from memory at the step at which a worker was lost.

It runs alone, under torchrun and under muster, on any CPU, without a download:

    python examples/accelerate_loop.py --steps 100
    muster run examples/accelerate_loop.py --name accelerate --workers 2 --spares 1 -- --steps 2000
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader, TensorDataset

import muster.accelerate

parser = argparse.ArgumentParser()
parser.add_argument("--folder", type=Path, default=Path("accelerate-checkpoints"))
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step, to have time to kill something")
parser.add_argument("--overhead", type=float, default=0.03, help="share of the time that copies may take")
given = parser.parse_args()

# A sampler whose order is a matter of seed and epoch: it is the same when the training goes on.
order = DataLoaderConfiguration(use_seedable_sampler=True)
accelerator = Accelerator(cpu=not torch.cuda.is_available(), dataloader_config=order)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
x = torch.randn(256, 8)
loader = DataLoader(TensorDataset(x, x.square().sum(dim=1, keepdim=True)), batch_size=8, shuffle=True)
model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)

state = muster.accelerate.keep_state(accelerator, overhead=given.overhead)
done = 0
if saved := sorted(given.folder.glob("step_*/random_states_0.pkl")):  # what accelerate writes last
    accelerator.load_state(str(saved[-1].parent))
    done = int(saved[-1].parent.name.removeprefix("step_"))
step = state.restore(done)  # whatever is newer
print(f"rank {accelerator.process_index} of {accelerator.num_processes} begins at step {step}\n", end="")
while step < given.steps:
    loader.set_epoch(step // len(loader))
    for inputs, wanted in accelerator.skip_first_batches(loader, step % len(loader)):
        accelerator.backward(torch.nn.functional.mse_loss(model(inputs), wanted))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        step += 1
        state.commit(step)
        if accelerator.is_main_process:
            print(f"step {step}", flush=True)
        if step % 50 == 0:
            accelerator.save_state(str(given.folder / f"step_{step:06d}"))
        time.sleep(given.pause)
        if step >= given.steps:
            break
if accelerator.is_main_process:
    print(f"ends at step {step} with weights {sum(p.sum() for p in model.parameters()).item():.9f}")
accelerator.end_training()

"""A loop of one's own with accelerate: accelerate_loop.py FOLDER STEPS EVERY PAUSE [WIDTH]."""

import os
import sys
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset

folder, steps, every, pause = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
width = int(sys.argv[5]) if len(sys.argv) > 5 else 32
accelerator = Accelerator(cpu=True)
rank, world = accelerator.process_index, accelerator.num_processes
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=1000)
x = torch.randn(512, 8)
loader = DataLoader(TensorDataset(x, x.square().sum(dim=1, keepdim=True)), batch_size=8, shuffle=True)
model, optimizer, scheduler, loader = accelerator.prepare(model, optimizer, scheduler, loader)
step = 0
if saved := sorted(folder.glob("step_*")):
    accelerator.load_state(str(saved[-1]))
    step = int(saved[-1].name.removeprefix("step_"))
place = f"rank {rank}/{world} pid {os.getpid()}"
print(f"begins at step {step} as {place} at {time.monotonic():.4f}\n", end="", flush=True)
while step < steps:
    loader.set_epoch(step // len(loader))
    for inputs, wanted in accelerator.skip_first_batches(loader, step % len(loader)):
        loss = torch.nn.functional.mse_loss(model(inputs), wanted)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        step += 1
        print(f"step {step} of {place} at {time.monotonic():.4f}\n", end="", flush=True)
        if step % every == 0:
            accelerator.save_state(str(folder / f"step_{step:06d}"))
        time.sleep(pause)
        if step >= steps:
            break
print(f"ends at step {step} as rank {rank}/{world}\n", end="", flush=True)
accelerator.end_training()

"""DeepSpeed, ZeRO stage 1: deepspeed_zero.py FOLDER STEPS EVERY PAUSE [WIDTH]."""

import os
import sys
import time

os.environ.setdefault("DS_ACCELERATOR", "cpu")
os.environ.setdefault("DS_IGNORE_CUDA_DETECTION", "1")

import deepspeed
import torch

folder, steps, every, pause = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
width = int(sys.argv[5]) if len(sys.argv) > 5 else 32
deepspeed.init_distributed("gloo", verbose=False)
rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, width), torch.nn.ReLU(), torch.nn.Linear(width, 1))
config = {
    "train_micro_batch_size_per_gpu": 8,
    "zero_optimization": {"stage": 1},
    "zero_allow_untested_optimizer": True,
    "zero_force_ds_cpu_optimizer": False,
    "steps_per_print": 1_000_000,
}
engine, _, _, _ = deepspeed.initialize(
    model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01), config=config
)
step = 0
if os.path.exists(os.path.join(folder, "latest")):
    _, client = engine.load_checkpoint(folder)
    step = client["step"]
place = f"rank {rank}/{world} pid {os.getpid()}"
print(f"begins at step {step} as {place} at {time.monotonic():.4f}\n", end="", flush=True)
while step < steps:
    x = torch.randn(8, 8)
    loss = torch.nn.functional.mse_loss(engine(x), x.square().sum(dim=1, keepdim=True))
    engine.backward(loss)
    engine.step()
    step += 1
    print(f"step {step} of {place} at {time.monotonic():.4f}\n", end="", flush=True)
    if step % every == 0:
        engine.save_checkpoint(folder, client_state={"step": step})
    time.sleep(pause)
print(f"ends at step {step} as rank {rank}/{world}\n", end="", flush=True)
torch.distributed.destroy_process_group()

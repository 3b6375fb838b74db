"""A Hugging Face Trainer that goes on from memory at the step at which a worker was lost: one line, `KeepState()`.

It runs alone, under torchrun and under muster, on any CPU, without a download:

    python examples/hf_trainer.py --steps 100
    muster run examples/hf_trainer.py --name hf --workers 2 --spares 1 -- --steps 2000
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import muster.hf

parser = argparse.ArgumentParser()
parser.add_argument("--folder", default="hf-checkpoints")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--pause", type=float, default=0.0, help="seconds after each step, to have time to kill something")
parser.add_argument("--overhead", type=float, default=0.03, help="share of the time that copies may take")
given = parser.parse_args()


class Tell(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == trainer._initial_global_step:
            print(f"rank {args.process_index} of {args.world_size} begins at step {state.global_step}\n", end="")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if args.process_index == 0:
            print(f"step {state.global_step}", flush=True)
        time.sleep(given.pause)


torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
rows = torch.randint(64, (96, 16))
arguments = TrainingArguments(
    output_dir=given.folder,
    max_steps=given.steps,
    per_device_train_batch_size=4,
    save_steps=50,
    save_total_limit=2,
    logging_steps=5,
    report_to="none",
    use_cpu=not torch.cuda.is_available(),
    disable_tqdm=True,
)
trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=[{"input_ids": row, "labels": row} for row in rows],
    callbacks=[Tell(), muster.hf.KeepState(overhead=given.overhead)],
)
last = get_last_checkpoint(given.folder) if os.path.isdir(given.folder) else None
trainer.train(resume_from_checkpoint=last)
if trainer.is_world_process_zero():
    losses = [f"{entry['loss']:.6f}" for entry in trainer.state.log_history if "loss" in entry]
    print(f"losses {' '.join(losses)}")
    print(
        f"ends at step {trainer.state.global_step} with weights {sum(p.sum() for p in model.parameters()).item():.9f}"
    )

"""Hugging Face Trainer: hf_trainer.py FOLDER STEPS EVERY PAUSE [WIDTH]."""

import os
import sys
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

folder, steps, every, pause = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
width = int(sys.argv[5]) if len(sys.argv) > 5 else 32


class Tell(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        place = f"rank {args.process_index}/{args.world_size} pid {os.getpid()}"
        print(f"begins at step {state.global_step} as {place} at {time.monotonic():.4f}\n", end="", flush=True)

    def on_step_end(self, args, state, control, **kwargs):
        place = f"rank {args.process_index}/{args.world_size} pid {os.getpid()}"
        print(f"step {state.global_step} of {place} at {time.monotonic():.4f}\n", end="", flush=True)
        time.sleep(pause)


torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=width, n_layer=2, n_head=2))
tokens = torch.randint(64, (512, 16))
data = [{"input_ids": row, "labels": row} for row in tokens]
arguments = TrainingArguments(
    output_dir=folder,
    max_steps=steps,
    per_device_train_batch_size=4,
    save_steps=every,
    save_total_limit=3,
    logging_steps=10,
    report_to="none",
    use_cpu=True,
    disable_tqdm=True,
)
trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Tell()])
last = get_last_checkpoint(folder) if os.path.isdir(folder) else None
trainer.train(resume_from_checkpoint=last)
place = f"rank {arguments.process_index}/{arguments.world_size}"
print(f"ends at step {trainer.state.global_step} as {place}\n", end="", flush=True)

"""TRL, supervised fine-tuning: trl_sft.py FOLDER STEPS EVERY PAUSE."""

import os
import sys
import time

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

folder, steps, every, pause = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])


class Tell(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        place = f"rank {args.process_index}/{args.world_size} pid {os.getpid()}"
        print(f"begins at step {state.global_step} as {place} at {time.monotonic():.4f}\n", end="", flush=True)

    def on_step_end(self, args, state, control, **kwargs):
        place = f"rank {args.process_index}/{args.world_size} pid {os.getpid()}"
        print(f"step {state.global_step} of {place} at {time.monotonic():.4f}\n", end="", flush=True)
        time.sleep(pause)


words = ["<pad>", "<eos>", "<unk>", *(f"w{index}" for index in range(60))]
core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
core.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>")
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2))
texts = [" ".join(f"w{(first + index) % 60}" for index in range(12)) for first in range(256)]
arguments = SFTConfig(
    output_dir=folder,
    max_steps=steps,
    per_device_train_batch_size=4,
    save_steps=every,
    save_total_limit=3,
    logging_steps=10,
    max_length=16,
    report_to="none",
    use_cpu=True,
    bf16=False,
    disable_tqdm=True,
)
trainer = SFTTrainer(
    model=model,
    args=arguments,
    train_dataset=Dataset.from_dict({"text": texts}),
    processing_class=tokenizer,
    callbacks=[Tell()],
)
last = get_last_checkpoint(folder) if os.path.isdir(folder) else None
trainer.train(resume_from_checkpoint=last)
place = f"rank {arguments.process_index}/{arguments.world_size}"
print(f"ends at step {trainer.state.global_step} as {place}\n", end="", flush=True)

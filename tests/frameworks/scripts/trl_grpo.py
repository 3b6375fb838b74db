"""TRL, GRPO: trl_grpo.py FOLDER STEPS EVERY PAUSE."""

import os
import sys
import time

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint
from trl import GRPOConfig, GRPOTrainer

folder, steps, every, pause = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])


class Tell(TrainerCallback):
    def on_train_begin(self, args, state, control, **kwargs):
        place = f"rank {args.process_index}/{args.world_size} pid {os.getpid()}"
        print(f"begins at step {state.global_step} as {place} at {time.monotonic():.4f}\n", end="", flush=True)

    def on_step_end(self, args, state, control, **kwargs):
        place = f"rank {args.process_index}/{args.world_size} pid {os.getpid()}"
        print(f"step {state.global_step} of {place} at {time.monotonic():.4f}\n", end="", flush=True)
        time.sleep(pause)


def variety(completions, **kwargs):
    """The reward: how many different words a completion has."""
    return [float(len(set(text.split()))) for text in completions]


words = ["<pad>", "<eos>", "<unk>", *(f"w{index}" for index in range(60))]
core = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="<unk>"))
core.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", padding_side="left"
)
torch.manual_seed(0)
config = GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, eos_token_id=1, bos_token_id=1)
model = GPT2LMHeadModel(config)
prompts = [" ".join(f"w{(first + index) % 60}" for index in range(4)) for first in range(256)]
arguments = GRPOConfig(
    output_dir=folder,
    max_steps=steps,
    per_device_train_batch_size=2,
    num_generations=2,
    max_completion_length=4,
    save_steps=every,
    save_total_limit=3,
    logging_steps=10,
    report_to="none",
    use_cpu=True,
    bf16=False,
    disable_tqdm=True,
)
trainer = GRPOTrainer(
    model=model,
    args=arguments,
    reward_funcs=variety,
    train_dataset=Dataset.from_dict({"prompt": prompts}),
    processing_class=tokenizer,
    callbacks=[Tell()],
)
last = get_last_checkpoint(folder) if os.path.isdir(folder) else None
trainer.train(resume_from_checkpoint=last)
place = f"rank {arguments.process_index}/{arguments.world_size}"
print(f"ends at step {trainer.state.global_step} as {place}\n", end="", flush=True)

"""TRL, GRPO, on GPUs of a pool: trl_shared.py NAME FOLDER STEPS. Three lines are muster's."""

import json
import sys
import time

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from muster.sharing import sync, trl  # 1

name, folder, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
pool = sync.connect(name, gpus=[0])  # 2


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
config = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, eos_token_id=1
)
LlamaForCausalLM(config).save_pretrained(f"{folder}/{name}-model")
model = LlamaForCausalLM.from_pretrained(f"{folder}/{name}-model")
used = open(f"{folder}/{name}.used", "w", buffering=1)  # noqa: SIM115  # when it computed, for whoever checks
model.register_forward_pre_hook(lambda *_: print(f"[{time.monotonic()}", end=", ", file=used))
model.register_forward_hook(lambda *_: print(f"{time.monotonic()}]", file=used))
prompts = [" ".join(f"w{(first + index) % 60}" for index in range(4)) for first in range(256)]
arguments = GRPOConfig(
    output_dir=f"{folder}/{name}",
    max_steps=steps,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    num_generations=2,
    max_completion_length=8,
    beta=0.1,  # with a model for reference
    eval_strategy="steps",
    eval_steps=steps // 2,
    per_device_eval_batch_size=2,
    save_steps=steps // 2,
    logging_steps=1,
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
    eval_dataset=Dataset.from_dict({"prompt": prompts[:2]}),
    processing_class=tokenizer,
)
trl.share(trainer, pool)  # 3
trainer.train()
rewards = [one["reward"] for one in trainer.state.log_history if "reward" in one]
print("ends", json.dumps({"step": trainer.state.global_step, "rewards": rewards}), flush=True)

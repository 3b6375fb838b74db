"""A model that an engine can serve and that is made in a second: usage: tiny_llama.py FOLDER SEED

Other seeds give other weights. Prints the likeliest token after `PROMPT`, and its log-probability.
"""

import json
import sys

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

PROMPT = (5, 6, 7)
WORDS = 128

folder, seed = sys.argv[1], int(sys.argv[2])
torch.manual_seed(seed)
shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32}
model = LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, max_position_embeddings=128, **shape)).float()
for parameter in model.parameters():
    torch.nn.init.normal_(parameter, std=0.3)
model.save_pretrained(folder)
words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(WORDS)}, unk_token="w0"))
words.pre_tokenizer = pre_tokenizers.Whitespace()
PreTrainedTokenizerFast(tokenizer_object=words, bos_token="w1", eos_token="w2", unk_token="w0").save_pretrained(folder)
with torch.no_grad():
    likely = torch.log_softmax(model(torch.tensor([PROMPT])).logits[0, -1], -1)
print(json.dumps([int(likely.argmax()), float(likely.max())]))

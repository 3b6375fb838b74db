"""Is a tensor the same on two ranks, as far as a glance tells? A few hundred of its words, spread over all of it.

Sums tell for certain, but take their time. If a worker dies before its sums are made, what another rank has is taken
for the same where sums said so at the step before, and a glance says so still.
"""

from __future__ import annotations

import hashlib

import torch

WORDS = 256
_INTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def of(tensor: torch.Tensor) -> str:
    """Of a tensor in this machine's memory; empty if there is no telling."""
    width = _INTS.get(tensor.element_size())
    if width is None or not tensor.is_contiguous():
        return ""
    words = tensor.detach().view(-1).view(width)
    if words.numel() > WORDS:
        words = words[:: words.numel() // WORDS]
    try:
        return hashlib.blake2b(words.numpy().tobytes(), digest_size=8).hexdigest()
    except RuntimeError:  # there is no numpy
        return ""

"""How is a piece of memory told from a damaged, torn or foreign one? By sums that a GPU and a CPU can both make.

Memory is read as a table of 64-bit words, filled up with zeros. What is hashed are the sums of its rows, in order, and
the sums of its columns: whole numbers, so that it does not matter who adds them up in which order. A flipped bit
changes a row; two words of one row that changed places change columns, of one column rows; pages of zeros and what has
moved change both. To deceive on purpose is easy: this is against accidents.
"""

from __future__ import annotations

import ctypes
import hashlib

import torch

WORD = 8
COLUMNS = 2048
ROW = COLUMNS * WORD
_HERE = 16  # rows at once: so small that torch uses no other threads for it, and that they stay in the cache
_THERE = 1 << 16  # rows at once on a GPU: a gigabyte, of which nothing is copied


def block_sums(data: torch.Tensor) -> torch.Tensor:
    """Of a flat tensor of bytes, on its own device: a sum for each row, then one for each column."""
    whole = data.numel() // ROW
    rows = -(-data.numel() // ROW)
    found = torch.zeros(rows + COLUMNS, dtype=torch.int64, device=data.device)
    columns = found[rows:]
    between = torch.empty_like(columns)
    at_once = _HERE if data.device.type == "cpu" else _THERE
    words = _as_words(data[: whole * ROW]).view(-1, COLUMNS)
    for begin in range(0, whole, at_once):
        part = words[begin : begin + at_once]
        torch.sum(part, 1, out=found[begin : begin + len(part)])
        torch.sum(part, 0, out=between)
        columns += between
    rest = data[whole * ROW :]
    if rest.numel():
        between.zero_()
        between.view(torch.uint8)[: rest.numel()] = rest
        torch.sum(between, 0, out=found[whole])
        columns += between
    return found


def _as_words(data: torch.Tensor) -> torch.Tensor:
    if data.storage_offset() % WORD or data.data_ptr() % WORD:
        data = data.clone()
    return data.view(torch.int64)


def digest(sums: torch.Tensor, length: int) -> str:
    """What is written down of a piece."""
    made = hashlib.blake2b(length.to_bytes(8, "little"), digest_size=8)
    flat = sums.cpu().contiguous().view(torch.uint8)
    made.update(memory_of(flat))
    return made.hexdigest()


def of(data: torch.Tensor) -> str:
    return digest(block_sums(data), data.numel())


def memory_of(data: torch.Tensor) -> memoryview:
    """The bytes of a flat tensor on the CPU, which lives as long as they do."""
    if not data.numel():
        return memoryview(b"")
    found = (ctypes.c_ubyte * data.numel()).from_address(data.data_ptr())
    found._owner = data  # type: ignore[attr-defined]
    return memoryview(found).cast("B")

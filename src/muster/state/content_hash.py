"""Content hashes: two pieces of state are the same if, and only if, their hashes are equal.

Every byte and its position count, and a CPU and a GPU compute the same 128 bits. Content of up to 256 KiB is hashed by
SHA-256. Longer content is condensed first, in rounds: each row of 4,096 bytes is multiplied by a fixed table of random
bytes, which gives sixteen exact 32-bit numbers, so 64 bytes. The sixteen numbers of two different rows are all equal
with a probability of 2^-128. Rounds repeat until 256 KiB or less remain, and SHA-256 hashes these with the length.

The table is public, so an attacker can construct two contents with equal hashes. The hash finds accidents only.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import platform
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from muster.state.layout import ALIGN, HASH_DIGITS

DIRECT = 256 << 10  # bytes that SHA-256 hashes without condensing
ROW = 4096
NUMBERS = 16  # of 32 bits, for each row
_TAIL_ROWS = 32  # a GPU multiplies no fewer than 17 rows at once
_CPU_ROWS = 256  # at once: one megabyte stays in the cache
_GPU_ROWS = 1 << 16
_EXACT = 1024  # products of two bytes whose sum a 32-bit float holds exactly

Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def of(data: torch.Tensor) -> str:
    """Return the hash of a flat tensor of bytes."""
    return digest(condense(data), data.numel())


def of_parts(whole: torch.Tensor, parts: Iterable[tuple[int, int]]) -> list[str]:
    """Return the hashes of parts of a tensor on the CPU, each given by its offset and length."""
    memory = memory_of(whole)
    return [
        _hashed(memory[offset : offset + length], length) if length <= DIRECT else of(whole[offset : offset + length])
        for offset, length in parts
    ]


def condense(data: torch.Tensor) -> torch.Tensor:
    """Condense the bytes for `digest`, on the same device. On a GPU this does not wait for the GPU."""
    if data.numel() <= DIRECT:
        return data
    round_number = 0
    with _in_this_thread_alone():
        while data.numel() > DIRECT:
            data = _products(data, _table(round_number, data.device))
            round_number += 1
    return data


def digest(condensed: torch.Tensor, length: int) -> str:
    """Return the hash of content that had `length` bytes before it was condensed."""
    return _hashed(memory_of(condensed.cpu().contiguous()), length)


def _hashed(data: memoryview, length: int) -> str:
    hashed = hashlib.sha256(length.to_bytes(8, "little"))
    hashed.update(data)
    return hashed.hexdigest()[:HASH_DIGITS]


def memory_of(data: torch.Tensor) -> memoryview:
    """Return the memory of a flat tensor of bytes on the CPU. The view keeps the tensor alive."""
    if not data.numel():
        return memoryview(b"")
    array = (ctypes.c_ubyte * data.numel()).from_address(data.data_ptr())
    array._owner = data  # type: ignore[attr-defined]
    return memoryview(array).cast("B")


def _products(data: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Multiply each row by the table, and return the bytes of the products. The last row is filled up with zeros."""
    rows = -(-data.numel() // ROW)
    body_rows = rows - _TAIL_ROWS
    body, remainder = data[: body_rows * ROW], data[body_rows * ROW :]
    tail = torch.zeros(_TAIL_ROWS * ROW, dtype=torch.uint8, device=data.device)
    tail[: remainder.numel()] = remainder
    products = torch.empty(rows, NUMBERS, dtype=torch.int32, device=data.device)
    multiply = multiplication(data.device.type)
    rows_at_once = _CPU_ROWS if data.device.type == "cpu" else _GPU_ROWS
    first = 0
    for part in body.view(torch.int8).view(-1, ROW).tensor_split(-(-body_rows // rows_at_once)):
        products[first : first + len(part)] = multiply(_aligned(part), table)
        first += len(part)
    products[first:] = multiply(tail.view(torch.int8).view(-1, ROW), table)
    return products.view(-1).view(torch.uint8)


def _aligned(rows: torch.Tensor) -> torch.Tensor:
    """Return the rows at an address from which a GPU can multiply bytes: a part of a flat buffer may begin anywhere."""
    return rows.clone() if rows.data_ptr() % ALIGN else rows


@functools.cache
def _table(round_number: int, where: torch.device) -> torch.Tensor:
    """Return the random bytes of one round, which are the same everywhere and forever."""
    drawn = hashlib.shake_256(b"muster content hash, round %d" % round_number).digest(ROW * NUMBERS)
    return torch.frombuffer(bytearray(drawn), dtype=torch.int8).view(ROW, NUMBERS).to(where)


@functools.cache
def multiplication(device_type: str) -> Multiply:
    """Choose how a kind of device multiplies: by its 8-bit instructions if it has them and they are exact."""
    if device_type == "cpu" and platform.machine() not in ("x86_64", "AMD64"):
        return multiply_by_floats  # elsewhere torch multiplies whole numbers one by one
    table = _table(0, torch.device("cpu"))
    sample = table.view(-1).repeat(2).view(-1, ROW)
    expected = (sample.long() @ table.long()).int()
    try:
        products = multiply_by_integers(sample.to(device_type), table.to(device_type)).cpu()
    except (AttributeError, RuntimeError):
        return multiply_by_floats
    return multiply_by_integers if torch.equal(products, expected) else multiply_by_floats


def multiply_by_integers(rows: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return torch._int_mm(rows, table)


def multiply_by_floats(rows: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Multiply in 32-bit floats, a part of each row at a time, so that every sum is exact."""
    products = torch.zeros(len(rows), NUMBERS, dtype=torch.int32, device=rows.device)
    with torch.autocast(rows.device.type, enabled=False):
        for first in range(0, ROW, _EXACT):
            part = slice(first, first + _EXACT)
            products += (rows[:, part].float() @ table[part].float()).int()
    return products


@contextmanager
def _in_this_thread_alone() -> Iterator[None]:
    """Keep OpenMP from starting threads: a rank may fork afterwards, and the training needs the other cores."""
    if (openmp := _openmp()) is None:
        yield
        return
    torch.get_num_threads()  # torch sets the number at its first use in a thread, and would undo ours
    threads = openmp.omp_get_max_threads()
    openmp.omp_set_num_threads(1)
    try:
        yield
    finally:
        openmp.omp_set_num_threads(threads)


@functools.cache
def _openmp() -> ctypes.CDLL | None:
    """Return the OpenMP library that torch is linked to, if it has one."""
    try:
        library = ctypes.CDLL(torch._C.__file__)
        library.omp_get_max_threads()
    except (OSError, AttributeError):
        return None
    return library

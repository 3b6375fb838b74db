"""Content hashes differ wherever contents differ, however regular the contents are."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.state import content_hash
from muster.state.layout import HASH_DIGITS

ROW, DIRECT = content_hash.ROW, content_hash.DIRECT
LENGTHS = st.sampled_from([1, 7, ROW, DIRECT - 1, DIRECT, DIRECT + 1, DIRECT + ROW, 3 * DIRECT + 13, 70 * DIRECT])
DTYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8])

KNOWN_SHORT = "451787275d0e483e9e5fe4e805d106d1"
KNOWN_LONG = "feb4fc40e13b14ffa3278a4c639c007c"


def random_bytes(length: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def hash_of(tensor: torch.Tensor) -> str:
    return content_hash.of(tensor.contiguous().view(-1).view(torch.uint8))


@given(length=LENGTHS, seed=st.integers(0, 99), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@settings(max_examples=60, deadline=None)
def test_any_flipped_bit_changes_the_hash(length: int, seed: int, place: float, bit: int) -> None:
    data = random_bytes(length, seed)
    before = content_hash.of(data)
    data[int(place * length)] ^= 1 << bit
    assert content_hash.of(data) != before


@given(dtype=DTYPES, block=st.sampled_from([1, 2, 8, 32, 64]), rows=st.sampled_from([64, 512]))
@settings(max_examples=40, deadline=None)
def test_a_mask_and_its_complement_differ(dtype: torch.dtype, block: int, rows: int) -> None:
    squares = (torch.arange(rows)[:, None] // block + torch.arange(4096)[None, :] // block) % 2
    mask = squares.to(dtype)
    assert hash_of(mask) != hash_of(1 - mask)


@given(dtype=DTYPES, size=st.sampled_from([64, 300, 1024]), seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_permutation_matrices_differ(dtype: torch.dtype, size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    first, second = torch.randperm(size, generator=generator), torch.randperm(size, generator=generator)
    identity = torch.eye(size).to(dtype)
    assert (hash_of(identity[first]) == hash_of(identity[second])) == torch.equal(first, second)


@given(dtype=DTYPES, width=st.sampled_from([512, 4096, 5000]), first=st.integers(0, 4999), second=st.integers(0, 4999))
@settings(max_examples=60, deadline=None)
def test_one_hot_rows_differ(dtype: torch.dtype, width: int, first: int, second: int) -> None:
    first, second = first % width, second % width
    matrices = torch.zeros(2, 200, width).to(dtype)
    matrices[0, :, first] = matrices[1, :, second] = 1
    assert (hash_of(matrices[0]) == hash_of(matrices[1])) == (first == second)


@given(
    seed=st.integers(0, 99),
    size=st.sampled_from([1, 4, 8, 64, ROW, 16 * ROW, DIRECT]),
    first=st.integers(0, 10_000),
    second=st.integers(0, 10_000),
    regular=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_exchanged_blocks_change_the_hash(seed: int, size: int, first: int, second: int, regular: bool) -> None:
    data = random_bytes(5 * DIRECT, seed)
    if regular:  # words that differ in their highest bit alone
        data.view(torch.int64).mul_(-1 << 63)
    blocks = data.view(-1, size)
    first, second = first % len(blocks), second % len(blocks)
    before = content_hash.of(data)
    blocks[[first, second]] = blocks[[second, first]]
    assert (content_hash.of(data) == before) == torch.equal(blocks[first], blocks[second])


@given(seed=st.integers(0, 99), rows=st.integers(2, 400))
@settings(max_examples=40, deadline=None)
def test_contents_with_equal_histograms_differ(seed: int, rows: int) -> None:
    data = random_bytes(rows * ROW, seed)
    shuffled = data[torch.randperm(len(data), generator=torch.Generator().manual_seed(seed))]
    assert content_hash.of(data) != content_hash.of(shuffled)


@given(seed=st.integers(0, 99), page=st.integers(0, 79), count=st.integers(1, 8))
@settings(max_examples=40, deadline=None)
def test_pages_of_zeros_change_the_hash(seed: int, page: int, count: int) -> None:
    data = random_bytes(80 * ROW, seed)
    before = content_hash.of(data)
    data.view(-1, ROW)[page : page + count] = 0
    assert content_hash.of(data) != before


@given(seed=st.integers(0, 99), by=st.integers(1, 80 * ROW - 1))
@settings(max_examples=40, deadline=None)
def test_moved_content_has_another_hash(seed: int, by: int) -> None:
    data = random_bytes(80 * ROW, seed)
    assert content_hash.of(data.roll(by)) != content_hash.of(data)


def test_zeros_of_another_length_have_another_hash() -> None:
    lengths = [*range(50), DIRECT - 1, DIRECT, DIRECT + 1, DIRECT + ROW, 2 * DIRECT]
    assert len({content_hash.of(torch.zeros(length, dtype=torch.uint8)) for length in lengths}) == len(lengths)


@pytest.mark.parametrize("length", [100, DIRECT, 3 * DIRECT + 5])
def test_the_place_in_memory_does_not_matter(length: int) -> None:
    data = random_bytes(length, 1)
    moved = torch.empty(len(data) + 3, dtype=torch.uint8)[3:]
    assert content_hash.of(moved.copy_(data)) == content_hash.of(data)


def test_rows_are_multiplied_from_aligned_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS refuses addresses that are not divisible by four. Part of a flat buffer of bfloat16 may lie there."""

    def multiply(rows: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        assert rows.data_ptr() % 16 == 0
        return content_hash.multiply_by_integers(rows, table)

    data = random_bytes(5 * DIRECT + 77, 5)
    expected = content_hash.of(data)
    monkeypatch.setattr(content_hash, "multiplication", lambda device_type: multiply)
    for offset in (1, 2, 6):
        moved = torch.empty(len(data) + offset, dtype=torch.uint8)[offset:]
        assert content_hash.of(moved.copy_(data)) == expected


def test_parts_have_the_hashes_that_they_have_alone() -> None:
    whole = random_bytes(4 * DIRECT, 2)
    parts = [(0, 0), (5, 100), (256, DIRECT), (300, 2 * DIRECT + 1)]
    assert content_hash.of_parts(whole, parts) == [content_hash.of(whole[at : at + size].clone()) for at, size in parts]


@pytest.mark.parametrize("length", [DIRECT + 1, 5 * DIRECT + 77, 80 * DIRECT + 1])
def test_both_ways_to_multiply_give_the_same_hash(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices without 8-bit instructions multiply in floats."""
    data = random_bytes(length, 3)
    data[: 40 * ROW] = 128  # the byte of the largest magnitude
    monkeypatch.setattr(content_hash, "multiplication", lambda device_type: content_hash.multiply_by_integers)
    by_integers = content_hash.of(data)
    monkeypatch.setattr(content_hash, "multiplication", lambda device_type: content_hash.multiply_by_floats)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert content_hash.of(data) == by_integers


def test_the_hash_is_the_same_forever() -> None:
    """Files on disk contain the hash, so it must never change."""
    assert content_hash.of(torch.zeros(5, dtype=torch.uint8)) == KNOWN_SHORT
    assert content_hash.of(torch.arange(200_000, dtype=torch.int32).view(torch.uint8)) == KNOWN_LONG
    assert len(KNOWN_SHORT) == HASH_DIGITS


def test_hashing_starts_no_threads() -> None:
    """A rank may fork after a hash, and a thread pool does not survive a fork."""
    if (child := os.fork()) == 0:
        before = len(os.listdir("/proc/self/task"))
        content_hash.of(random_bytes(8 * DIRECT, 4))
        os._exit(0 if len(os.listdir("/proc/self/task")) == before else 1)
    assert os.waitpid(child, 0)[1] == 0

"""Is damage seen in the sums? Any bit, words and blocks that changed places, pages of zeros, what has moved."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.state import sums

LENGTHS = st.sampled_from([1, 7, 8, 4096, sums.ROW - 1, sums.ROW, sums.ROW + 1, 3 * sums.ROW, 20 * sums.ROW + 13])


def data_of(length: int, seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (length,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@given(length=LENGTHS, seed=st.integers(0, 99), place=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
@settings(max_examples=100, deadline=None)
def test_any_flipped_bit_is_seen(length: int, seed: int, place: float, bit: int) -> None:
    data = data_of(length, seed)
    before = sums.of(data)
    data[int(place * length)] ^= 1 << bit
    assert sums.of(data) != before


@given(
    seed=st.integers(0, 99),
    size=st.sampled_from([8, 64, 4096, sums.ROW, 5 * sums.ROW]),
    one=st.integers(0, 99),
    other=st.integers(0, 99),
    only_top=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_places_that_were_exchanged_are_seen(seed: int, size: int, one: int, other: int, only_top: bool) -> None:
    data = data_of(20 * sums.ROW, seed)
    if only_top:  # words that differ in their highest bit alone
        data.view(torch.int64).mul_(-1 << 63)
        size = 8
    parts = data.view(-1, size)
    one, other = one % len(parts), other % len(parts)
    before = sums.of(data)
    first, second = parts[one].clone(), parts[other].clone()
    parts[one], parts[other] = second, first
    assert (sums.of(data) == before) == torch.equal(first, second)


@given(seed=st.integers(0, 99), page=st.integers(0, 79), count=st.integers(1, 8))
@settings(max_examples=50, deadline=None)
def test_pages_of_zeros_are_seen(seed: int, page: int, count: int) -> None:
    data = data_of(20 * sums.ROW, seed)
    before = sums.of(data)
    data.view(-1, 4096)[page : page + count] = 0
    assert sums.of(data) != before


@given(seed=st.integers(0, 99), by=st.integers(1, 20 * sums.ROW - 1))
@settings(max_examples=50, deadline=None)
def test_what_has_moved_is_seen(seed: int, by: int) -> None:
    data = data_of(20 * sums.ROW, seed)
    assert sums.of(data.roll(by)) != sums.of(data)


def test_zeros_of_another_length_have_another_sum() -> None:
    assert len({sums.of(torch.zeros(length, dtype=torch.uint8)) for length in range(50)}) == 50


def test_it_does_not_matter_where_in_memory_something_lies() -> None:
    data = data_of(3 * sums.ROW, 1)
    moved = torch.empty(len(data) + 3, dtype=torch.uint8)[3:]
    assert sums.of(moved.copy_(data)) == sums.of(data)


def test_a_gpu_that_adds_up_many_rows_at_once_comes_to_the_same() -> None:
    data = data_of(50 * sums.ROW + 5, 1)
    words = torch.zeros(51 * sums.COLUMNS, dtype=torch.int64)
    words.view(torch.uint8)[: len(data)] = data
    table = words.view(51, sums.COLUMNS)
    assert torch.equal(sums.block_sums(data), torch.cat([table.sum(1), table.sum(0)]))

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.cli.bench import LARGEST, show_size, sizes_of
from muster.cli.exits import Misused
from tests.cli.conftest import Muster


@given(st.lists(st.integers(4, LARGEST), min_size=1, max_size=9))
def test_sizes_are_read_as_they_are_shown(sizes: list[int]) -> None:
    assert sizes_of(",".join(map(show_size, sizes))) == sizes


@pytest.mark.parametrize("text", ["", "1KB", "0", "3", "2GiB", "1KiB,", "-4", "1.5MiB", "²KiB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(Misused, match="is not a size"):
        sizes_of(text)


def test_one_rank_alone_has_nobody_to_add_up_with(muster: Muster) -> None:
    said = muster("bench", "net", "--workers", "1")
    assert said.code == 2 and "at least two ranks" in said.err and "hint: muster bench net --workers 2" in said.err


def test_a_carrier_that_does_not_exist_is_refused(muster: Muster) -> None:
    said = muster("bench", "net", "--via", "pigeon")
    assert said.code == 2 and "pigeon" in said.err

"""Counts in messages."""

from __future__ import annotations

import pytest

from muster.server import quotas
from muster.types import plural


@pytest.mark.parametrize(("count", "text"), [(0, "0 files"), (1, "1 file"), (2, "2 files")])
def test_a_noun_follows_its_number(count: int, text: str) -> None:
    assert plural.counted(count, "file") == text


def test_a_quota_of_one_is_told_in_the_singular() -> None:
    refused = str(quotas._exceeded("research", "trainings", 1, 1, 1))
    assert "may have 1 training: 1 is in use, 1 more was asked for" in refused

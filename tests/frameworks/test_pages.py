"""Do the blocks of pages that need a framework do what they say, typed as they are printed?"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs import blocks
from tests.docs.blocks import Command
from tests.docs.reader import Reader
from tests.frameworks.jobs import QUIET
from tests.plane import Plane

PATIENCE_S = 600.0  # for two thousand steps
pytestmark = [pytest.mark.frameworks, pytest.mark.xdist_group("frameworks")]


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    shelf = Plane(tmp_path)
    made = Reader(shelf, **QUIET)
    made.patience_s = PATIENCE_S
    made.activate()
    yield made
    shelf.close()


@pytest.mark.parametrize("example", ["hf_trainer", "lightning_trainer", "accelerate_loop"])
def test_an_example_runs_as_printed(reader: Reader, example: str) -> None:
    [block] = [block for block in blocks.blocks("examples.md") if f"examples/{example}.py" in block.body]
    wrong = reader.read(block)
    assert wrong == [], "\n".join(wrong)
    assert reader.obey(Command("muster server stop --cancel")) == []


def test_two_grpo_runs_share_as_printed(reader: Reader) -> None:
    for block in blocks.blocks("share-with-trl.md"):
        wrong = reader.read(block)
        assert wrong == [], "\n".join(wrong)
    assert reader.obey(Command("wait %1 && wait %2")) == [], "both trained to their end"
    assert reader.obey(Command("muster server stop --cancel")) == []

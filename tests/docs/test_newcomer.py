"""Does every block of the first pages do what it says, typed as it is printed, from the top of a page to its end?

A block is run unless it stands below with a reason. So a new one is run too, or this test asks what it is.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs import blocks
from tests.docs.blocks import Block, Command
from tests.docs.reader import Reader
from tests.plane import Plane

# Pages that are read one after the other by the same reader.
SITTINGS = [
    ("README.md",),
    ("install.md",),
    ("first-training.md",),
    ("scaling.md",),
    ("sdk.md",),
    ("backup.md",),
    ("muster-node.md", "torchrun.md"),
]
PAGES = [page for pages in SITTINGS for page in pages]
MACHINES = {"scaling.md": {"MUSTER_GPUS": "2"}}  # it speaks of a machine with two GPUs

# Page and first line of a block → why it is not run here.
NOT_RUN = {
    ("README.md", "$ muster kube install --image registry.example.com/muster:0.1.1"): (
        "needs a cluster and kubectl: tests/kube does the same on a real API server, make test-kube"
    ),
    ("README.md", "    8.654  WorkerLost       demo-1: its connection closed"): (
        "is what make demo prints at its end: tests/examples compares it with survive_kill.py, which does the same"
    ),
}

# Commands that are not typed, wherever they stand.
NOT_TYPED = {
    "python3 -m venv .venv": "the clone of a reader has the environment of the tests as .venv",
    "pip install '.[server,torch]'": "gigabytes from an index; that environment was made by it, in make venv",
}
ACTIVATE = ". .venv/bin/activate"


def every_block() -> list[Block]:
    return [block for page in PAGES for block in blocks.blocks(page)]


def repeats_the_front_page(block: Block) -> bool:
    """A Python example that stands there word for word is run there."""
    return block.kind == "python" and block.page != "README.md" and block in _as_on(block.page, "README.md")


def _as_on(page: str, other: str) -> list[Block]:
    return [dataclasses.replace(block, page=page) for block in blocks.blocks(other)]


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Plane]:
    made = Plane(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("pages", SITTINGS, ids="+".join)
def test_every_block_does_what_it_says(pages: tuple[str, ...], shelf: Plane) -> None:
    reader = Reader(shelf, **{key: value for page in pages for key, value in MACHINES.get(page, {}).items()})
    found = [block for page in pages for block in blocks.blocks(page)]
    if not any(ACTIVATE in block.body for block in found):
        reader.activate()
    run = [block for block in found if block.name not in NOT_RUN and not repeats_the_front_page(block)]
    assert run
    wrong = [problem for block in run for problem in reader.read(block, skip=NOT_TYPED)]
    assert wrong == [], "\n".join(wrong)
    assert reader.obey(Command("muster server stop --cancel")) == []


def test_every_exception_is_about_something_that_is_there() -> None:
    found = every_block()
    names = [block.name for block in found]
    assert [names.count(name) for name in NOT_RUN] == [1] * len(NOT_RUN)
    typed = {command.text for block in found if block.kind == "" for command in blocks.commands(block)}
    assert typed >= NOT_TYPED.keys()


def test_an_answer_that_differs_would_be_found() -> None:
    came = ["first  ready   2/2", "first succeeded 0s ago after 12s.", "[0] step 50: loss 7.234", ""]
    assert blocks.differences(("first ready 2/2", "…"), came) == []
    assert blocks.differences(("first ready 2/2", "first succeeded 3s ago after 1m 2s.", "[0] … loss 1.0"), came) == []
    assert blocks.differences(("first ready 1/2", "…"), came) == ["- first ready 1/2"]
    assert blocks.differences(("first ready 2/2", "first ready 2/2", "…"), came) == ["- first ready 2/2"], "came once"
    assert blocks.differences(("first ready 2/2",), came[:2]) == ["+ first succeeded TIME ago after TIME ."]


def test_a_command_that_fails_would_be_found(shelf: Plane) -> None:
    reader = Reader(shelf)
    assert reader.read(Block("p.md", "", "true\nfalse\n")) == ["$ false", "exit code 1"]
    assert reader.read(Block("p.md", "", "$ echo one\ntwo\n")) == ["$ echo one", "- two", "+ one", "  one"]
    assert reader.read(Block("p.md", "", "$ sh -c 'echo up; exec sleep 60'\nup\n^C\n")) == [], "Ctrl-C ends it"
    with pytest.raises(AssertionError, match="how a block of perl is read"):
        reader.read(Block("p.md", "perl", "die"))

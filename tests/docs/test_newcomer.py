"""Does every block of the pages do what it says, typed as it is printed, from the top of a page to its end?

A block is run unless `elsewhere.py` says why not. So a new one is run too, and so is that of a new page.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.docs import blocks, elsewhere
from tests.docs.blocks import ROOT, Block, Command
from tests.docs.reader import Reader
from tests.plane import Plane

# Pages that are read one after the other by the same reader. All others are read alone.
TOGETHER = [
    ("muster-node.md", "torchrun.md"),
    ("index.md", "hot-spares.md", "dashboard.md", "api.md"),
    ("code.md", "checkpoints.md", "engines.md"),
    ("mesh.md", "own-image.md"),
]
LONG_S = 600.0
MACHINES = {"scaling.md": {"MUSTER_GPUS": "2"}}  # it speaks of a machine with two GPUs

# Commands that are not typed, wherever they stand.
NOT_TYPED = {
    "python3 -m venv .venv": "the clone of a reader has the environment of the tests as .venv",
    "pip install '.[server,torch]'": "gigabytes from an index; that environment was made by it, in make venv",
}
ACTIVATE = ". .venv/bin/activate"


def here(page: str) -> list[Block]:
    """What is typed here, of a page."""
    if page in elsewhere.PAGES:
        return []
    return [block for block in blocks.blocks(page) if block.name not in elsewhere.BLOCKS and not is_repeated(block)]


def is_repeated(block: Block) -> bool:
    """A Python example that stands word for word on a page before is run there."""
    before = blocks.pages()[: blocks.pages().index(block.page)]
    return block.kind == "python" and any(block.body == one.body for page in before for one in blocks.blocks(page))


def sittings() -> list[tuple[str, ...]]:
    grouped = {page for pages in TOGETHER for page in pages}
    alone = [(page,) for page in blocks.pages() if page not in grouped and here(page)]
    return [*alone, *TOGETHER]


def long_ones(page: str) -> list[Block]:
    named = {name for name, one in elsewhere.BLOCKS.items() if one.test == elsewhere.LONG}
    return [block for block in blocks.blocks(page) if block.name in named]


@pytest.fixture
def shelf(tmp_path: Path) -> Iterator[Plane]:
    made = Plane(tmp_path)
    yield made
    made.close()


@pytest.mark.pages
@pytest.mark.parametrize("pages", sittings(), ids="+".join)
def test_every_block_does_what_it_says(pages: tuple[str, ...], shelf: Plane) -> None:
    machine: dict[str, Any] = {key: value for page in pages for key, value in MACHINES.get(page, {}).items()}
    reader = Reader(shelf, **machine)
    if not any(ACTIVATE in block.body for page in pages for block in blocks.blocks(page)):
        reader.activate()
    for page in pages:
        reader.open(page)
        wrong = [problem for block in here(page) for problem in reader.read(block, skip=NOT_TYPED)]
        assert wrong == [], "\n".join(wrong)
    assert reader.obey(Command("muster server stop --cancel")) == []


@pytest.mark.soak
@pytest.mark.parametrize("page", [page for page in blocks.pages() if long_ones(page)])
def test_what_takes_long_does_what_it_says(page: str, shelf: Plane) -> None:
    reader = Reader(shelf)
    reader.patience_s = LONG_S
    reader.activate()
    wrong = [problem for block in long_ones(page) for problem in reader.read(block)]
    assert wrong == [], "\n".join(wrong)


def test_every_exception_is_about_something_that_is_there() -> None:
    assert elsewhere.PAGES.keys() | {page for pages in TOGETHER for page in pages} <= {*blocks.pages()}
    found = [block for page in blocks.pages() if page not in elsewhere.PAGES for block in blocks.blocks(page)]
    names = [block.name for block in found]
    assert {name: names.count(name) for name in elsewhere.BLOCKS if names.count(name) != 1} == {}
    typed = {command.text for block in found if block.kind == "" for command in blocks.commands(block)}
    assert typed >= NOT_TYPED.keys()


def test_every_test_that_stands_for_a_block_is_there() -> None:
    named = {one.test for one in (*elsewhere.PAGES.values(), *elsewhere.BLOCKS.values())}
    assert {test for test in named if test.partition("::")[2] not in _functions(test.partition("::")[0])} == set()


def _functions(file: str) -> set[str]:
    place = ROOT / file
    return {one.name for one in ast.parse(place.read_text()).body if isinstance(one, ast.FunctionDef)}


def test_an_answer_that_differs_would_be_found() -> None:
    came = ["first  ready   2/2", "first succeeded 0s ago after 12s.", "[0] step 50: loss 7.234", ""]
    assert blocks.differences(("first ready 2/2", "…"), came) == []
    assert blocks.differences(("first ready 2/2", "first succeeded 3s ago after 1m 2s.", "[0] … loss 1.0"), came) == []
    healed = ["next step after 10.0 s; back at step 7, no step redone"]
    assert blocks.differences(("next step after 2.9 s; back at step …",), healed) == []
    assert blocks.differences(("next step after 2.9 s; back at step 8…",), healed) != []
    assert blocks.differences(("first ready 1/2", "…"), came) == ["- first ready 1/2"]
    assert blocks.differences(("first ready 2/2", "first ready 2/2", "…"), came) == ["- first ready 2/2"], "came once"
    assert blocks.differences(("first ready 2/2",), came[:2]) == ["+ first succeeded TIME ago after TIME ."]


def test_a_quotation_ends_where_the_shell_ends_it() -> None:
    typed = blocks.commands(Block("p.md", "", "$ echo 'one\n  two'\none\n$ echo \"it's\"\nit's\n"))
    assert typed == [Command("echo 'one\n  two'", ("one",)), Command('echo "it\'s"', ("it's",))]


def test_a_command_that_fails_would_be_found(shelf: Plane) -> None:
    reader = Reader(shelf)
    assert reader.read(Block("p.md", "", "true\nfalse\n")) == ["$ false", "exit code 1"]
    assert reader.read(Block("p.md", "", "$ echo one\ntwo\n")) == ["$ echo one", "- two", "+ one", "  one"]
    assert reader.read(Block("p.md", "", "$ sh -c 'echo up; exec sleep 60'\nup\n^C\n")) == [], "Ctrl-C ends it"
    assert reader.read(Block("p.md", "json", '{"a": 1}\n', "~/a.json")) == []
    assert reader.read(Block("p.md", "", '$ cd; pwd; cat a.json\n/home/me\n{"a": 1}\n')) == []
    with pytest.raises(AssertionError, match="does not say where this belongs"):
        reader.read(Block("p.md", "yaml", "a: 1\n"))
    with pytest.raises(AssertionError, match="how a block of perl is read"):
        reader.read(Block("p.md", "perl", "die"))

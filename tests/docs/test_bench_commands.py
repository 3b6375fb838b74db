"""Each command of a benchmark that a page, the Makefile or a docstring prints has options that exist."""

from __future__ import annotations

import ast
import itertools
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.bench import parsers
from tests.bench.parsers import ROOT
from tests.docs.test_docs import PAGES, each_page

MAKEFILE = ROOT / "Makefile"
SOURCES = [
    *PAGES,
    *sorted((ROOT / "docs" / "decisions").glob("*.md")),
    MAKEFILE,
    *sorted((ROOT / "bench").glob("*.py")),
]
_MAKE = re.compile(r'make (?:-s )?(bench-[a-z]+)((?: (?:ARGS="[^"]*"|ARGS=[^\s`"]+|SECONDS=\d+))*)')
_PROGRAM = re.compile(r"python3? (?:-m (bench\.\w+)|(bench/\w+)\.py)\b([^`\n]*)")
_ARGS = re.compile(r"ARGS=(?!--json\b)")
HELPERS = {"bench.load", "bench.pods", "bench.table"}  # programs that read no options with argparse


def text_of(source: Path) -> str:
    """Return the text of a page or of the Makefile, and only the docstring of a module."""
    text = source.read_text()
    return ast.get_docstring(ast.parse(text)) or "" if source.suffix == ".py" else text


def recipes() -> dict[str, tuple[str, str]]:
    """Return the module and the options in the recipe of each benchmark."""
    rules = re.findall(r"(?m)^(bench-[a-z]+):.*\n(?:\t.*\n)*\t\S+ -m (bench\.\w+) (.*)\n", MAKEFILE.read_text())
    return {target: (module, options) for target, module, options in rules}


def commands(text: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the module and the options of each command. Brackets are taken away, and names get a value."""
    for target, assignments in _MAKE.findall(text):
        module, options = recipes()[target]
        variables = dict(word.partition("=")[::2] for word in shlex.split(assignments))
        options = options.replace("$(ARGS)", variables.get("ARGS", "")).replace("$(SECONDS)", "1")
        yield module, shlex.split(options)
    for module, script, options in _PROGRAM.findall(text):
        if module in HELPERS or "$(ARGS)" in options:
            continue
        words = itertools.takewhile(lambda word: word not in ("#", ">") and not word.startswith(";"), options.split())
        yield module or script.replace("/", "."), [concrete(module, word) for word in words if word != "…"]


def concrete(module: str, word: str) -> str:
    """Return a word of a usage line as a user would type it."""
    word = word.strip("[]…,.()")
    if word == "PART":
        return min(parsers.parts(module))
    return "1" if word in ("N", "WORKERS", "FOLDER") else word


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
def test_every_printed_command_of_a_benchmark_has_options_that_exist(source: Path) -> None:
    for module, words in commands(text_of(source)):
        parsers.parse(module, [word for word in words if word])


@each_page
def test_a_page_prints_options_of_a_benchmark_with_its_target(page: Path) -> None:
    text = page.read_text()
    assert len(_ARGS.findall(text)) == sum(len(_ARGS.findall(words)) for _, words in _MAKE.findall(text))


def test_printed_commands_are_found() -> None:
    printed = {source.name: list(commands(text_of(source))) for source in SOURCES}
    assert ("bench.pool", ["--only", "handover", "--repeat", "10"]) in printed["CONTRIBUTING.md"]
    assert ("bench.alarms", ["--seconds", "1"]) in printed["CONTRIBUTING.md"]
    assert ("bench.control", ["--only", "start"]) in printed["CONTRIBUTING.md"]
    assert ("bench.state", ["--only", "copies"]) in printed["benchmarks.md"]
    assert ("bench.frameworks", ["--no-peers"]) in printed["frameworks.md"]
    assert ("bench.wire", ["--only", "frames"]) in printed["017-both-sides-prove-themselves.md"]
    assert ("bench.state_gpu", ["--gb", "0.05", "--device", "cpu"]) in printed["state_gpu.py"]
    assert sum(map(len, printed.values())) > 40


@pytest.mark.parametrize("words", [["--onyl", "start"], ["--only", "stat"], ["start"]])
def test_an_option_that_does_not_exist_is_reported(words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"bench\.control .*(unrecognized|invalid choice)"):
        parsers.parse("bench.control", words)


def test_the_variables_of_a_target_are_read() -> None:
    text = 'Run `make bench-alarms SECONDS=300 ARGS="--workers 2"` and `make -s bench-world ARGS=--json > world.json`.'
    assert list(commands(text)) == [
        ("bench.alarms", ["--seconds", "1", "--workers", "2"]),
        ("bench.world", ["--json"]),
    ]

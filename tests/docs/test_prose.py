"""The prose check: its texts, its patterns, and the verdict about counts that changed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.docs import prose
from tests.docs.prose import Counts, Place
from tests.docs.prose_patterns import PATTERNS, patterns_in
from tests.docs.prose_texts import texts_of_code, texts_of_page

MODULE = '''"""Pending connections.

What they do.
"""
# Reset the lease
# before the round.
import os  # of the system


class Peer:
    """A connection."""

    told: bool = False  # noqa: E501

    @property
    def name(self, at: int) -> str:
        """The name."""
        return [one for one in "ab"] and [
            one
            for one in "ab"
        ]


async def kept():
    """Send it."""
'''
PAGE = """# Resize a training
Type the size.
Then wait.
- first item
  goes on
- second item

| word | meaning |
|---|---|
| rank | a `process` |
```
# no heading
```
<!-- a marker -->
![a picture](x.png)
"""


def test_the_texts_of_a_module_are_its_docstrings_names_and_comments() -> None:
    assert sorted(texts_of_code(MODULE)) == [
        (1, "module", "Pending connections.\n\nWhat they do."),
        (5, "comment", "Reset the lease\nbefore the round."),
        (7, "comment", "of the system"),
        (11, "class", "A connection."),
        (13, "name", "told"),
        (16, "name", "at"),
        (16, "name", "name"),
        (16, "name", "self"),
        (17, "property", "The name."),
        (20, "name", "one"),
        (24, "name", "kept"),
        (25, "function", "Send it."),
    ]


def test_the_texts_of_a_page_are_its_headings_paragraphs_items_and_cells() -> None:
    assert list(texts_of_page(PAGE)) == [
        (1, "heading", "Resize a training"),
        (2, "paragraph", "Type the size.\nThen wait."),
        (4, "paragraph", "first item\n  goes on"),
        (6, "paragraph", "second item"),
        (8, "cell", "word"),
        (8, "cell", "meaning"),
        (10, "cell", "rank"),
        (10, "cell", "a `process`"),
    ]


def test_an_item_keeps_its_emphasis() -> None:
    assert [text.text for text in texts_of_page("**Alternatives.** Count the bytes.\n")] == [
        "**Alternatives.** Count the bytes."
    ]


def test_a_place_names_the_line_of_its_sentence() -> None:
    source = '"""Lease records.\n\nThe worker writes one.\nNobody reads it.\n"""\n'
    assert prose.places_in("a.py", source) == [Place("a.py", 4, "processes-as-people", "Nobody reads it.")]


def test_a_file_that_is_no_valid_python_has_no_places() -> None:
    assert prose.places_in("a.py", "def (nobody\n") == []


@pytest.mark.parametrize(
    ("pattern", "kind", "sentence"),
    [
        ("question-docstring", "module", "Which connections are pending?"),
        ("no-verb-first", "function", "The rank's record."),
        ("no-verb-first", "function", "Returns the record."),
        ("no-verb-first", "function", "`name` of the rank."),
        ("half-sentence-first", "comment", "for the last round"),
        ("half-sentence-first", "function", "Of a training that was looked at."),
        ("pronoun-first", "comment", "It is written before."),
        ("pronoun-first", "class", "One that waits for others."),
        ("terse-docstring", "function", "At once."),
        ("headless-clause", "paragraph", "It shows what a rank has written."),
        ("headless-clause", "cell", "of those that are left"),
        ("headless-clause", "comment", "Whoever asks gets the reply."),
        ("headless-clause", "heading", "Rights of who asks"),
        ("processes-that-talk", "paragraph", "The guard is told of the lease."),
        ("processes-that-talk", "comment", "The agent knows that the rank ended."),
        ("processes-as-people", "comment", "nobody trained for 3 s"),
        ("processes-as-people", "paragraph", "A worker who died is replaced."),
        ("old-fashioned", "paragraph", "The table is made anew."),
        ("invented-metaphor", "class", "The crew of this process."),
        ("clause-as-heading", "heading", "What it does"),
        ("clause-as-heading", "heading", "How fast is it?"),
        ("vague-name", "name", "told"),
        ("vague-name", "name", "_found"),
    ],
)
def test_unclear(pattern: str, kind: str, sentence: str) -> None:
    assert pattern in patterns_in(kind, sentence, opens=True)


@pytest.mark.parametrize(
    ("kind", "sentence"),
    [
        ("module", "Pending connections: handshake, limits and eviction."),
        ("class", "Callbacks that carry out election decisions."),
        ("function", "Return the key of an observed training, or None."),
        ("function", "Process the remaining records."),
        ("function", "Focus the window of the log."),
        ("property", "The rank's record."),
        ("comment", "For example, a restart begins a new round."),
        ("comment", "Hysteresis: recovery needs twice the threshold."),
        ("paragraph", "`nobody` and `told` are code; see [the lease](a.md#beside)."),
        ("paragraph", 'Write "the caller", not "whoever asks".'),
        ("paragraph", "The command tells you which names exist."),
        ("paragraph", "Users who share a machine have a home each."),
        ("heading", "Resize a training"),
        ("cell", "no worker trained for 3 s"),
        ("name", "worker"),
        ("name", "at_most"),
    ],
)
def test_clear(kind: str, sentence: str) -> None:
    assert patterns_in(kind, sentence, opens=True) == []


def test_the_start_of_a_later_sentence_is_free() -> None:
    assert patterns_in("function", "The caller holds the lock.", opens=False) == []


def test_every_pattern_has_a_hint() -> None:
    assert [name for name, pattern in PATTERNS.items() if not pattern.hint.endswith((".", "'"))] == []


@pytest.mark.parametrize(
    ("path", "folder"),
    [
        ("README.md", "README.md"),
        ("docs/decisions/001-title.md", "docs"),
        ("src/muster/clock.py", "src/muster"),
        ("src/muster/world/wire.py", "src/muster/world"),
        ("src/muster/core/world/run.py", "src/muster/core"),
        ("tests/core/test_run.py", "tests"),
    ],
)
def test_a_file_counts_for_its_package_or_folder(path: str, folder: str) -> None:
    assert prose.folder_of(path) == folder


Keys = list[tuple[str, str]]
TALK, NAME = ("docs", "processes-that-talk"), ("tests", "vague-name")


@pytest.mark.parametrize(
    ("stored", "today", "grown", "shrunk", "lowered"),
    [
        ({TALK: 2}, {TALK: 2}, [], [], {TALK: 2}),
        ({TALK: 2}, {TALK: 3}, [TALK], [], {TALK: 2}),
        ({TALK: 2}, {TALK: 1}, [], [TALK], {TALK: 1}),
        ({TALK: 2}, {NAME: 1}, [NAME], [TALK], {}),
        ({}, {}, [], [], {}),
    ],
)
def test_counts_that_changed(stored: Counts, today: Counts, grown: Keys, shrunk: Keys, lowered: Counts) -> None:
    assert prose.changed(stored, today) == (grown, shrunk)
    assert prose.lowered(stored, today) == lowered


def test_counts_are_stored_sorted_and_one_per_line() -> None:
    text = prose.rendered({NAME: 1, TALK: 2})
    assert text == '{\n"docs: processes-that-talk": 2,\n"tests: vague-name": 1\n}\n'
    assert prose.parsed(text) == {NAME: 1, TALK: 2}


def test_the_stored_counts_are_as_the_check_writes_them() -> None:
    text = prose.COUNTS.read_text()
    counts = prose.parsed(text)
    assert prose.rendered(counts) == text
    assert {pattern for _, pattern in counts} <= set(PATTERNS)
    assert min(counts.values()) > 0


def a_place(line: int, excerpt: str = "Nobody reads it.") -> Place:
    return Place("docs/a.md", line, "processes-as-people", excerpt)


@pytest.mark.parametrize(
    ("before", "after", "new"),
    [
        ([a_place(1)], [a_place(7)], []),
        ([a_place(1)], [a_place(1), a_place(2)], [a_place(2)]),
        ([a_place(1)], [a_place(1, "Nobody writes it.")], [a_place(1, "Nobody writes it.")]),
        ([a_place(1)], [], []),
    ],
)
def test_a_place_is_new_if_its_file_had_fewer_such_sentences(
    before: list[Place], after: list[Place], new: list[Place]
) -> None:
    assert prose.new_places(before, after) == new


def test_a_report_names_new_places_with_a_hint_and_the_command_that_lowers() -> None:
    places = [a_place(1), a_place(9)]
    key = ("docs", "processes-as-people")
    assert prose.report({key: 2}, places, lambda here: list(here)) == ""
    text = prose.report({key: 1, NAME: 4}, places, lambda here: [place for place in here if place.line == 9])
    assert text.splitlines() == [
        f"docs: processes-as-people grew from 1 to 2. {PATTERNS['processes-as-people'].hint}",
        "  docs/a.md:9: Nobody reads it.",
        "  All places: python -m tests.docs.prose --list processes-as-people docs",
        "tests: vague-name shrank from 4 to 0.",
        "Store the lower counts: python -m tests.docs.prose --lower",
    ]


def test_a_report_lists_all_places_where_the_new_ones_are_unknown() -> None:
    assert "  docs/a.md:1: Nobody reads it." in prose.report({}, [a_place(1)], lambda here: []).splitlines()


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a repository with one page, and one place in it that is counted and committed."""
    monkeypatch.setattr(prose, "ROOT", tmp_path)
    monkeypatch.setattr(prose, "COUNTS", tmp_path / "counts.json")
    (tmp_path / "README.md").write_text("Nobody reads it.\n")
    git = ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.com")
    subprocess.run([*git, "init", "--quiet"], check=True)
    assert prose.main(["--reset"]) == 0
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "--quiet", "--message", "Begin"], check=True)
    return tmp_path


def test_pages_and_code_of_all_folders_are_read(tmp_path: Path) -> None:
    for path in (
        "README.md",
        "docs/decisions/001.md",
        "src/muster/world/a.py",
        "tests/b.py",
        "build/c.py",
        "docs/d.txt",
    ):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("# Nobody reads it.\n")
    assert [place.path for place in prose.all_places(tmp_path) if place.pattern == "processes-as-people"] == [
        "README.md",
        "docs/decisions/001.md",
        "src/muster/world/a.py",
        "tests/b.py",
    ]


def test_the_check_fails_for_an_added_sentence_and_names_it(
    repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert prose.main([]) == 0
    (repository / "README.md").write_text("Nobody writes it.\n\nNobody reads it.\n")
    (repository / "NEW.md").write_text("The table is made anew.\n")
    capsys.readouterr()
    assert prose.main([]) == 1
    output = capsys.readouterr().out
    assert "README.md:1: Nobody writes it." in output and "README.md:3" not in output
    assert "NEW.md:1: The table is made anew." in output
    assert prose.main(["--lower"]) == 1, "lowering let a new place in"
    assert prose.main(["--reset"]) == 0
    assert prose.main([]) == 0


def test_the_check_fails_until_a_lower_count_is_stored(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (repository / "README.md").write_text("No worker reads it.\n")
    assert prose.main([]) == 1
    assert "--lower" in capsys.readouterr().out
    assert prose.main(["--lower"]) == 0
    assert prose.parsed(prose.COUNTS.read_text()) == {}
    assert prose.main([]) == 0


def test_places_are_listed_by_pattern_and_path(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert prose.main(["--list", "processes-as-people"]) == 0
    assert capsys.readouterr().out == "README.md:1: Nobody reads it.\n"
    assert prose.main(["--list", "processes-as-people", "docs"]) == 0
    assert capsys.readouterr().out == ""
    with pytest.raises(SystemExit, match="2"):
        prose.main(["docs"])


def test_counts_are_printed_as_json(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    (repository / "README.md").write_text("No worker reads it anew.\n")
    assert prose.main(["--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {
        "counts": {"README.md": {"old-fashioned": 1}},
        "grown": [["README.md", "old-fashioned"]],
        "shrunk": [["README.md", "processes-as-people"]],
    }

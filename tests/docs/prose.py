"""The prose check: counts unclear sentences and names per folder, and fails when a count grows.

It reads the pages, and the docstrings, comments and local names of the Python code. A place is a hint, not a verdict:
never write a worse sentence to please the check. Only the standard library is needed.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from tests.docs.prose_patterns import PATTERNS, patterns_in
from tests.docs.prose_texts import texts_of_code, texts_of_page

ROOT = Path(__file__).parents[2]
COUNTS = ROOT / "tests" / "docs" / "prose_counts.json"
CODE = ("src", "tests", "bench", "examples", "docs")
SHOWN = 20
EXAMPLE = """example:
  python -m tests.docs.prose                                      # check
  python -m tests.docs.prose --list vague-name src/muster/world   # names to improve there
  python -m tests.docs.prose --lower                              # after you improved some"""

Counts = dict[tuple[str, str], int]  # by folder and pattern


class Place(NamedTuple):
    """A sentence or a name that matches a pattern."""

    path: str
    line: int
    pattern: str
    excerpt: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.excerpt[:120]}"


# Counting ----------------------------------------------------------------------------------------


def places_in(path: str, source: str) -> list[Place]:
    """Return the places of a page or module. A file that is no valid Python has none."""
    try:
        texts = list(texts_of_code(source) if path.endswith(".py") else texts_of_page(source))
    except SyntaxError:
        return []
    places = []
    for text in texts:
        for number, (line, sentence) in enumerate(text.sentences()):
            places += [Place(path, line, name, sentence) for name in patterns_in(text.kind, sentence, number == 0)]
    return places


def folder_of(path: str) -> str:
    """Return the name under which a file is counted: a package of muster, another folder, or a page of its own."""
    parts = path.split("/")
    if parts[:2] == ["src", "muster"]:
        return "/".join(parts[: min(3, len(parts) - 1)])
    return parts[0]


def count(places: Sequence[Place]) -> Counts:
    """Return how many places each folder has of each pattern."""
    return dict(Counter((folder_of(place.path), place.pattern) for place in places))


def changed(stored: Counts, today: Counts) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Return the keys whose counts grew, and those whose counts shrank."""
    keys = sorted({*stored, *today})
    grown = [key for key in keys if today.get(key, 0) > stored.get(key, 0)]
    return grown, [key for key in keys if today.get(key, 0) < stored.get(key, 0)]


def lowered(stored: Counts, today: Counts) -> Counts:
    """Return the smaller of both counts of each key, without zeros. No count is raised."""
    return {key: lower for key in stored if (lower := min(stored[key], today.get(key, 0)))}


def rendered(counts: Counts) -> str:
    """Return counts as JSON with sorted keys and one count per line, so that versions merge line by line."""
    entries = {f"{folder}: {pattern}": number for (folder, pattern), number in counts.items()}
    return json.dumps(entries, indent=0, sort_keys=True) + "\n"


def parsed(text: str) -> Counts:
    """Return the counts of a rendered file."""
    entries: dict[str, int] = json.loads(text)
    return {(folder, pattern): number for key, number in entries.items() for folder, pattern in [key.split(": ")]}


def new_places(before: Sequence[Place], after: Sequence[Place]) -> list[Place]:
    """Return the places that `before` does not have. A place that only moved within its file is not new."""
    remaining = Counter((place.path, place.pattern, place.excerpt) for place in before)
    new = []
    for place in after:
        key = (place.path, place.pattern, place.excerpt)
        remaining[key] -= 1
        if remaining[key] < 0:
            new.append(place)
    return new


# The repository ----------------------------------------------------------------------------------


def _places_of_file(root: Path, path: Path) -> list[Place]:
    return places_in(path.relative_to(root).as_posix(), path.read_text(errors="replace"))


def all_places(root: Path) -> list[Place]:
    """Return every place of the repository, in the order of the paths."""
    files = [*root.glob("*.md"), *(root / "docs").rglob("*.md")]
    files += [path for folder in CODE for path in (root / folder).rglob("*.py")]
    with ProcessPoolExecutor() as pool:
        return list(chain.from_iterable(pool.map(partial(_places_of_file, root), sorted(files), chunksize=16)))


def _git(*arguments: str) -> str:
    """Return what git prints, or nothing where it fails or is not installed."""
    try:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return ""


def added_since_counts(places: Sequence[Place]) -> list[Place]:
    """Return the given places that were added since the commit that changed the stored counts last."""
    base = _git("log", "-1", "--format=%H", "--", str(COUNTS)).strip()
    if not base:
        return []
    touched = set((_git("diff", "--name-only", base) + _git("ls-files", "-o", "--exclude-standard")).splitlines())
    after = [place for place in places if place.path in touched]
    paths = sorted({place.path for place in after})
    before = [place for path in paths for place in places_in(path, _git("show", f"{base}:{path}"))]
    return new_places(before, after)


# The command -------------------------------------------------------------------------------------


def report(stored: Counts, places: Sequence[Place], only_new: Callable[[Sequence[Place]], list[Place]]) -> str:
    """Return the counts that changed and what to do about them, or an empty string. `only_new` picks the new places."""
    today = count(places)
    grown, shrunk = changed(stored, today)
    lines = []
    for key in grown:
        folder, pattern = key
        here = [place for place in places if (folder_of(place.path), place.pattern) == key]
        lines.append(f"{folder}: {pattern} grew from {stored.get(key, 0)} to {today[key]}. {PATTERNS[pattern].hint}")
        lines += [f"  {place}" for place in (only_new(here) or here)[:SHOWN]]
        lines.append(f"  All places: python -m tests.docs.prose --list {pattern} {folder}")
    for folder, pattern in shrunk:
        lines.append(f"{folder}: {pattern} shrank from {stored[folder, pattern]} to {today.get((folder, pattern), 0)}.")
    if shrunk:
        lines.append("Store the lower counts: python -m tests.docs.prose --lower")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.docs.prose",
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument(
        "--list", metavar="PATTERN", choices=PATTERNS, help=f"print the places of one of: {', '.join(PATTERNS)}"
    )
    action.add_argument("--json", action="store_true", help="print today's counts and those that changed")
    action.add_argument("--lower", action="store_true", help="store the counts that shrank; never raises a count")
    action.add_argument(
        "--reset",
        action="store_true",
        help="store all of today's counts. This is right only after a merge of branches\n"
        "that both changed counts, after a folder was renamed, and after a pattern\n"
        "was changed; never to let a new place in",
    )
    parser.add_argument(
        "path", metavar="PATH", nargs="?", default="", help="with --list: only files whose path begins with this"
    )
    options = parser.parse_args(arguments)
    if options.path and not options.list:
        parser.error("PATH needs --list: the counts are those of the whole repository")
    places = all_places(ROOT)
    today = count(places)
    stored = parsed(COUNTS.read_text()) if COUNTS.exists() else {}
    if options.list:
        chosen = [place for place in places if place.pattern == options.list and place.path.startswith(options.path)]
        sys.stdout.writelines(f"{place}\n" for place in chosen)
        return 0
    if options.lower or options.reset:
        COUNTS.write_text(rendered(today if options.reset else lowered(stored, today)))
        stored = parsed(COUNTS.read_text())
    problems = report(stored, places, added_since_counts)
    if options.json:
        folders = {folder: {p: n for (f, p), n in sorted(today.items()) if f == folder} for folder, _ in sorted(today)}
        grown, shrunk = changed(stored, today)
        print(json.dumps({"counts": folders, "grown": grown, "shrunk": shrunk}, indent=1))
    else:
        print(problems or f"{sum(today.values())} unclear places, as many as are stored.")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

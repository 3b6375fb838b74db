"""Does this program need torch? Looks at the imports of a script and of the local modules that it reaches.

Nothing of the program is imported to find out: that is for its ranks, each in its own process.
"""

from __future__ import annotations

import ast
import importlib.util
import itertools
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

_MAX_FILES = 500
_STDLIB = os.path.dirname(os.__file__)


def needs_torch(mode: str, target: str) -> bool:
    """True if torch, or an installed package that depends on it, is imported anywhere in the program's own files."""
    if mode == "command" or importlib.util.find_spec("torch") is None:
        return False
    outside = set[str]()
    for _, names in walk(mode, target, outside):
        if any(name.partition(".")[0] == "torch" for name in names):
            return True
    return any(_depends_on_torch(name) for name in outside - sys.stdlib_module_names - {"muster"})


def walk(mode: str, target: str, outside: set[str]) -> Iterator[tuple[ast.Module, set[str]]]:
    """Each of the program's own files that can be read, with the names that it imports; others gather in `outside`."""
    todo = entry(mode, target)
    places = roots(mode, todo)
    seen = set(todo)
    while todo and len(seen) < _MAX_FILES:
        path = todo.pop()
        if (tree := parsed(path)) is None:
            continue
        names = _imports(tree, path, places)
        yield tree, names
        for name in names:
            top = name.partition(".")[0]
            files = [] if top == "muster" else local(name, places)
            if not files:
                outside.add(top)
            todo += [path for path in files if path not in seen]
            seen.update(files)


def entry(mode: str, target: str) -> list[Path]:
    """The files that run first: the program's own, last, and those of the packages that it lies in."""
    if mode == "script":
        path = Path(target)
        path = path / "__main__.py" if path.is_dir() else path
        return [path.resolve()] if path.is_file() else []
    files: list[Path] = []
    where: Iterable[str] | None = None
    for name in [*itertools.accumulate(target.split("."), "{}.{}".format), f"{target}.__main__"]:
        found = (finder.find_spec(name, where) for finder in sys.meta_path if hasattr(finder, "find_spec"))  # type: ignore[arg-type]
        spec = next(filter(None, found), None)
        if spec is None:
            break
        if spec.origin and os.path.isfile(spec.origin):
            files.append(Path(spec.origin))
        if spec.submodule_search_locations is None:
            break
        where = spec.submodule_search_locations
    return files


def roots(mode: str, entries: list[Path]) -> list[Path]:
    """Where the program's own modules lie: next to it, on PYTHONPATH, or installed for editing."""
    first = entries[-1].parent if entries and mode == "script" else Path.cwd()
    mine = [
        Path(entry).resolve()
        for entry in sys.path
        if os.path.isdir(entry) and not entry.startswith(_STDLIB) and not entry.endswith("-packages")
    ]
    return list(dict.fromkeys([first.resolve(), *mine]))


def parsed(path: Path) -> ast.Module | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the rank will say it
            return ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return None


def _imports(tree: ast.Module, path: Path, roots: list[Path]) -> set[str]:
    """Absolute names of the modules that a file imports, wherever in the file."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (base := base_of(node, path, roots)):
            names.update(f"{base}.{alias.name}" for alias in node.names)
    return names


def base_of(node: ast.ImportFrom, path: Path, roots: list[Path]) -> str:
    """The absolute name of what a file imports from; nothing if that lies outside of every package."""
    if not node.level:
        return node.module or ""
    root = next((root for root in roots if path.is_relative_to(root)), path.parent)
    parts = path.relative_to(root).parts
    return ".".join(filter(None, [*parts[: len(parts) - node.level], node.module or ""]))


def local(name: str, roots: list[Path]) -> list[Path]:
    """The program's own files that importing this name runs, packages around it included."""
    for root in roots:
        stems = list(itertools.accumulate(name.split("."), Path.joinpath, initial=root))[1:]
        files = [path for stem in stems for path in (stem.with_name(f"{stem.name}.py"), stem / "__init__.py")]
        if found := [path for path in files if path.is_file()]:
            return found
    return []


def _depends_on_torch(name: str) -> bool:
    import importlib.metadata

    try:
        needs = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return False
    return any(re.match(r"torch\b(?![-.\w])", need) and "extra ==" not in need for need in needs)

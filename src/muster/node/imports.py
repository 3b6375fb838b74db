"""Does this program need torch? Looks at the imports of a script and of the local modules that it reaches."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import re
import sys
from pathlib import Path

_MAX_FILES = 500


def needs_torch(mode: str, target: str) -> bool:
    """True if torch, or an installed package that depends on it, is imported anywhere in the program's own files."""
    if mode == "command":
        return False
    start = _entry(mode, target)
    if start is None:
        return False
    roots = [start.parent] if mode == "script" else [Path.cwd()]
    todo, seen, outside = [start], {start}, set[str]()
    while todo and len(seen) < _MAX_FILES:
        path = todo.pop()
        for name in _imports(path, roots[0]):
            local = _local(name, roots)
            if local is None:
                outside.add(name.partition(".")[0])
            elif local not in seen:
                seen.add(local)
                todo.append(local)
    return any(_brings_torch(name) for name in sorted(outside))


def _entry(mode: str, target: str) -> Path | None:
    if mode == "script":
        path = Path(target)
        path = path / "__main__.py" if path.is_dir() else path
        return path.resolve() if path.is_file() else None
    try:
        spec = importlib.util.find_spec(target)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{target}.__main__")
    except (ImportError, ValueError, AttributeError):
        return None
    return Path(spec.origin) if spec is not None and spec.origin and os.path.isfile(spec.origin) else None


def _imports(path: Path, root: Path) -> set[str]:
    """Absolute names of the modules that a file imports, wherever in the file."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return set()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*_package_of(path, root, node.level), *([base] if base else [])])
            if base:
                names.add(base)
                names.update(f"{base}.{alias.name}" for alias in node.names)
    return names


def _package_of(path: Path, root: Path, level: int) -> tuple[str, ...]:
    try:
        parts = path.resolve().relative_to(root.resolve()).parts
    except ValueError:
        return ()
    return parts[: len(parts) - level]


def _local(name: str, roots: list[Path]) -> Path | None:
    for root in roots:
        stem = root.joinpath(*name.split("."))
        for path in (stem.with_suffix(".py"), stem / "__init__.py"):
            if path.is_file():
                return path.resolve()
    return None


def _brings_torch(name: str) -> bool:
    if name == "torch":
        return importlib.util.find_spec("torch") is not None
    if name in sys.stdlib_module_names or name == "muster":
        return False
    try:
        needs = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:
        return False
    return any(re.match(r"torch\b(?![-.\w])", need) and "extra ==" not in need for need in needs)

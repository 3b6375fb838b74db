"""Does the program expect to be started by somebody else? If so, that is said in one line, before it is looked for.

Two things go wrong without a word. A script that starts its own ranks (`mp.spawn`) does so in every rank, and they all
wait for a store that is not theirs. And what `accelerate config` wrote is read by `accelerate launch` alone. Both are
seen in the program's own files; nothing of it is imported. Ranks that are started where no file of its own shows it are
found out when they wait (`own_ranks.py`).
"""

from __future__ import annotations

import ast
import asyncio
import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from muster.node import imports, opening, own_ranks, progress
from muster.node.program import Program
from muster.node.saves import WatchedRank
from muster.types.codec import readable
from muster.types.frames import MAX_REMARK, Frame, RemarkFrame

_MOST_FILES = 40
_SPAWNERS = frozenset(
    {
        "torch.multiprocessing.spawn",
        "torch.multiprocessing.start_processes",
        "torch.multiprocessing.spawn.spawn",
        "accelerate.notebook_launcher",
        "accelerate.debug_launcher",
        "accelerate.launchers.notebook_launcher",
    }
)
_GROUP = "init_process_group"
_ON_ACCELERATE = frozenset({"accelerate", "trl"})  # whose scripts are started by `accelerate launch`
_CONFIGS = ("default_config.yaml", "default_config.yml", "default_config.json")


class Where(NamedTuple):
    """Where its ranks are, as long as they run."""

    ranks: Callable[[], Sequence[WatchedRank]]
    store_port: int


async def tell(program: Program, at: Where, *to: Callable[[str], object], send: Callable[[Frame], object]) -> None:
    """Once its ranks run: it is not worth making anybody wait."""
    if program.mode == "command":
        return
    lines = await asyncio.to_thread(about, program.mode, program.target, os.environ)
    _say(lines, to, send)
    if not any(own_ranks.REMEDY in line for line in lines):
        line = await own_ranks.found(lambda: _first(at.ranks()), at.store_port)
        _say([line] if line else [], to, send)


def _first(ranks: Iterable[WatchedRank]) -> int | None:
    """The process of rank 0, until it has told a step."""
    return next((one.pid for one in ranks if one.number == 0 and progress.read_first(one.mark) is None), None)


def _say(lines: Iterable[str], to: Iterable[Callable[[str], object]], send: Callable[[Frame], object]) -> None:
    for line in lines:
        for say in to:
            say(line)
        send(RemarkFrame(text=readable(line)[:MAX_REMARK]))


def about(mode: str, target: str, env: Mapping[str, str]) -> list[str]:
    """What a user should know of how this program will run here; mostly nothing."""
    if mode == "command":
        return []
    outside = set[str]()
    trees = [tree for tree, _ in itertools.islice(imports.walk(mode, target, outside), _MOST_FILES)]
    configured = _configured(not outside.isdisjoint(_ON_ACCELERATE), env)
    return [line for line in (_spawns(trees), configured, _unprepared(mode, target)) if line]


def _unprepared(mode: str, target: str) -> str:
    """Name the line at the top of the program that keeps torch from being imported ahead."""
    found = opening.obstacle(mode, target)
    if found is None:
        return ""
    remedy = "move it below the imports"
    if found.sets_variables:
        remedy = 'write os.environ["NAME"] = "value" with constants, one line for each variable'
    return (
        f"{found.path.name}:{found.line} keeps torch from being imported ahead, so every start and every heal waits "
        f"for that import: {remedy}"
    )


def _spawns(trees: Iterable[ast.Module]) -> str:
    """Such a function alone may do something else: only with a process group in the same program it starts ranks."""
    spawner, group = "", False
    for tree in trees:
        called = _called(tree)
        group |= any(name.rpartition(".")[2] == _GROUP for name in called)
        spawner = spawner or next((name for name in sorted(called) if name in _SPAWNERS), "")
    by_itself = spawner.startswith("accelerate.")
    if not spawner or not (group or by_itself):
        return ""
    return (
        f"the program starts ranks by itself ({spawner}), and muster starts --nproc of them on each worker already: "
        f"they will wait for each other for ever. {own_ranks.REMEDY}"
    )


def _configured(uses: bool, env: Mapping[str, str]) -> str:
    if not uses or any(name.startswith("ACCELERATE_") for name in env):
        return ""
    cache = env.get("XDG_CACHE_HOME") or os.path.join(env.get("HOME", "/"), ".cache")
    folder = os.path.join(env.get("HF_HOME") or os.path.join(cache, "huggingface"), "accelerate")
    found = next((path for name in _CONFIGS if os.path.isfile(path := os.path.join(folder, name))), "")
    if not found:
        return ""
    return (
        f"{found} is read by `accelerate launch` alone, and has no effect here: give what it says to Accelerator(…), "
        "or as variables (--env ACCELERATE_MIXED_PRECISION=bf16)"
    )


def _called(tree: ast.Module) -> set[str]:
    """The full names of what a file calls, as far as its imports tell."""
    known = _aliases(tree)
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (dotted := _dotted(node.func)):
            first, dot, rest = dotted.partition(".")
            names.add(f"{known.get(first, first)}{dot}{rest}")
    return names


def _aliases(tree: ast.Module) -> dict[str, str]:
    """What each name that an import gives stands for."""
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            known |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            known |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return known


def _dotted(node: ast.AST) -> str:
    match node:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=value, attr=attr):
            inner = _dotted(value)
            return f"{inner}.{attr}" if inner else ""
    return ""

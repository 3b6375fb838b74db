"""Under which control groups does a node put its Pods, and how do they go? Version 1: one tree for each controller."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

NEEDED = {"cpu", "cpuset", "memory", "pids"}
_GONE_S = 10.0


def trees(*kinds: str) -> list[Path]:
    """Where this machine has version 1 mounted, or what is named."""
    lines = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
    return [Path(words[1]) for words in lines if words[2] in (kinds or ("cgroup",))]


def everywhere(group: str) -> list[Path]:
    """Where there is such a group: runc makes them in version 2 as well, where both are mounted."""
    return [tree / group for tree in trees("cgroup", "cgroup2") if (tree / group).exists()]


def missing() -> set[str]:
    return NEEDED - {name for tree in trees() for name in tree.name.split(",")}


def make(group: str) -> None:
    for tree in trees():
        place = tree / group
        place.mkdir(parents=True, exist_ok=True)
        for part in reversed([place, *place.parents]):
            if part.is_relative_to(tree) and part != tree and (part / "cpuset.cpus").exists():
                for name in ("cpuset.cpus", "cpuset.mems"):
                    (part / name).write_text((part.parent / name).read_text())


def remove(group: str) -> list[Path]:
    """What could not be removed: somebody is in it."""
    deadline = time.monotonic() + _GONE_S
    while left := [folder for top in everywhere(group) for folder in _bottom_up(top) if not _removed(folder)]:
        if time.monotonic() > deadline:
            return left
        time.sleep(0.02)
    return []


def _bottom_up(folder: Path) -> Iterator[Path]:
    for place, _, _ in os.walk(folder, topdown=False):
        yield Path(place)


def _removed(folder: Path) -> bool:
    with contextlib.suppress(OSError):
        folder.rmdir()
    return not folder.exists()

"""A rank was killed: is there any sign that memory ran short?

Nobody tells a process why it was killed. What the kernel counts is looked at instead: how much its memory group has
used of what it may, and how often something was killed for want of memory on the whole machine. Where neither says
anything, that is worth knowing, too: then somebody has killed it.
"""

from __future__ import annotations

import os
from typing import NamedTuple

_NEARLY = 0.95  # of a limit: a group is killed at it, and what is freed at once is not seen
_NO_LIMIT = 1 << 60  # control groups of version 1 write a number near the largest one
_NAMES = {  # of version 1 and 2
    "memory": ("memory.usage_in_bytes", "memory.max_usage_in_bytes", "memory.limit_in_bytes"),
    "": ("memory.current", "memory.peak", "memory.max"),
}


class Use(NamedTuple):
    """Of our memory group, in bytes; 0 where it is not known."""

    now: int = 0
    peak: int = 0
    limit: int = 0


def told(*, oom: bool, before: int, use: Use | None = None, kills: int | None = None) -> str:
    """One clause about memory. `before`: how often something had been killed for it on this machine by then."""
    use = used() if use is None else use
    more = (kills_here() if kills is None else kills) - before
    limit = f" of {shown(use.limit)}" if use.limit else ""
    at_most = f"its memory group used up to {shown(use.peak)}{limit}" if use.peak else ""
    if oom:
        return at_most
    if more > 0:
        whom = "a process" if more == 1 else f"{more} processes"
        return f"the kernel has meanwhile killed {whom} on this machine for want of memory"
    if use.limit and use.peak >= _NEARLY * use.limit:
        return f"{at_most}: memory may have run short"
    return "no sign of memory pressure" + (f" ({at_most})" if at_most and use.limit else "")


def shown(amount: int) -> str:
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if amount >= size:
            return f"{amount / size:.1f} {unit}"
    return f"{amount // 1024} KiB"


def kills_here(counters: str = "/proc/vmstat") -> int:
    """How often the kernel has killed something on this machine for want of memory; 0 where it does not say."""
    try:
        with open(counters) as file:
            return next((int(line.split()[1]) for line in file if line.startswith("oom_kill ")), 0)
    except (OSError, ValueError, IndexError):
        return 0


def used(groups_file: str = "/proc/self/cgroup", tree: str = "/sys/fs/cgroup") -> Use:
    try:
        with open(groups_file) as file:
            paths = {kinds: path for _, kinds, path in (line.strip().split(":", 2) for line in file)}
    except (OSError, ValueError):
        return Use()
    kind = "memory" if "memory" in paths else ""
    root = f"{tree}/memory" if kind else tree
    own = root + paths.get(kind, "")
    folder = own if os.path.isdir(own) else root  # a container sees the tree from its own group on
    now, peak, limit = (_number(f"{folder}/{name}") for name in _NAMES[kind])
    return Use(now, max(now, peak), limit if limit < _NO_LIMIT else 0)


def _number(path: str) -> int:
    """What a file of a control group says; 0 for what is not there, and for `max`."""
    try:
        with open(path) as file:
            text = file.read(32).strip()
    except OSError:
        return 0
    return int(text) if text.isdigit() else 0

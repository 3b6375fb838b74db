"""Has a rank started ranks of its own, which now wait for ever? What the kernel tells of its processes is looked at.

Nothing in the rank is touched for it. Processes of `multiprocessing` that do nothing, below a rank that does nothing
and has never come to the round's store, wait for somebody: who only loads data works, or has a rank that does.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import NamedTuple

from muster.node import process_table
from muster.node.process_table import TICKS

LOOK_S = 5.0
IDLE_LOOKS = 2  # in a row: what is being started, or is swapped in, works in between
_MOST_LOOKS = 240  # whoever starts processes later than that has begun to train
_MOST_WORK = 0.02  # of a core, for all of them together
_SPAWNED = b"--multiprocessing-fork"
REMEDY = "Call the function once, with RANK, WORLD_SIZE and LOCAL_RANK from the environment, and set --nproc"


class Seen(NamedTuple):
    """A rank at one moment, with the processes that it started by `multiprocessing`."""

    children: frozenset[tuple[int, int]] = frozenset()  # pid, and when it began
    ticks: int = 0  # of all of them, so far


async def found(rank: Callable[[], int | None], store_port: int) -> str:
    """A line for the user, once it is certain that nothing happens; nothing if the rank ends or gets on."""
    before, idle = Seen(), 0
    for _ in range(_MOST_LOOKS):
        await asyncio.sleep(LOOK_S)
        if (pid := rank()) is None:
            break
        now = await asyncio.to_thread(look, pid)
        idle = idle + 1 if idles(before, now) else 0
        before = now
        if idle >= IDLE_LOOKS and not await asyncio.to_thread(takes_part, pid, now, store_port):
            return told(len(now.children), idle * LOOK_S)
    return ""


def idles(before: Seen, now: Seen) -> bool:
    same = bool(now.children) and now.children == before.children
    return same and now.ticks - before.ticks <= _MOST_WORK * TICKS * LOOK_S


def told(count: int, seconds: float) -> str:
    whom = "a process" if count == 1 else f"{count} processes"
    return (
        f"rank 0 has started {whom} by itself (multiprocessing) and waits, and none of them has done anything for "
        f"{seconds:.0f} s. If those are to be ranks: muster starts --nproc of them on each worker already, and these "
        f"wait for a store that is not theirs. {REMEDY}"
    )


def look(pid: int, proc: str = "/proc") -> Seen:
    own = process_table.command(pid, proc)
    children, ticks = set(), 0
    for child in process_table.started_by(pid, proc) or ():
        words = process_table.command(child, proc)
        process = process_table.find(child, proc)
        if process is not None and words and (_SPAWNED in words or words == own):  # one that was forked has our words
            children.add((child, process.began))
            ticks += process.ticks
    rank = process_table.find(pid, proc)
    return Seen(frozenset(children), ticks + (rank.ticks if rank is not None else 0))


def takes_part(pid: int, seen: Seen, store_port: int, proc: str = "/proc") -> bool:
    """Whether the rank has come to the round's store itself, or by one process that stands for it."""
    at_store = _sockets_to(store_port, pid, proc)
    stand_ins = [child for child, _ in seen.children] if len(seen.children) == 1 else []
    return any(at_store & _sockets_of(one, proc) for one in (pid, *stand_ins))


def _sockets_to(port: int, pid: int, proc: str) -> set[str]:
    """Inodes of the connections to a port that this process could have."""
    found, wanted = set[str](), f":{port:04X}"
    for family in ("tcp", "tcp6"):
        try:
            with open(f"{proc}/{pid}/net/{family}") as file:
                found |= {
                    fields[9] for fields in map(str.split, file) if len(fields) > 9 and fields[2].endswith(wanted)
                }
        except OSError:
            continue
    return found


def _sockets_of(pid: int, proc: str) -> set[str]:
    found = set[str]()
    try:
        with os.scandir(f"{proc}/{pid}/fd") as entries:
            for entry in entries:
                name = os.readlink(entry.path)
                if name.startswith("socket:["):
                    found.add(name[len("socket:[") : -1])
    except OSError:
        pass  # it has ended, or one of its files was closed meanwhile: the next look tells
    return found

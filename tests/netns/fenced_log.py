"""Did two rounds ever train at once? Read from what their ranks wrote, line by line, into one file.

Lines are in the order in which they were written, so that no clock is needed to say who was at work after whom.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

# How long ranks of a machine that stood still may go on once it goes on: until their guard has ended them.
WAKING_S = 5.0
FRESH_S = 0.5
RECENT = 1 << 17  # bytes: some seconds of a few ranks


@dataclass(frozen=True)
class Mark:
    """`at` is of the clock that all machines of one kernel share."""

    kind: str
    round: int
    rank: int
    world: int
    worker: str
    pid: int
    at: float


def read(text: str) -> list[Mark]:
    """The last line may be cut: somebody may be writing it."""
    return [_mark(line) for line in text.split("\n")[:-1]]


def read_file(path: Path, last: int | None = None) -> list[Mark]:
    """All of it, or the lines of its last bytes."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        start = 0 if last is None else max(0, path.stat().st_size - last)
        file.seek(start)
        text = file.read().decode()
    return read(text.partition("\n")[2] if start else text)


def _mark(line: str) -> Mark:
    kind, number, rank, world, worker, pid, at = line.split()
    return Mark(kind, int(number), int(rank), int(world), worker, int(pid), float(at))


def problems(marks: Iterable[Mark], thawed: Mapping[str, float] | None = None) -> list[str]:
    """What must never be; nothing, one hopes.

    `thawed` has workers whose machine stood still, and when it went on: nobody can keep their ranks from a last mark.
    """
    found: dict[str, None] = {}
    newest: Mark | None = None
    seats: dict[tuple[int, int], Mark] = {}
    worlds: dict[int, Mark] = {}
    for mark in marks:
        if newest is None or mark.round > newest.round:
            newest = mark
        elif mark.round < newest.round and not _woke(mark, thawed or {}):
            found[f"{_who(mark)} was at work when {_who(newest)} had begun"] = None
        first = seats.setdefault((mark.round, mark.rank), mark)
        if first.pid != mark.pid:
            found[f"{_who(mark)} is {_who(first)}, too"] = None
        if worlds.setdefault(mark.round, mark).world != mark.world or not mark.rank < mark.world:
            found[f"{_who(mark)} is in a world of {mark.world}, {_who(worlds[mark.round])} in another"] = None
    return list(found)


def _woke(mark: Mark, thawed: Mapping[str, float]) -> bool:
    return mark.worker in thawed and mark.at <= thawed[mark.worker] + WAKING_S


def _who(mark: Mark) -> str:
    return f"rank {mark.rank} of round {mark.round} on {mark.worker} (pid {mark.pid})"


def at_work(marks: Iterable[Mark], now: float) -> tuple[int, dict[int, str]] | None:
    """The newest round with rank → worker, if all its ranks have left a mark just now."""
    fresh = [mark for mark in marks if mark.kind == "beat" and mark.at > now - FRESH_S]
    newest = max((mark.round for mark in fresh), default=-1)
    seats = {mark.rank: mark.worker for mark in fresh if mark.round == newest}
    worlds = {mark.world for mark in fresh if mark.round == newest}
    return (newest, seats) if worlds == {len(seats)} else None


def beginning(marks: Iterable[Mark], number: int) -> float | None:
    """When all ranks of that round were at work; None while some are missing."""
    starts: dict[int, float] = {}
    for mark in marks:
        if mark.round == number and mark.kind == "beat":
            starts.setdefault(mark.rank, mark.at)
            if len(starts) == mark.world:
                return max(starts.values())
    return None

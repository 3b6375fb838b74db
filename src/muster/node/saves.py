"""Is a rank in the middle of a save, so that it should not be ended yet?

It is while it is inside `muster.saving()`, and while it has a file open for writing where programs put their
checkpoints: below its working folder, its script's, or a folder that its arguments name. What is written all the time
is no save: a file that is appended to, one with the name of a log, one that has been open for long. A checkpoint that
is a folder may be between two of its files, or before its first: one to which a file was added a moment ago is waited
for, too, and one that was made a moment ago and is empty.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import itertools
import os
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from muster import files
from muster.node import named

LOOK_S = 0.05
SETTLE_S = 0.3  # a checkpoint is several files: the next one is opened soon after the one before is closed
SAMPLE_S = 5.0
FRESH_S = 0.7  # an empty folder that was made so short ago may not have its first file yet
FOLDERS_S = 0.05  # for looking at folders, of which there may be many, far away
_MOST_FOLDERS, _DEEPEST, _LEAST_BYTES = 300, 3, 1024
LONG_OPEN_S = 30.0  # a file that has been open for so long is kept open, not saved
SHUT_S = 0.1  # for the signal to arrive, before a rank may begin a save in its grace
_SHARED = frozenset({"/", "/tmp", "/var/tmp", "/dev", "/dev/shm"})  # everybody writes there
_LOGS = (".log", ".out", ".err", ".jsonl", ".csv", ".tsv", ".wandb", ".lock", ".pid")


@dataclass(frozen=True)
class Where:
    """Ranks are run in `cwd` with these words; `without` are our own folders, the marks of ranks are in `scratch`."""

    cwd: str
    words: tuple[str, ...]
    without: tuple[str, ...]
    scratch: str


@dataclass(frozen=True)
class WatchedRank:
    number: int
    mark: str  # the file that `muster.saving` locks
    pid: int | None = None


@dataclass(frozen=True)
class Busy:
    """Ranks that say that they save, and what others are writing."""

    saving: tuple[int, ...] = ()
    writing: Mapping[int, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.saving or self.writing)

    @property
    def told(self) -> str:
        saves = [f"rank {rank} saves" for rank in self.saving]
        writes = [f"rank {rank} writes {path}" for rank, path in self.writing.items()]
        return ", ".join((saves + writes)[:4]) + (" and others" if len(saves + writes) > 4 else "")


@dataclass(frozen=True)
class Patience:
    """How long ranks that save are waited for."""

    grace_s: float  # for one that has files open
    timeout_s: float  # for one that says that it saves

    def of(self, busy: Busy) -> float:
        return max(self.timeout_s if busy.saving else 0.0, self.grace_s if busy.writing else 0.0)


def roots_of(cwd: str, words: Sequence[str]) -> tuple[str, ...]:
    """How the names of files begin that a program which is run there with these words may save to."""
    found = set()
    for value in (".", *(word.rpartition("=")[2] for word in words)):
        path = os.path.realpath(os.path.join(cwd, value))
        folder = path if os.path.isdir(path) else os.path.dirname(path)
        if folder not in _SHARED:
            found.add(f"{folder}/")
        elif folder != path:
            found.add(path)  # that file alone, and what is written beside it under its name
    return tuple(sorted(found))


class Saves:
    """Of the ranks of one worker."""

    def __init__(self, where: Where) -> None:
        self._cwd = where.cwd
        self._words = where.words
        self._scratch = where.scratch
        self._without = tuple(f"{os.path.realpath(path)}/" for path in (*where.without, where.scratch))
        self._roots: tuple[str, ...] | None = None  # found when a file is seen that may be below one
        self._since: dict[tuple[int, str], float] = {}
        self._shut = _Shut()

    def marks(self, number: int | None) -> list[str]:
        """Of the ranks of that round."""
        try:
            names = os.listdir(self._scratch)
        except OSError:
            return []
        return sorted(os.path.join(self._scratch, name) for name in names if name.startswith(f"progress-{number}-"))

    def sample(self, ranks: Sequence[WatchedRank], now: float) -> None:
        """Remember since when each file is open."""
        self._roots = None
        seen = [(rank.number, path) for rank in ranks if rank.pid is not None for path in self._written(rank.pid)]
        self._since = {one: self._since.get(one, now) for one in seen}

    def _busy(self, ranks: Sequence[WatchedRank], now: float) -> Busy:
        saving = tuple(rank.number for rank in ranks if not self._shut.take(rank.mark))
        writing = {}
        for rank in ranks:
            if rank.pid is not None and rank.number not in saving:
                for path in self._written(rank.pid):
                    if now - self._since.get((rank.number, path), now) < LONG_OPEN_S:
                        writing[rank.number] = path
        return Busy(saving, writing)

    def _written(self, pid: int) -> Iterator[str]:
        for one in _family(pid):
            for path in _open_for_writing(one, self._may_be_saved):
                if not self._is_log(path):
                    yield path

    def _may_be_saved(self, path: str) -> bool:
        """Asked of every open file of a rank that should end: what a rank always has open is told apart by its name."""
        if not path.startswith("/") or path == os.devnull or path.startswith(self._without):
            return False
        if self._roots is None:
            self._roots = roots_of(self._cwd, self._words)
        return path.startswith(self._roots)

    def _is_log(self, path: str) -> bool:
        root = max((root for root in self._roots or () if path.startswith(root)), key=len)
        first, *rest = path.removeprefix(root).split("/")
        name = (rest or [first])[-1]
        return name.endswith(_LOGS) or "tfevents" in name or (bool(rest) and first.startswith("."))

    async def _added_to(self) -> bool:
        """Whether a folder has got a file a moment ago. Asked beside the loop: nobody knows how long a disk takes."""
        look = asyncio.to_thread(_grows, roots_of(self._cwd, self._words), self._without)
        try:
            return await asyncio.wait_for(look, FOLDERS_S)
        except TimeoutError:
            return False

    def named(self, lines: Sequence[str]) -> str:
        """Which of those files a rank's last words name."""
        without = [root for root in roots_of(self._cwd, self._words) if not root.startswith(self._without)]
        return named.path_in(lines, self._cwd, without)

    async def over(
        self, ranks: Callable[[], Sequence[WatchedRank]], patience: Patience, tell: Callable[[str], object]
    ) -> None:
        """Until none of them saves, or patience ends. For a moment after that no save begins.

        `tell` hears whom it waits for, and how long at most, once each.
        """
        self._roots = None
        told = set[str]()
        loop = asyncio.get_running_loop()
        began = loop.time()
        quiet_from = began
        if grows := patience.grace_s > 0 and await self._added_to():
            quiet_from = began + SETTLE_S
        while True:
            self._shut.close()  # what we hold ourselves is nobody's save
            now = loop.time()
            busy = self._busy(ranks(), now)
            quiet_from = now + SETTLE_S if busy.writing else quiet_from
            if grows and not busy and quiet_from <= now < began + patience.grace_s:
                grows = await self._added_to()
                quiet_from = now + SETTLE_S if grows else quiet_from
            if now >= began + patience.of(busy) and (busy or now >= quiet_from):
                loop.call_later(SHUT_S, self._shut.close)
                return
            self._shut.close()
            if busy and busy.told not in told:
                told.add(busy.told)
                tell(f"{busy.told}, and is given up to {patience.of(busy):g} s for it")
            await asyncio.sleep(LOOK_S)


class _Shut:
    """Locks that keep ranks from beginning a save."""

    def __init__(self) -> None:
        self._held: list[int] = []

    def take(self, mark: str) -> bool:
        """False if that rank saves."""
        try:
            fd = os.open(mark, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return True
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            return False
        self._held.append(fd)
        return True

    def close(self) -> None:
        for fd in self._held:
            os.close(fd)
        self._held.clear()


def _grows(roots: Sequence[str], without: tuple[str, ...]) -> bool:
    """Whether a folder below them was made, or was given a file of some size, so that the next file is awaited."""
    now = time.time()
    folders = [(root, 0) for root in roots if root.endswith("/")]
    for folder, depth in folders:
        with contextlib.suppress(OSError):
            age = now - os.stat(folder).st_mtime
            if depth and age <= SETTLE_S and _got_file(folder, now - SETTLE_S):
                return True
            if depth and age <= FRESH_S and not os.listdir(folder):
                return True
            if depth < _DEEPEST and len(folders) < _MOST_FOLDERS:
                below = [f"{one.path}/" for one in _listed(folder) if one.is_dir(follow_symlinks=False)]
                folders += [(path, depth + 1) for path in below if not path.startswith(without)]
    return False


def _got_file(folder: str, since: float) -> bool:
    return any(
        one.is_file() and not one.name.endswith(_LOGS) and one.stat().st_mtime >= since
        for one in _listed(folder)
        if one.stat().st_size >= _LEAST_BYTES
    )


def _listed(folder: str) -> list[os.DirEntry[str]]:
    """As many as can be looked at."""
    with os.scandir(folder) as entries:
        seen = itertools.islice(entries, 10 * _MOST_FOLDERS)
        return [one for one in seen if not one.name.startswith((".", files.PREFIX))]  # other workers are there, too


def _family(pid: int) -> list[int]:
    """That process and those below it."""
    found = [pid]
    for one in found:
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{one}/task"):
                found += [int(child) for child in _whole(f"/proc/{one}/task/{thread}/children").split()]
    return found


def _whole(path: str) -> bytes:
    """Of a file of /proc, without what `open` does for files that are written, too."""
    opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        parts = [os.read(opened, 65536)]
        while parts[-1]:
            parts.append(os.read(opened, 65536))
        return b"".join(parts)
    finally:
        os.close(opened)


def _open_for_writing(pid: int, may_be: Callable[[str], bool]) -> Iterator[str]:
    try:
        numbers = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return
    for number in numbers:
        try:
            path = os.readlink(f"/proc/{pid}/fd/{number}")
            if may_be(path) and _writes(pid, number) and stat.S_ISREG(os.stat(path).st_mode):
                yield path
        except OSError:
            continue


def _writes(pid: int, number: str) -> bool:
    lines = _whole(f"/proc/{pid}/fdinfo/{number}").splitlines()
    flags = next((int(line.split()[1], 8) for line in lines if line.startswith(b"flags:")), 0)
    return flags & os.O_ACCMODE != os.O_RDONLY and not flags & os.O_APPEND

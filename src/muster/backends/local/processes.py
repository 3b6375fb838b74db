"""Processes that outlive us: started apart from us, known by pid and start time, found again after a restart."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from muster import background, descriptors, files

WORKER_NICE = 2

_PROC = Path("/proc")


def start_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot; None if there is none, or only what is left of it."""
    try:
        stat = (_PROC / str(pid) / "stat").read_text()
    except OSError:
        return None
    state, *rest = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(rest[18])


def age_s(pid: int) -> float:
    """For how long a process has run; 0 if there is none."""
    ticks = start_ticks(pid)
    return (
        0.0 if ticks is None else max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    )


def environment(pid: int) -> dict[str, str]:
    """What a process of ours was started with; nothing if it is gone."""
    try:
        pairs = os.fsdecode((_PROC / str(pid) / "environ").read_bytes()).split("\0")
    except OSError:
        return {}
    return {name: value for name, _, value in (pair.partition("=") for pair in pairs)}


def find(*words: str) -> int | None:
    """The process with these words in a row on its command line: one that was started just before a crash."""
    wanted = b"\0".join(word.encode() for word in words) + b"\0"
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted in (entry / "cmdline").read_bytes() and start_ticks(int(entry.name)) is not None:
                    return int(entry.name)
    return None


def agents(coordinator_file: Path) -> list[tuple[str, str]]:
    """Run id and name of each living agent of ours that finds its coordinator there, whoever started it."""
    wanted = coordinator_file.resolve()
    return sorted((run_id, name) for there, run_id, name in all_agents() if there.resolve() == wanted)


def all_agents() -> list[tuple[Path, str, str]]:
    """Each living agent of this user: where it finds its coordinator, its run id and its name.

    What other users run is not looked at: a command line is easily imitated.
    """
    found = []
    for entry in _PROC.iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            words = os.fsdecode((entry / "cmdline").read_bytes()).split("\0")
            if "--coordinator-file" not in words or entry.stat().st_uid != os.geteuid():
                continue
            there, run_id, name = (
                words[words.index(word) + 1] for word in ("--coordinator-file", "--run-id", "--name")
            )
            if start_ticks(int(entry.name)) is not None:
                found.append((Path(there), run_id, name))
    return found


def spawn(
    argv: tuple[str, ...], env: Mapping[str, str], cwd: str, log: Path, hand_on: tuple[int, ...] = ()
) -> subprocess.Popen[bytes]:
    """In a session of its own, with its output in a file, so that it does not notice when we go."""
    with files.appending(log) as file:
        child = subprocess.Popen(
            argv,
            env=dict(env),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            close_fds=True,
            pass_fds=hand_on,
        )
    descriptors.restore_for(child.pid)
    _put_behind_coordinator(child.pid)
    return child


def _put_behind_coordinator(pid: int) -> None:
    """Let the coordinator go before a worker that has just been started, and before the worker's ranks.

    A coordinator whose priority cannot be raised goes before workers of a lower one.
    """
    if background.may_prefer_threads():
        return
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, max(os.getpriority(os.PRIO_PROCESS, 0), WORKER_NICE))


class ProcessHandle:
    """A process that is certainly the one meant: a reused pid is never signalled."""

    def __init__(self, pid: int, ticks: int | None) -> None:
        """Raises ProcessLookupError if that process is gone or another one has its number."""
        self.pid = pid
        self.fd = os.pidfd_open(pid)
        if ticks is not None and start_ticks(pid) != ticks:
            os.close(self.fd)
            raise ProcessLookupError(pid)

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.fd, number)

    def close(self) -> None:
        os.close(self.fd)


class MemoryGroup:
    """A memory limit for a worker and its ranks, where this user may set one (cgroup v1 or v2)."""

    _V1 = Path("/sys/fs/cgroup/memory")
    _V2 = Path("/sys/fs/cgroup")

    def __init__(self, name: str) -> None:
        self.old = self._V1.is_dir()
        self.path = (self._V1 if self.old else self._V2) / "muster" / name

    def limit(self, limit: int) -> bool:
        """False where it cannot be done."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            (self.path / ("memory.limit_in_bytes" if self.old else "memory.max")).write_text(str(limit))
        except OSError:
            self.remove()
            return False
        return True

    @classmethod
    def leave(cls) -> None:
        """Take this process out of the group of a worker, whose agent has started it."""
        with contextlib.suppress(OSError):
            groups = (_PROC / "self/cgroup").read_text().splitlines()
            if any(Path(line.split(":", 2)[2]).parent.name == "muster" for line in groups):
                root = cls._V1 if cls._V1.is_dir() else cls._V2
                (root / "cgroup.procs").write_text(str(os.getpid()))

    def entering(self, argv: Sequence[str]) -> tuple[str, ...]:
        """Return a command that joins the group and then becomes `argv`, so that no child of it can stay outside."""
        join = 'echo $$ > "$0" 2>/dev/null; exec "$@"'
        return ("/bin/sh", "-c", join, str(self.path / "cgroup.procs"), *argv)

    def remove(self) -> bool:
        """False while something is still in it."""
        try:
            self.path.rmdir()
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return True

"""Where do ranks run, and with which environment? Each writes it down before its program begins, for `node.shell`.

A rank is forked, so that what the kernel shows as its environment is its parent's: what it was told itself is in its
note. The folder of the notes is named in the environment of what starts ranks. A note counts only while the process
that wrote it runs, and only for the user whose process it is.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from muster import files
from muster.node import system

FOLDER_VARIABLE = "MUSTER_WHEREABOUTS"
_NAME = "whereabouts-"
_MOST = 1 << 17  # bytes of a note
_PROC = "/proc"


class RankHere(NamedTuple):
    """A rank that runs on this machine, in a process of ours."""

    pid: int
    rank: int
    round: int
    run_id: str
    worker: str
    python: str  # its interpreter, or that of whoever started it
    env: Mapping[str, str]  # all of it, as its program found it


def tell(told: Mapping[str, str]) -> None:
    """In a rank, before its program. `told` is what its agent told it; what cannot be written is not worth its end."""
    folder = os.environ.pop(FOLDER_VARIABLE, "")
    if not folder:
        return
    pid = os.getpid()
    note = {"pid": pid, "started": system.started(pid), "python": sys.executable, "env": dict(told)}
    path = os.path.join(folder, f"{_NAME}{told.get('MUSTER_ROUND')}-{told.get('RANK')}")
    with contextlib.suppress(OSError):
        opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.write(opened, json.dumps(note).encode())
        finally:
            os.close(opened)


def ranks() -> list[RankHere]:
    """All that run now."""
    return [found for folder in sorted(_folders()) for found in _in_folder(folder)]


def owner(run_id: str) -> int | None:
    """Whose agent of that run is on this machine, if it is not ours. Who imitates its command line is named for it."""
    for pid in _pids():
        with contextlib.suppress(OSError):
            words = _read(pid, "cmdline").split("\0")
            uid = os.stat(f"{_PROC}/{pid}").st_uid
            if uid != os.geteuid() and run_id in words and words[words.index(run_id) - 1] == "--run-id":
                return uid
    return None


def _folders() -> set[str]:
    wanted, found = f"{FOLDER_VARIABLE}=", set()
    for pid in _pids():
        with contextlib.suppress(OSError):
            if os.stat(f"{_PROC}/{pid}").st_uid == os.geteuid():
                items = _read(pid, "environ").split("\0")
                found |= {item.removeprefix(wanted) for item in items if item.startswith(wanted)}
    return found


def _in_folder(folder: str) -> Iterator[RankHere]:
    try:
        names = sorted(name for name in os.listdir(folder) if name.startswith(_NAME))
    except OSError:
        return
    for name in names:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            if (found := _read_note(Path(folder) / name)) is not None:
                yield found


def _read_note(path: Path) -> RankHere | None:
    """None if its process has ended. It may be half written: then it cannot be read yet."""
    note: dict[str, Any] = json.loads(files.read_private(path, _MOST))
    pid, started = int(note["pid"]), note["started"]
    told = {str(name): str(value) for name, value in note["env"].items()}
    inherited = dict(item.partition("=")[::2] for item in _read(pid, "environ").split("\0") if "=" in item)
    if started is None or system.started(pid) != started:
        return None
    rank, number = int(told["RANK"]), int(told["MUSTER_ROUND"])
    run_id, worker, python = told["MUSTER_RUN_ID"], told["MUSTER_WORKER"], str(note["python"] or "")
    return RankHere(pid, rank, number, run_id, worker, python, inherited | told)


def _pids() -> list[int]:
    return [int(name) for name in os.listdir(_PROC) if name.isdigit()]


def _read(pid: int, name: str) -> str:
    with open(f"{_PROC}/{pid}/{name}", "rb") as file:
        return os.fsdecode(file.read())

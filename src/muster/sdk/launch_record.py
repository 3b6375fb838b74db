"""The record of how the embedded control plane was started, so that an agent can start the same one again.

`launch.json` holds its command line and its whole environment, so nobody but its owner may read it, and nobody else
can have written what is executed. Only a control plane that a command started in the background leaves one: whatever
runs in the foreground has a supervisor (a person, systemd, a container runtime, Kubernetes) that starts it again.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from muster import files

FILE, STARTS_FILE = "launch.json", "launch-starts.json"
_MAX_BYTES = 4 << 20  # more than the kernel takes as arguments and environment, as JSON
_NOT_REPEATED = {"--ready-fd": 1, "--forget": 0}  # and how many words follow each


@dataclass(frozen=True)
class LaunchRecord:
    """A command line with its environment. `place` names the machine, boot and container in which it ran."""

    argv: tuple[str, ...]
    cwd: str
    env: dict[str, str]
    place: str


def write(home: Path) -> None:
    """Record how this process was started."""
    argv = [sys.executable, *_repeatable(sys.orig_argv[1:])]
    record = {"argv": argv, "cwd": os.getcwd(), "env": dict(os.environ), "place": files.place()}
    files.write_private(home / FILE, json.dumps(record) + "\n")


def remove(home: Path) -> None:
    """Leave the next start to people. Needs no room on the disk."""
    with contextlib.suppress(OSError):
        (home / FILE).unlink(missing_ok=True)


def read(home: Path) -> LaunchRecord:
    """Return the record. Raises OSError or ValueError if it may not be used here, with the reason."""
    _check_folder(home)
    data = json.loads(files.read_private(home / FILE, _MAX_BYTES))
    argv, env = data["argv"], data["env"]
    words = [*argv, data["cwd"], data["place"], *env, *env.values()]
    if not argv or not all(isinstance(word, str) and "\0" not in word for word in words):
        raise ValueError(f"{home / FILE} does not say how to start the control plane")
    if not data["place"] or data["place"] != files.place():
        raise ValueError("it ran on another machine or in another container")
    return LaunchRecord(tuple(argv), data["cwd"], dict(env), data["place"])


def obstacle(home: Path) -> str:
    """Return why no agent may start the control plane; "" if one may."""
    try:
        read(home)
    except FileNotFoundError:
        return "it was not started by a command in the background, or was asked to end"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"how it was started cannot be used: {error}"
    return ""


def starts(home: Path) -> tuple[int, float]:
    """Return how many times in a row agents have started it, and how long ago they last did."""
    try:
        data = json.loads(files.read_private(home / STARTS_FILE))
        return int(data["starts"]), time.time() - float(data["at"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0, float("inf")


def note_start(home: Path, count: int) -> None:
    """Record another start by an agent. It counts before it is tried: a start that cannot be counted is not tried."""
    files.write_private(home / STARTS_FILE, json.dumps({"starts": count, "at": time.time()}) + "\n")


def _repeatable(words: Sequence[str]) -> list[str]:
    kept, skipped = [], 0
    for word in words:
        name, equals, _ = word.partition("=")
        if skipped:
            skipped -= 1
        elif name in _NOT_REPEATED:
            skipped = 0 if equals else _NOT_REPEATED[name]
        else:
            kept.append(word)
    return kept


def _check_folder(home: Path) -> None:
    """Whoever may write in the folder could put another file in the place of the record."""
    found = os.stat(home)
    if found.st_uid != os.geteuid() or stat.S_IMODE(found.st_mode) & 0o022:
        raise OSError(errno.EPERM, "belongs to another user, or others may write in it", str(home))

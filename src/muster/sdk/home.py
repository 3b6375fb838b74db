"""Where does the embedded control plane of this user live, and does it run?

HOME is MUSTER_HOME or ~/.muster. The daemon holds a lock on HOME/daemon.lock for its whole life, so the lock alone
says whether it runs: a pid in a file may long belong to somebody else. Nothing here starts or creates anything.
"""

from __future__ import annotations

import fcntl
import json
import threading
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Running:
    """What the daemon says about itself in HOME/server.json."""

    pid: int
    url: str
    version: str = ""
    started_at: str = ""
    ca: str | None = None  # its own certificate, where it serves with TLS

    def to_wire(self) -> dict[str, object]:
        return {"pid": self.pid, "url": self.url, "version": self.version, "startedAt": self.started_at}


def is_locked(home: Path) -> bool:
    try:
        with open(home / "daemon.lock") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return False
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True


def written(home: Path) -> Running | None:
    """What the last daemon said. It may have ended since, or have been killed while it wrote."""
    try:
        data = json.loads((home / "server.json").read_bytes())
        about = str(data.get("version", "")), str(data.get("startedAt", ""))
        return Running(int(data["pid"]), str(data["url"]).rstrip("/"), *about, data.get("ca"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def running(home: Path) -> Running | None:
    """The daemon that runs, if one does and has said where."""
    return written(home) if is_locked(home) else None


def wait_until_unlocked(home: Path, timeout_s: float) -> bool:
    """Wait for the daemon's end; the kernel frees the lock when the process is gone, however it went."""
    freed = threading.Event()

    def take() -> None:
        with open(home / "daemon.lock") as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            freed.set()

    threading.Thread(target=take, daemon=True).start()
    return freed.wait(timeout_s)


def certificate(home: Path, url: str) -> str | None:
    """The certificate that the daemon at that address serves with, if it said so."""
    found = written(home)
    return found.ca if found is not None and found.url == url else None


def token(home: Path) -> str | None:
    try:
        return (home / "token").read_text().strip() or None
    except OSError:
        return None

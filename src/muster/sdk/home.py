"""Where does the embedded control plane of this user live, and does it run?

HOME is MUSTER_HOME or ~/.muster. The daemon holds the lock of HOME (`home_lock`) for its whole life, so the lock alone
says whether it runs: a pid in a file may long belong to somebody else. Nothing here starts or creates anything.

What stands in HOME decides where tokens go, so it counts only if nobody but this user or root can have written it.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import socket
import stat
import threading
from dataclasses import dataclass
from pathlib import Path

from muster import files, home_lock
from muster.errors import Unavailable

_CAREFUL = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
STOPPED_FILE = "stopped"
_MOST = 1 << 16  # bytes of a file of ours


@dataclass(frozen=True)
class Running:
    """What the daemon says about itself in HOME/server.json."""

    pid: int
    url: str
    version: str = ""
    started_at: str = ""
    ca: str | None = None  # its own certificate, where it serves with TLS
    process: str = ""  # tells it from another process that has its pid; daemons before 0.2 do not say it
    host: str = ""  # the name of the machine that it runs on; daemons before 0.2 do not say it

    @property
    def lives(self) -> bool:
        found = process_of(self.pid)
        return found is not None and self.process in ("", found)

    def to_wire(self) -> dict[str, object]:
        return {"pid": self.pid, "url": self.url, "version": self.version, "startedAt": self.started_at}


def is_locked(home: Path) -> bool:
    return home_lock.is_locked(home)


def process_of(pid: int) -> str | None:
    """A process, by the boot and the moment of its start; None if there is none, or only what is left of it."""
    found = _stat(pid)
    if not found or found[0] in "ZX":
        return None
    return f"{boot_id()}/{found[19]}"


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _stat(pid: int) -> list[str]:
    """What the kernel tells of a process, from its state on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def written(home: Path) -> Running | None:
    """What the last daemon said. It may have ended since, or have been killed while it wrote."""
    try:
        data = json.loads(_read(home, "server.json") or "")
        about = str(data.get("version", "")), str(data.get("startedAt", ""))
        ca, process, host = data.get("ca"), str(data.get("process", "")), str(data.get("host", ""))
        return Running(int(data["pid"]), str(data["url"]).rstrip("/"), *about, ca, process, host)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def running(home: Path) -> Running | None:
    """The daemon that runs, if one does and has said where. A pid that another process has by now is not its own.

    Raises Unavailable if it runs on another machine: its pid and its address mean nothing here.
    """
    must_be_here(home)
    found = written(home) if is_locked(home) else None
    return found if found is None or found.lives or process_of(found.pid) is None else None


def elsewhere(home: Path) -> Running | None:
    """Return the daemon that serves this home on another machine, or in another container; None if none is known to."""
    found = written(home)
    if found is None or not found.process or not is_locked(home) or found.process == process_of(found.pid):
        return None
    if found.process.partition("/")[0] == boot_id():
        return found if found.host not in ("", socket.gethostname()) else None
    return found


def must_be_here(home: Path) -> None:
    """Raise Unavailable, with the name of the machine, if a daemon of another machine serves this home."""
    if (daemon := elsewhere(home)) is not None:
        raise is_elsewhere(home, daemon)


def is_elsewhere(home: Path, daemon: Running) -> Unavailable:
    """Return the error that names the machine of the daemon, and what to type there."""
    host, ours = safe_host(daemon.host), safe_host(socket.gethostname())
    where = f"machine {host}" if host else "another machine"
    story = f"the control plane of {home} (pid {daemon.pid}) runs on {where}, and this is {ours or 'not that machine'}"
    there = f"ssh {host}, then type the same command there" if host else "type the same command on that machine"
    return Unavailable(story, hint=f"{there}; or, for a control plane of this machine, export MUSTER_HOME=FOLDER")


def forget_elsewhere(home: Path) -> None:
    """Remove what a daemon of another boot said about itself; the caller holds the lock of the home."""
    with contextlib.suppress(Unavailable):  # what others can have written is replaced later
        found = written(home)
        if found is not None and found.process and found.process.partition("/")[0] != boot_id():
            (home / "server.json").unlink(missing_ok=True)


def safe_host(name: str) -> str:
    """Return a name of a machine that a terminal may be shown, or nothing."""
    return name if re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,251}[A-Za-z0-9])?", name) else ""


def silence_of(daemon: Running) -> Unavailable:
    """What there is to say, and to do, about a daemon that runs and does not answer."""
    story = f"the control plane (pid {daemon.pid}) is hung: it runs but does not answer at {daemon.url}"
    if _stat(daemon.pid)[:1] in (["T"], ["t"]):
        return Unavailable(f"{story}, because a signal stopped it", hint=f"kill -CONT {daemon.pid}")
    hint = f"muster server stop, or kill -9 {daemon.pid}: trainings go on and are adopted at the next start"
    return Unavailable(story, hint=hint)


def wait_until_unlocked(home: Path, timeout_s: float) -> bool:
    """Wait for the daemon's end; the kernel frees the lock when the process is gone, however it went."""
    freed = threading.Event()

    def take() -> None:
        home_lock.wait_until_free(home)
        freed.set()

    threading.Thread(target=take, daemon=True).start()
    return freed.wait(timeout_s)


def mark_stopped(home: Path, stopped: bool) -> None:
    """Note that the daemon was stopped on purpose, or that this is over: whoever follows does not start it again."""
    mark = home / STOPPED_FILE
    if stopped:
        files.write_private(mark, "")
    else:
        mark.unlink(missing_ok=True)


def was_stopped(home: Path) -> bool:
    """Whether somebody has stopped it on purpose, or has removed all of it."""
    return not home.is_dir() or (home / STOPPED_FILE).exists()


def certificate(home: Path, url: str) -> str | None:
    """The certificate that the daemon at that address serves with, if it said so."""
    found = written(home)
    return found.ca if found is not None and found.url == url else None


def token(home: Path) -> str | None:
    return (_read(home, "token") or "").strip() or None


# Whom its files can be from ----------------------------------------------------------------------


def check(home: Path) -> None:
    """Raise Unavailable if the folder belongs to another user."""
    try:
        owner = home.stat().st_uid
    except OSError:
        return
    if owner not in (0, os.geteuid()):
        hint = "set MUSTER_HOME to a directory of yours"
        raise Unavailable(f"{home} belongs to another user (uid {owner}): nothing in it is used", hint=hint)


def _read(home: Path, name: str) -> str | None:
    """A file of the folder, or None if there is none. Raises Unavailable if others can have written it."""
    check(home)
    path = home / name
    try:
        opened = os.open(path, _CAREFUL)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _suspect(path, "is a link") from None
        return None
    with open(opened, errors="replace") as file:
        found = os.fstat(opened)
        if not stat.S_ISREG(found.st_mode):
            raise _suspect(path, "is not a file")
        if found.st_uid not in (0, os.geteuid()):
            raise _suspect(path, f"belongs to another user (uid {found.st_uid})")
        if found.st_mode & 0o022:
            raise _suspect(path, f"may be written by others (mode {stat.S_IMODE(found.st_mode):04o})")
        return file.read(_MOST)


def _suspect(path: Path, why: str) -> Unavailable:
    hint = f"look at it; if it is yours, chmod 600 {path}, else remove it and start muster again"
    return Unavailable(f"{path} {why}: it is not used", hint=hint)

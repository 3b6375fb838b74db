"""`muster doctor`: is everything here that muster needs, and what is the next command if not?

It looks and changes nothing: no control plane is started, torch is not imported, no file stays behind.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import resource
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import typer

from muster import files, mounts, trimming
from muster.cli import exits
from muster.cli.output import Report, write_data
from muster.cli.safe_text import line
from muster.errors import MusterError, how_to_install
from muster.node import torch_version
from muster.sdk import home, peers
from muster.sdk.home import Running
from muster.sdk.peers import Unproved
from muster.store import room

app = typer.Typer(rich_markup_mode=None)

State = Literal["ok", "warn", "fail"]

_FILES_WANTED = 4096  # a training of 200 workers needs a few descriptors for each
_SHM_WANTED = 1 << 30  # data loaders of torch pass batches through it
_FREE_WANTED = 1 << 30  # logs and checkpoints of an hour
_FILES_LEFT = 10_000
_SECRETS = ("token", "tokens.json")
_CLOCK_OFF_S = 5.0
_ANSWER_S = 3.0


@dataclass(frozen=True)
class Check:
    """One thing that was looked at; `next` is the command that mends it."""

    name: str
    state: State
    message: str
    next: str = ""


@app.command(epilog="Example: muster doctor -o json")
def doctor(output: Report = typer.Option(Report.TABLE, "-o", "--output", help="How to print it.")) -> None:
    """Look for what keeps muster from working here. Exits 1 if anything fails."""
    found = [check for look in LOOKS for check in look()]
    if output is Report.TABLE:
        width = max(len(check.name) for check in found)
        for check in found:
            print(line(f"{check.state:<4}  {check.name:<{width}}  {check.message}"))
            if check.next and check.state != "ok":
                print(line(f"{'':<{width + 8}}next: {check.next}"))
    else:
        write_data({"checks": [asdict(check) for check in found]}, output)
    if any(check.state == "fail" for check in found):
        raise typer.Exit(exits.ERROR)


# The looks, in the order in which they are shown --------------------------------------------------


def _python() -> Iterator[Check]:
    version = ".".join(map(str, sys.version_info[:3]))
    good = sys.version_info >= (3, 11)
    yield Check("python", "ok" if good else "fail", f"{version} at {sys.executable}", "install Python 3.11 or newer")


def _packages() -> Iterator[Check]:
    torch = _version("torch")
    message = torch or "not installed: scripts that need it will fail"
    refusal = torch_version.refusal(torch) if torch else ""
    yield Check("torch", "ok" if torch and not refusal else "warn", refusal or message, how_to_install("torch"))
    for name in ("starlette", "uvicorn", "httptools"):
        version = _version(name)
        message = version or "not installed: this machine cannot run a control plane"
        yield Check(name, "ok" if version else "warn", message, how_to_install("server"))


def _gpus() -> Iterator[Check]:
    told = os.environ.get("MUSTER_GPUS", "")
    program = shutil.which("nvidia-smi")
    if program is None:
        known = f"MUSTER_GPUS={told}" if told else "none seen: nvidia-smi is not here and MUSTER_GPUS is not set"
        yield Check("gpus", "ok", known)
        return
    try:
        listed = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        yield Check("gpus", "fail", f"nvidia-smi does not answer: {type(error).__name__}", "nvidia-smi")
        return
    if listed.returncode != 0:
        yield Check("gpus", "fail", f"nvidia-smi fails: {listed.stderr.strip()[:200]}", "nvidia-smi")
        return
    yield Check("gpus", "ok", f"{sum(one.startswith('GPU ') for one in listed.stdout.splitlines())} seen")


def _home() -> Iterator[Check]:
    where = files.home()
    nearest = next(path for path in (where, *where.parents) if path.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK | os.X_OK):
        yield Check("home", "fail", f"{where} is not writable", "set MUSTER_HOME to a directory of yours")
        return
    there = "is writable" if nearest == where else "will be made when needed"
    try:
        home.check(where)
    except MusterError as error:
        yield Check("home", "fail", error.message, error.hint)
        return
    yield Check("home", "ok", f"{where} {there}")
    if kind := mounts.network_type(where):
        story = (
            f"{where} is on a network file system ({kind}): its database is slower there, and one machine can serve it"
        )
        yield Check("file system", "warn", story, "export MUSTER_HOME=FOLDER, with a folder on a disk of this machine")
    for name in _SECRETS:
        path = where / name
        if path.exists():
            mode = stat.S_IMODE(path.stat().st_mode)
            good = not mode & 0o077
            yield Check(name, "ok" if good else "fail", f"mode {mode:04o}", f"chmod 600 {path}")


def _disk() -> Iterator[Check]:
    where = files.home()
    nearest = next(path for path in (where, *where.parents) if path.exists())
    with contextlib.suppress(OSError):  # what may not be looked at is told with the home
        yield room_of(room.space(nearest), where)
    if where.is_dir():
        logs, journal = trimming.taken(where / "logs"), sum(path.stat().st_size for path in where.glob("muster.db*"))
        shown = f"{trimming.show(logs)} of logs, {trimming.show(journal)} of database with the journal"
        yield Check("disk", "ok", f"{where} takes {shown}")


def room_of(space: room.Space, where: Path) -> Check:
    """A control plane goes on without room, but records nothing new until there is some."""
    left = space.files is not None and space.files < _FILES_LEFT
    told = (
        f"{space.files} more files can be made"
        if left
        else f"{trimming.show(space.free)} of {trimming.show(space.total)} are free"
    )
    state: State = "fail" if space.is_low() else "warn" if left or space.free < _FREE_WANTED else "ok"
    next_command = "make room: muster ps -A shows what can be deleted (muster delete NAME), with its logs"
    return Check("free space", state, f"{told} where {where} is", next_command)


def _control_plane() -> Iterator[Check]:
    try:
        running = home.running(files.home())
    except MusterError as error:
        yield Check("control plane", "fail", error.message, error.hint)
        return
    url = os.environ.get("MUSTER_URL") or (running.url if running else None)
    if url is None:
        yield Check("control plane", "ok", "does not run; it starts when it is needed")
        return
    try:
        offset_s = _ask(url)
    except Unproved as error:
        yield Check("control plane", "fail", str(error), error.hint)
        return
    except OSError as error:
        yield _silent(url, running, error)
        return
    yield Check("control plane", "ok", f"answers at {url}")
    if offset_s is not None:
        good = abs(offset_s) <= _CLOCK_OFF_S
        told = "agrees with the control plane's" if good else f"{offset_s:+.0f} s from the control plane's"
        yield Check("clock", "ok" if good else "warn", told, "set the clock")


def _silent(url: str, running: Running | None, error: OSError) -> Check:
    if running is not None and running.url == url.rstrip("/"):
        story = home.silence_of(running)
        return Check("control plane", "fail", story.message, story.hint)
    return Check("control plane", "fail", f"{url} does not answer: {error}", "muster server status")


def _clock() -> Iterator[Check]:
    good = time.time() > 1_700_000_000
    yield Check("time", "ok" if good else "fail", time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "set the clock")


def _limits() -> Iterator[Check]:
    """The control plane's own, where one runs: this shell's say nothing about it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    whose, next_command = "", f"ulimit -n {_FILES_WANTED}"
    with contextlib.suppress(MusterError):  # told with the control plane
        running = home.running(files.home())
        if running is not None and (found := _limits_of(running.pid)) is not None:
            soft, hard = found
            whose = f", for the control plane (pid {running.pid})"
            next_command += "; muster server stop; muster server start"
    good = any(limit == resource.RLIM_INFINITY or limit >= _FILES_WANTED for limit in (soft, hard))
    yield Check("open files", "ok" if good else "warn", f"{soft} at once, at most {hard}{whose}", next_command)


def _limits_of(pid: int) -> tuple[int, int] | None:
    try:
        told = Path(f"/proc/{pid}/limits").read_text()
    except OSError:
        return None
    words = told.partition("Max open files")[2].split()[:2]
    soft, hard = (resource.RLIM_INFINITY if word == "unlimited" else int(word) for word in words)
    return soft, hard


def _shared_memory() -> Iterator[Check]:
    shm = Path("/dev/shm")
    if not shm.is_dir():
        yield Check("/dev/shm", "warn", "is not there: data loaders with workers may fail")
        return
    total = shutil.disk_usage(shm).total
    message = f"{total / (1 << 20):.0f} MiB"
    next_command = "docker run --shm-size=2g …, or mount -o remount,size=2g /dev/shm"
    yield Check("/dev/shm", "ok" if total >= _SHM_WANTED else "warn", message, next_command)


LOOKS: tuple[Callable[[], Iterator[Check]], ...] = (
    _python,
    _packages,
    _gpus,
    _home,
    _disk,
    _control_plane,
    _clock,
    _limits,
    _shared_memory,
)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _ask(url: str) -> float | None:
    """How far its clock is from ours, if it says. Raises OSError when nobody answers, Unproved when a stranger does."""
    import email.utils
    import http.client
    import ssl

    parts = urlsplit(url)
    connection: http.client.HTTPConnection
    if parts.scheme == "https":
        trust = ssl.create_default_context(cafile=os.environ.get("MUSTER_CA") or home.certificate(files.home(), url))
        connection = http.client.HTTPSConnection(parts.hostname or "", parts.port, timeout=_ANSWER_S, context=trust)
    else:
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=_ANSWER_S)
    try:
        connection.connect()
        if parts.scheme == "http" and os.environ.get("MUSTER_INSECURE") != "1":
            peers.check(connection.sock)
        connection.request("GET", f"{parts.path}/healthz")
        answer = connection.getresponse()
        if answer.status != 200:
            raise OSError(f"it answered {answer.status}")
        said = answer.headers.get("Date")
        return None if said is None else email.utils.parsedate_to_datetime(said).timestamp() - time.time()
    except (http.client.HTTPException, ValueError) as error:
        raise OSError(f"{type(error).__name__}") from error
    finally:
        connection.close()

"""Where is the control plane, and who starts it if there is none?

An address that the user gives (argument or `MUSTER_URL`) is taken as it is. Otherwise the context file under
`MUSTER_HOME` says where the embedded one listens; if nobody answers there, it is started. Looking again and starting
happen under a file lock, so two programs that start at the same moment start one control plane.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from muster import files
from muster.errors import InvalidRequest, Unavailable
from muster.sdk import home
from muster.sdk.home import Running
from muster.types.codec import Problem

START_S = 30.0  # how long the embedded control plane may take until it serves
HEALTH_S = 2.0  # how long it may take to say that it is well
LOCK_POLL_S = 0.02  # a file lock with a bound can only be tried again
LOG_LINES = 20  # of its log, shown when it does not start

_DAEMON = (sys.executable, "-m", "muster.daemon")
_started: dict[int, subprocess.Popen[bytes]] = {}  # reaped when they end, so that a dead one does not look alive


@dataclass(frozen=True)
class Server:
    """A control plane's address, and the token that it wants."""

    url: str
    token: str | None = field(default=None, repr=False)
    ca: str | None = None  # a file with the certificates to trust


@dataclass(frozen=True)
class Search:
    """Where to look. Without an address, the embedded control plane of `home` is meant."""

    home: Path
    url: str | None = None
    token: str | None = field(default=None, repr=False)
    ca: str | None = None  # a file with the certificates to trust
    daemon: tuple[str, ...] = _DAEMON

    @classmethod
    def of(cls, url: str | None = None, token: str | None = None, env: Mapping[str, str] | None = None) -> Search:
        """From what the user gave, then from the environment."""
        env = os.environ if env is None else env
        address = url or env.get("MUSTER_URL") or None
        return cls(
            home=files.home(env),
            url=None if address is None else _checked(address),
            token=token or env.get("MUSTER_TOKEN") or None,
            ca=env.get("MUSTER_CA") or None,
        )


def find(search: Search, within_s: float = START_S) -> Server:
    """The control plane to talk to. Raises Unavailable if it had to be started and could not be."""
    if search.url is not None:
        context = home.written(search.home)
        if context is None or context.url != search.url:
            return Server(search.url, search.token, search.ca)
        return _embedded(search, context)
    found = serving(search)
    if found is not None:
        return found
    deadline = time.monotonic() + min(within_s, START_S)
    with _home(search.home), _locked(search.home / "start.lock", deadline):
        return serving(search) or _start(search, deadline)


def serving(search: Search) -> Server | None:
    """The embedded control plane, if it answers where the context file says."""
    context = home.written(search.home)
    if context is None or not _alive(context.pid) or not _healthy(context.url, search.ca or context.ca):
        return None
    return _embedded(search, context)


def _embedded(search: Search, context: Running) -> Server:
    """The embedded token belongs to the embedded control plane alone: nobody else is ever sent it."""
    return Server(context.url, search.token or home.token(search.home), search.ca or context.ca)


def _checked(url: str) -> str:
    try:
        parts = urlsplit(url)
        usable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        problem = Problem("url", f"{url!r} is not an address like http://127.0.0.1:8470")
        raise InvalidRequest(f"{problem.field}: {problem.message}", problems=(problem,))
    return url.rstrip("/")


# Whether it lives --------------------------------------------------------------------------------


def _alive(pid: int) -> bool:
    ours = _started.get(pid)
    if ours is not None and ours.poll() is not None:
        del _started[pid]
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True  # somebody else's, or not a pid of this machine: the health check decides
    return True


def _healthy(url: str, ca: str | None) -> bool:
    import http.client
    import ssl

    parts = urlsplit(url)
    connection: http.client.HTTPConnection
    try:
        if parts.scheme == "https":
            trust = ssl.create_default_context(cafile=ca)
            connection = http.client.HTTPSConnection(parts.hostname or "", parts.port, timeout=HEALTH_S, context=trust)
        else:
            connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=HEALTH_S)
        with contextlib.closing(connection):
            connection.request("GET", f"{parts.path}/healthz")
            return connection.getresponse().status == 200
    except (OSError, ValueError, http.client.HTTPException):
        return False


# Starting it -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _home(home: Path) -> Iterator[None]:
    try:
        home.mkdir(mode=0o700, parents=True, exist_ok=True)
        yield
    except OSError as refused:
        hint = "set MUSTER_HOME to a directory that you may write to, or MUSTER_URL to a server's address"
        raise Unavailable(f"the control plane cannot be started in {home}: {refused}", hint=hint) from refused


@contextlib.contextmanager
def _locked(path: Path, deadline: float) -> Iterator[None]:
    opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    with open(opened, "ab") as file:  # closing it gives the lock back, also when this process is killed
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise Unavailable(f"another process is still starting the control plane ({path})") from None
                time.sleep(LOCK_POLL_S)
        yield


def _start(search: Search, deadline: float) -> Server:
    log = search.home / "daemon.log"
    reading, writing = os.pipe()
    try:
        with open(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as output:
            before = output.tell()
            process = subprocess.Popen(
                [*search.daemon, "--home", str(search.home), "--ready-fd", str(writing)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(writing,),
                start_new_session=True,
                cwd=search.home,  # python -m puts the directory first on its path: the user's must not shadow anything
                env=_environment(),
            )
        os.close(writing)
        writing = -1
        url = _first_line(reading, deadline)
    finally:
        os.close(reading)
        if writing >= 0:
            os.close(writing)
    if url:
        _started[process.pid] = process
        return Server(url.rstrip("/"), search.token or home.token(search.home))
    raise Unavailable(_story(process, log, before), hint=f"see {log}")


def _environment() -> dict[str, str]:
    """Ours, with relative entries of PYTHONPATH made absolute, for it runs in another directory."""
    env = dict(os.environ)
    if env.get("PYTHONPATH"):
        env["PYTHONPATH"] = os.pathsep.join(os.path.abspath(part) for part in env["PYTHONPATH"].split(os.pathsep))
    return env


def _first_line(reading: int, deadline: float) -> str | None:
    """The line that says that it serves, or None if it died or took too long."""
    line = b""
    poll = select.poll()
    poll.register(reading, select.POLLIN)
    while b"\n" not in line:
        ready = poll.poll(max(0.0, deadline - time.monotonic()) * 1000)
        chunk = os.read(reading, 4096) if ready else b""
        if not chunk:
            return None
        line += chunk
    return line.split(b"\n")[0].decode(errors="replace").strip() or None


def _story(process: subprocess.Popen[bytes], log: Path, before: int) -> str:
    """Why it did not start. One that is merely slow is ended: it would serve a moment later, unknown to us."""
    try:
        code = process.wait(timeout=0.5)
        why = f"it ended with code {code}"
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        why = "it did not become ready in time"
    with open(log, "rb") as file:
        file.seek(before)
        said = file.read()[-65536:].decode(errors="replace").splitlines()[-LOG_LINES:]
    return "\n".join([f"the control plane did not start: {why}", *(f"  {line}" for line in said)])

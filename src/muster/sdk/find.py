"""Where is the control plane, and who starts it if there is none?

An address that the user gives (argument or `MUSTER_URL`) is taken as it is. Otherwise the context file under
`MUSTER_HOME` says where the embedded one listens; if none runs, it is started. Looking again and starting
happen under a file lock, so two programs that start at the same moment start one control plane. One that runs and
does not answer is starting, ending or hung: it is given some time, and no second one is started beside it.
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
from muster.sdk import home, peers
from muster.sdk.home import Running
from muster.types.codec import Problem

START_S = 30.0  # how long the embedded control plane may take until it serves
HEALTH_S = 2.0  # how long it may take to say that it is well
SILENT_S = 5.0  # how long one that runs may not answer before it counts as hung
LOCK_POLL_S = 0.02  # a file lock with a bound can only be tried again
STOPPED = "stopped"  # the code of an error that says so
LOG_LINES = 20  # of its log, shown when it does not start

_CAREFUL = os.O_NOFOLLOW | os.O_NONBLOCK  # whatever was put in the place of a file of ours
_DAEMON = (sys.executable, "-m", "muster.daemon")
_started: dict[int, subprocess.Popen[bytes]] = {}  # reaped when they end, so that a dead one does not look alive


@dataclass(frozen=True)
class Server:
    """A control plane's address, and the token that it wants."""

    url: str
    token: str | None = field(default=None, repr=False)
    ca: str | None = None  # a file with the certificates to trust
    insecure: bool = False  # what is sent may go in clear to somebody who has not proved who it is


@dataclass(frozen=True)
class Search:
    """Where to look. Without an address, the embedded control plane of `home` is meant."""

    home: Path
    url: str | None = None
    token: str | None = field(default=None, repr=False)
    ca: str | None = None  # a file with the certificates to trust
    daemon: tuple[str, ...] = _DAEMON
    insecure: bool = False  # a token that the user gives may be sent without a proof; the embedded one never is

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
            insecure=env.get("MUSTER_INSECURE") == "1",
        )


def find(search: Search, within_s: float = START_S, *, again: bool = False) -> Server:
    """The control plane to talk to. Raises Unavailable if it is hung, or had to be started and could not be.

    `again`: by somebody who has talked to it before. One that was stopped on purpose is then not started.
    """
    deadline = time.monotonic() + min(within_s, START_S)
    if search.url is not None:
        return _named(search, search.url, deadline)
    found = _awaited(search, deadline) or serving(search)
    if found is not None:
        return found
    if again and home.was_stopped(search.home):
        hint = "muster server start starts it, and trainings that go on are adopted"
        raise Unavailable("the control plane was stopped", code=STOPPED, hint=hint)
    with _home(search.home), _locked(search.home / "start.lock", deadline):
        return serving(search) or _start(search, deadline)


def serving(search: Search) -> Server | None:
    """The embedded control plane, if it answers where the context file says."""
    context = home.written(search.home)
    if context is None or not (home.is_locked(search.home) or _alive(context)):
        return None
    return _embedded(search, context) if _healthy(context.url, search.ca or context.ca) else None


def _named(search: Search, url: str, deadline: float) -> Server:
    """Where the user says. The embedded token belongs to the embedded control plane alone: nobody else is sent it."""
    try:
        context = home.written(search.home)
    except Unavailable:
        context = None  # what others can have written is not asked
    if context is not None and context.url == url and home.elsewhere(search.home) is None:
        found = _awaited(search, deadline) or _embedded(search, context)
        if found.url == url:
            return found
    return Server(url, search.token, search.ca, insecure=search.insecure)


def _embedded(search: Search, context: Running) -> Server:
    own = home.token(search.home)
    insecure = search.insecure and search.token not in (None, own)
    return Server(context.url, search.token or own, search.ca or context.ca, insecure)


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


def _alive(context: Running) -> bool:
    ours = _started.get(context.pid)
    if ours is not None and ours.poll() is not None:
        del _started[context.pid]
    return context.lives


def _awaited(search: Search, deadline: float) -> Server | None:
    """One that holds the home, when it answers; None as soon as none does. Raises Unavailable if it does not answer."""
    hung = min(deadline, time.monotonic() + SILENT_S)
    while home.is_locked(search.home):
        if (away := home.elsewhere(search.home)) is not None and _is_loopback(away.url):
            raise home.is_elsewhere(search.home, away)
        if (found := serving(search)) is not None:
            return found
        context = home.running(search.home)
        if context is not None and context.lives and time.monotonic() >= hung:
            raise home.silence_of(context)
        if time.monotonic() >= deadline:
            why = f"a control plane has {search.home} and does not say where it serves"
            raise Unavailable(f"{why}: it is still starting, or on another machine", hint="muster server status")
        time.sleep(LOCK_POLL_S)
    return None


def _is_loopback(url: str) -> bool:
    """Return whether an address means another place on each machine."""
    host = urlsplit(url).hostname or ""
    return host == "localhost" or host == "::1" or host.startswith("127.")


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
            connection.connect()
            if parts.scheme == "http":
                peers.check(connection.sock)
            connection.request("GET", f"{parts.path}/healthz")
            return connection.getresponse().status == 200
    except (OSError, ValueError, http.client.HTTPException, peers.Unproved):
        return False


# Starting it -------------------------------------------------------------------------------------


@contextlib.contextmanager
def _home(where: Path) -> Iterator[None]:
    try:
        where.mkdir(mode=0o700, parents=True, exist_ok=True)
        home.check(where)
        files.own_folder(where)
        yield
    except OSError as refused:
        hint = "set MUSTER_HOME to a directory that you may write to, or MUSTER_URL to a server's address"
        raise Unavailable(f"the control plane cannot be started in {where}: {refused}", hint=hint) from refused


@contextlib.contextmanager
def _locked(path: Path, deadline: float) -> Iterator[None]:
    opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | _CAREFUL, 0o600)
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
        with open(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | _CAREFUL, 0o600), "ab") as output:
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

"""Real processes for tests: a coordinator, agents, and a check that nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from muster import run_token
from muster.types.frames import AskFrame
from muster.types.world import RunId
from muster.world.connection import CoordinatorRefused, ask

PROGRAMS = Path(__file__).parent / "programs"
PROBE = str(PROGRAMS / "probe.py")
PATIENCE_S = 60.0
T = TypeVar("T")


def eventually(look: Callable[[], T | None], what: str, timeout_s: float = PATIENCE_S) -> T:
    """The first true answer; a test that waits for something outside has no event to await.

    Whoever looks takes the processor from what it waits for, and others wait beside it: a fifth of the time at most,
    and less and less often.
    """
    deadline = time.monotonic() + timeout_s
    pause_s = 0.005
    while True:
        begun = time.thread_time()
        found = look()
        if found:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(f"not in {timeout_s:g} s: {what}")
        time.sleep(max(pause_s, 4 * (time.thread_time() - begun)))
        pause_s = min(1.1 * pause_s, 0.05)


class Process:
    """A child whose output is read as it comes."""

    def __init__(self, command: list[str], env: dict[str, str], cwd: Path, stdin: int = subprocess.DEVNULL) -> None:
        self.command = command
        self.proc = subprocess.Popen(
            command, env=env, cwd=cwd, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        self._lines: list[str] = []
        self.ended_at = 0.0
        self._news = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.proc.stdout is not None
        for line in self.proc.stdout:
            with self._news:
                self._lines.append(line.decode(errors="replace"))
                self._news.notify_all()
        self.proc.wait()
        self.ended_at = time.monotonic()
        with self._news:
            self._news.notify_all()

    @property
    def pid(self) -> int:
        return self.proc.pid

    @property
    def text(self) -> str:
        return "".join(self._lines)

    def expect(self, pattern: str, timeout_s: float = PATIENCE_S) -> re.Match[str]:
        """Wait until the output matches."""
        deadline = time.monotonic() + timeout_s
        with self._news:
            while True:
                if match := re.search(pattern, self.text):
                    return match
                left = deadline - time.monotonic()
                if left <= 0 or (self.proc.poll() is not None and not self._reader.is_alive()):
                    raise AssertionError(f"no {pattern!r} in the output of pid {self.pid}:\n{self.text}")
                self._news.wait(min(left, 0.5))

    def wait(self, timeout_s: float = PATIENCE_S) -> int:
        try:
            code = self.proc.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"pid {self.pid} still runs after {timeout_s:g} s:\n{self.text}") from None
        self._reader.join(5)
        return code

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)


class Fleet:
    """Starts processes for one test in one folder, and takes them all down again."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.marker = f"MARK_OF_TEST={folder}"
        self.home = folder / "home"
        self.env = {
            **{key: value for key, value in os.environ.items() if not key.startswith("MUSTER_")},
            "MARK_OF_TEST": str(folder),
            "MUSTER_HOME": str(self.home),
            "TMPDIR": str(folder),
            "PYTHONPATH": "",
        }
        self.notes = folder / "notes"
        self.notes.mkdir()
        self.processes: list[Process] = []
        self.run_id = "run"
        self.port = 0
        self.host = "127.0.0.1"

    # Starting

    def start(self, *command: str, **env: str) -> Process:
        process = Process(list(command), self.env | env, self.folder)
        self.processes.append(process)
        return process

    def coordinator(self, *options: str, host: str = "127.0.0.1") -> Process:
        self.port = self.port or free_port(host)
        self.host = host
        shown = f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"
        process = self.start(sys.executable, "-m", "muster.coordinator", "--listen", shown, *options)
        process.expect("listens on")
        return process

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def node(self, name: str, *options: str, program: tuple[str, ...] = (), join: bool = True, **env: str) -> Process:
        where = ("--coordinator", self.address, "--run-id", self.run_id) if join else ()
        if "--coordinator" in options:  # through a proxy, at whose address no token is kept
            env = {"MUSTER_RUN_TOKEN": self.token or ""} | env
        program = program or (PROBE, str(self.notes), "wait")
        logs = ("--log-dir", str(self.folder / "logs"))
        command = (sys.executable, "-m", "muster.node.cli", *where, "--name", name, *logs, *options, *program)
        return self.start(*command, **env)

    def probe(self, *words: str) -> tuple[str, ...]:
        return (PROBE, str(self.notes), *words)

    def go(self) -> None:
        """Let every waiting probe finish."""
        (self.notes / "go").touch()

    # Looking

    def view(self, run_id: str | None = None) -> dict[str, Any] | None:
        """What the coordinator says about the run now, or None while it cannot be asked."""
        try:
            return self._ask(AskFrame(ask="show"), run_id or self.run_id, timeout_s=2.0)
        except (TimeoutError, CoordinatorRefused):
            return None

    @property
    def token(self) -> str | None:
        return self.env.get("MUSTER_RUN_TOKEN") or run_token.find(self.home, [(self.host, self.port)])

    def order(self, question: str, **fields: Any) -> dict[str, Any]:
        return self._ask(AskFrame(ask=question, **fields), self.run_id)

    def _ask(self, question: AskFrame, run_id: str, timeout_s: float = 5.0) -> dict[str, Any]:
        where = [(self.host, self.port)]
        return dict(asyncio.run(ask(where, RunId(run_id), question, token=self.token, timeout_s=timeout_s)))

    def until(self, what: str, look: Callable[[dict[str, Any]], Any], timeout_s: float = PATIENCE_S) -> dict[str, Any]:
        last: list[dict[str, Any]] = []

        def seen() -> dict[str, Any] | None:
            view = self.view()
            if view is not None:
                last[:] = [view]
            return view if view is not None and look(view) else None

        try:
            return eventually(seen, what, timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}; last seen: {json.dumps(last, indent=1)[:4000]}") from None

    def training(self, number: int, size: int) -> dict[str, Any]:
        """Wait until that round is out with that many workers."""
        wanted = f"round {number} with {size} workers"
        return self.until(wanted, lambda v: v["state"] == "training" and v["round"] == number and v["world"] == size)

    def settled(self, electors: int) -> None:
        """Wait until the run has that many electors, and enough of them have kept the record that names them.

        A coordinator that is killed earlier may have no successor.
        """
        wanted = f"{electors} electors"
        self.until(wanted, lambda v: len(v["electors"]) == electors and v["electors_settled"])

    def started(self, number: int, count: int) -> list[dict[str, Any]]:
        """What the ranks of a round wrote when they started, by rank."""

        def look() -> list[dict[str, Any]] | None:
            notes = self.told("start", number)
            return notes if len(notes) >= count else None

        return eventually(look, f"{count} ranks of round {number} started")

    def told(self, kind: str, number: int | str = "*") -> list[dict[str, Any]]:
        notes = [json.loads(path.read_text()) for path in self.notes.glob(f"{kind}-{number}-*.json")]
        return sorted(notes, key=lambda note: int(note["RANK"]))

    # Ending

    def left_over(self) -> list[str]:
        """Command lines of processes that carry this test's mark."""
        mark = self.marker.encode()
        found = []
        for entry in os.listdir("/proc"):
            if not entry.isdigit() or int(entry) == os.getpid():
                continue
            try:
                environ = Path(f"/proc/{entry}/environ").read_bytes()
                line = Path(f"/proc/{entry}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if mark in environ.split(b"\0") and line:
                found.append(f"{entry}: {line.strip(' .')}")
        return found

    def assert_nothing_left(self, timeout_s: float = 5.0) -> None:
        eventually(lambda: not self.left_over(), f"no process left; there are {self.left_over()}", timeout_s)

    def assert_nothing_left_but(self, count: int, timeout_s: float = 5.0) -> None:
        """For tests whose coordinator goes on."""
        try:
            eventually(lambda: len(self.left_over()) <= count, f"only {count} left", timeout_s)
        except AssertionError as error:
            raise AssertionError(f"{error}; there are {self.left_over()}") from None

    def last_words(self, lines: int = 30) -> str:
        """What each process said last."""
        return "\n".join(
            f"--- {' '.join(one.command)}: {one.proc.poll()}\n{''.join(one.text.splitlines(True)[-lines:])}"
            for one in self.processes
        )

    def close(self) -> None:
        for process in self.processes:
            if process.proc.poll() is None:
                process.proc.kill()
        for line in self.left_over():
            try:
                os.kill(int(line.partition(":")[0]), signal.SIGKILL)
            except ProcessLookupError:
                continue
        for process in self.processes:
            process.wait()


def free_port(host: str = "127.0.0.1") -> int:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


def gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True
    return state == "Z"


def family(pid: int) -> list[int]:
    """That process and everything that it started, directly or not; zombies do not count."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    parents.setdefault(int(parent), []).append(int(entry.name))
    found = [pid]
    for one in found:
        found += parents.get(one, [])
    return found


def kill_all(pids: list[int], number: int = signal.SIGKILL) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

"""A prepared process: it has imported muster, and forks the programs of muster that tests start.

`install()` replaces the function behind `subprocess.Popen` in a process of pytest. A command such as
`python -m muster.daemon` is then forked from the prepared process. A new interpreter would need 0.15 to 0.3 s of a core
for its imports. A forked process replaces the function, too: a control plane forks its agents, an agent its guard.
All other commands start a real interpreter. So does every command of a test with the mark `interpreter`, and every
command with a variable that changes Python.

`tests/forked.py` gives a forked process its command line, variables, descriptors and signals.
"""

from __future__ import annotations

import array
import contextlib
import ctypes
import gc
import importlib
import json
import os
import pkgutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import forked
from tests.forked import Command, read_command

ROOT = Path(__file__).resolve().parent.parent
_PACKAGES = ("backends.local", "cli", "control", "core", "daemon", "mesh", "node", "server", "store", "types", "world")
_OTHER_MODULES = (
    "muster.coordinator",
    "uvicorn.protocols.http.httptools_impl",
    "uvicorn.lifespan.on",
    "encodings.idna",
    "rich.live",
)
_MAX_REQUEST = 1 << 18
_MAX_DESCRIPTORS = 250
_PR_SET_PDEATHSIG = 1
_CLONE_PARENT = 0x8000
_CLONE_NUMBERS = {"x86_64": 56, "aarch64": 220}  # The number of the system call, by machine.
_python = ctypes.PyDLL(None)  # A fork needs the lock of the interpreter, which these calls keep.
_exec: Callable[..., int] = forked.exec_command


# In a process of pytest -----------------------------------------------------------------------------


class PreparedProcess:
    """A connection to the prepared process, which starts with the first command."""

    def __init__(self) -> None:
        self.forks = True
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None

    def start_command(self, *call: Any) -> int:
        """Take a call of `_fork_exec`, and return the process id of the child."""
        is_possible = self.forks and os.uname().machine in _CLONE_NUMBERS
        command = read_command(call) if is_possible else None
        if command is None:
            return _exec(*call)
        with self._lock:
            return self._request(command)

    def _request(self, command: Command) -> int:
        if self._socket is None:
            self._socket = _start_prepared()
        numbers = list(command.descriptors)
        request = json.dumps([command.argv, command.env, command.cwd, numbers, command.new_session, command.umask])
        descriptors = array.array("i", [command.descriptors[number] for number in numbers])
        self._socket.sendmsg([request.encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)])
        answer = self._socket.recv(64)
        if not answer:
            raise RuntimeError("the prepared process has ended")
        return int(answer)


def _start_prepared() -> socket.socket:
    local, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for end in (local, remote):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 * _MAX_REQUEST)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("MUSTER_", "PYTEST_"))}
    command = [sys.executable, "-m", "tests.prepared", str(remote.fileno()), str(os.getpid())]
    subprocess.Popen(command, pass_fds=[remote.fileno()], cwd=ROOT, env=env)
    remote.close()
    return local


prepared = PreparedProcess()


def install() -> None:
    """Let this process fork the programs of muster that it starts."""
    subprocess._fork_exec = prepared.start_command  # type: ignore[attr-defined]


# The prepared process -------------------------------------------------------------------------------


def main() -> None:
    """Fork on request until pytest has ended. The command is `python -m tests.prepared SOCKET PARENT`."""
    control = socket.socket(fileno=int(sys.argv[1]))
    _python.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != int(sys.argv[2]):
        return
    import_programs()
    gc.collect()
    gc.freeze()
    while request := _receive(control):
        command, descriptors = request
        pid = _fork_sibling()
        if pid == 0:
            control.close()
            forked.become(command)
        for descriptor in descriptors:
            os.close(descriptor)
        control.send(str(pid).encode())


def import_programs() -> None:
    """Import the modules of the programs of muster. Leave out modules that need torch or a missing package."""
    sys.modules["torch"] = None  # type: ignore[assignment]  # An import of torch fails now.
    for package in _PACKAGES:
        parent = importlib.import_module(f"muster.{package}")
        for module in pkgutil.walk_packages(parent.__path__, f"{parent.__name__}."):
            if not module.name.endswith("__main__"):
                with contextlib.suppress(ImportError):
                    importlib.import_module(module.name)
    for name in _OTHER_MODULES:
        importlib.import_module(name)
    del sys.modules["torch"]


def _receive(control: socket.socket) -> tuple[Command, list[int]] | None:
    data, descriptors, _, _ = socket.recv_fds(control, _MAX_REQUEST, _MAX_DESCRIPTORS)
    if not data:
        return None
    argv, env, cwd, numbers, new_session, umask = json.loads(data)
    by_number = dict(zip(numbers, descriptors, strict=True))
    return Command(tuple(argv), tuple(env), cwd, by_number, new_session, umask), descriptors


def _fork_sibling() -> int:
    """Fork as `os.fork` does, but give the new process to pytest as a child, and return its process id."""
    ctypes.pythonapi.PyOS_BeforeFork()
    pid: int = _python.syscall(_CLONE_NUMBERS[os.uname().machine], _CLONE_PARENT | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
    else:
        ctypes.pythonapi.PyOS_AfterFork_Parent()
    return pid


if __name__ == "__main__":
    main()

"""The agent's handle on what runs below it: the guard, the warm parent, the ranks of a round and its store.

A crew lives until its guard or its warm parent dies; then every rank is reported dead and the agent hires another.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from muster.node.warm import MAX_MESSAGE, interpreter_flags

STORE = "store"


@dataclass(frozen=True)
class Program:
    """What every rank runs."""

    mode: str  # script | module | command
    target: str
    args: tuple[str, ...]
    warm: bool
    preload: tuple[str, ...]
    detect_torch: bool

    def to_wire(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "target": self.target,
            "args": list(self.args),
            "warm": self.warm,
            "preload": list(self.preload),
            "detect_torch": self.detect_torch,
        }


@dataclass(frozen=True)
class Start:
    """One rank to start."""

    key: str
    env: dict[str, str]
    out: str
    err: str


class Crew:
    """Callbacks run on the loop: `on_exit(key, status)` once per rank, `on_lost(why)` at most once."""

    def __init__(
        self,
        program: Program,
        guard_config: dict[str, Any],
        *,
        on_exit: Callable[[str, int], None],
        on_lost: Callable[[str], None],
        on_note: Callable[[str], None],
    ) -> None:
        self._program = program
        self._config = guard_config
        self._on_exit = on_exit
        self._on_lost = on_lost
        self._on_note = on_note
        self._alive: set[str] = set()
        self._sweeps: dict[int, asyncio.Future[None]] = {}
        self._lost = False
        self._released = False
        self.warm_ready = asyncio.get_running_loop().create_future()
        self.torch_loaded = False
        self.pids: dict[str, int] = {}
        self._guard: subprocess.Popen[bytes]
        self._guard_socket: socket.socket
        self._warm_socket: socket.socket
        self._hire()

    @property
    def lost(self) -> bool:
        return self._lost

    @property
    def alive(self) -> set[str]:
        """Keys of ranks whose end has not been seen."""
        return self._alive - {STORE}

    def _hire(self) -> None:
        plan = os.memfd_create("muster-plan")
        os.write(plan, json.dumps(self._program.to_wire()).encode())
        os.lseek(plan, 0, os.SEEK_SET)
        self._guard_socket, guard_end = socket.socketpair()
        self._warm_socket, warm_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        room = sum(len(os.fsencode(part)) + 1 for part in (self._program.target, *self._program.args)) + 64
        fds = (guard_end.fileno(), warm_end.fileno(), plan)
        env = os.environ | {"PYTHONFAULTHANDLER": "1"}
        stdin = subprocess.DEVNULL if _is_terminal(0) else None
        command = [
            sys.executable,
            *interpreter_flags(),
            "-m",
            "muster.node.guard",
            *map(str, fds),
            str(min(room, 4096)),
        ]
        self._guard = subprocess.Popen(command, pass_fds=fds, stdin=stdin, start_new_session=True, env=env)
        guard_end.close()
        warm_end.close()
        os.close(plan)
        self._guard_socket.setblocking(False)
        self._warm_socket.setblocking(False)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._guard_socket, self._hear_guard)
        loop.add_reader(self._warm_socket, self._hear_warm)
        self._tell_guard(**self._config)

    # Ranks

    def spawn(self, starts: Iterable[Start]) -> None:
        for start in starts:
            self._alive.add(start.key)
            self._order(do="spawn", key=start.key, env=start.env, out=start.out, err=start.err)

    def serve_store(self, listener: socket.socket, host: str, port: int) -> None:
        """Hand the listening socket to a store process; ours is closed."""
        self._alive.add(STORE)
        message = json.dumps({"do": "store", "key": STORE, "host": host, "port": port}).encode()
        try:
            socket.send_fds(self._warm_socket, [message], [listener.fileno()])
        except OSError as error:
            self._lose(f"the warm parent is gone: {error}")
        listener.close()

    def signal(self, number: int, keys: Iterable[str], *, group: bool = True) -> None:
        if keys := list(keys):
            self._order(do="signal", signal=int(number), keys=keys, group=group)

    def kill_store(self) -> None:
        if STORE in self._alive:
            self.signal(signal.SIGKILL, [STORE])

    async def sweep(self) -> None:
        """Have the guard kill what ranks left behind; returns when nothing is left."""
        if self._lost:
            return
        ticket = len(self._sweeps) + 1
        done = self._sweeps[ticket] = asyncio.get_running_loop().create_future()
        self._tell_guard(sweep=ticket)
        await done

    # The guard

    def beat(self, **news: Any) -> None:
        """The agent is alive; the guard acts when this stops coming."""
        self._tell_guard(**news)

    async def release(self, timeout_s: float = 3.0) -> None:
        """The agent leaves in good order: end everything below, and report nothing."""
        self._released = True
        self._tell_guard(release=True)
        ended = asyncio.Event()
        watch = os.pidfd_open(self._guard.pid)
        asyncio.get_running_loop().add_reader(watch, ended.set)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await ended.wait()
        asyncio.get_running_loop().remove_reader(watch)
        os.close(watch)
        self.dismiss()

    def dismiss(self) -> None:
        """Make sure that nothing of this crew is left, whatever state it is in."""
        self._forget_sockets()
        if self._guard.poll() is None:
            self._guard.kill()
            self._guard.wait()

    def _tell_guard(self, **news: Any) -> None:
        if self._lost:
            return
        try:
            self._guard_socket.send(json.dumps(news).encode() + b"\n")
        except BlockingIOError:
            return  # it has many unread beats already: they say the same
        except OSError as error:
            self._lose(f"the guard is gone: {error.strerror}")

    def _order(self, **order: Any) -> None:
        if self._lost:
            return
        try:
            self._warm_socket.send(json.dumps(order).encode())
        except OSError as error:
            self._lose(f"the warm parent is gone: {error.strerror}")

    def _hear_guard(self) -> None:
        try:
            data = self._guard_socket.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose("its guard died")
            return
        for line in data.splitlines():
            done = self._sweeps.pop(json.loads(line)["swept"], None)
            if done is not None and not done.done():
                done.set_result(None)

    def _hear_warm(self) -> None:
        while not self._lost:
            try:
                data = self._warm_socket.recv(MAX_MESSAGE)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self._lose("its warm parent died")
                return
            self._take(json.loads(data))

    def _take(self, news: dict[str, Any]) -> None:
        if "exited" in news:
            key = news["exited"]
            self._alive.discard(key)
            if key != STORE:
                self._on_exit(key, news["status"])
        elif "spawned" in news:
            self.pids[news["spawned"]] = news["pid"]
        elif "ready" in news:
            self.torch_loaded = bool(news["torch"])
            for problem in news["problems"]:
                self._on_note(f"could not preload {problem}")
            if not self.warm_ready.done():
                self.warm_ready.set_result(news["took_s"])

    def _lose(self, why: str) -> None:
        if self._lost:
            return
        self._lost = True
        self._forget_sockets()
        if self._released:
            return
        for done in self._sweeps.values():
            if not done.done():
                done.set_result(None)
        ended, self._alive = self.alive, set()
        for key in sorted(ended):
            self._on_exit(key, -signal.SIGKILL)
        self._on_lost(why)

    def _forget_sockets(self) -> None:
        loop = asyncio.get_running_loop()
        for end in (self._guard_socket, self._warm_socket):
            if end.fileno() >= 0:
                loop.remove_reader(end)
                end.close()


def _is_terminal(fd: int) -> bool:
    try:
        return os.isatty(fd)
    except OSError:
        return True

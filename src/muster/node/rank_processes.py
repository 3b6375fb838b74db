"""The agent's handle on what runs below it: the guard, the warm parent, the ranks of a round and its store.

They live until their guard or warm parent dies; then every rank is reported dead and the agent starts others.
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
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from muster.node import system
from muster.node.guard import Posting, Word, line
from muster.node.program import Program, interpreter_flags
from muster.node.warm import MAX_MESSAGE, STORE

SPARE_NICE = 10
STOP_MARGIN_S = 2.0


@dataclass(frozen=True)
class Start:
    """One rank to start."""

    key: str
    env: dict[str, str]
    out: str
    err: str


class RankProcesses:
    """Everything below keeps the descriptors of `hold` open: whoever has the other end sees when it is gone.

    Callbacks run on the loop: `on_up()` when all ranks run, `on_exit(key, status)` once
    per rank, `on_lost(why)` at most once.
    """

    def __init__(
        self,
        program: Program,
        posting: Posting,
        *,
        hold: tuple[int, ...] = (),
        on_exit: Callable[[str, int], None],
        on_up: Callable[[], None],
        on_lost: Callable[[str], None],
        on_note: Callable[[str], None],
    ) -> None:
        self._program = program
        self._posting = posting
        self._hold = hold
        self._on_exit = on_exit
        self._on_up = on_up
        self._on_lost = on_lost
        self._on_note = on_note
        self._alive: set[str] = set()
        self._starting: set[str] = set()
        self._pids: dict[str, int] = {}
        self._stops: dict[int, asyncio.Future[None]] = {}
        self._ticket = 0
        self._lost = False
        self._released = False
        self.warm_ready = asyncio.get_running_loop().create_future()
        self.torch_loaded = False
        self._warm_pid: int | None = None
        self._hurried = True
        self._blocked = False
        self._base_nice = os.getpriority(os.PRIO_PROCESS, 0)
        self._unsent: deque[tuple[bytes, socket.socket | None]] = deque()
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

    def pid_of(self, key: str) -> int | None:
        """The process of a rank whose end has not been seen."""
        return self._pids.get(key) if key in self._alive else None

    def _hire(self) -> None:
        plan = os.memfd_create("muster-plan")
        os.write(plan, json.dumps(self._program._asdict()).encode())
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
            "muster.node.bootstrap",
            *map(str, fds),
            str(min(room, 4096)),
        ]
        with system.deaf_children():
            self._guard = subprocess.Popen(
                command, pass_fds=(*fds, *self._hold), stdin=stdin, start_new_session=True, env=env
            )
        guard_end.close()
        warm_end.close()
        os.close(plan)
        self._guard_socket.setblocking(False)
        self._warm_socket.setblocking(False)
        loop = asyncio.get_running_loop()
        loop.add_reader(self._guard_socket, self._hear_guard)
        loop.add_reader(self._warm_socket, self._hear_warm)
        self.tell_guard(self._posting)

    # Ranks

    def spawn(self, starts: Iterable[Start]) -> None:
        """Start ranks. Where there is no parent any more they end at once, as ranks do."""
        self.hurry(True)
        for start in starts:
            if self._lost:
                asyncio.get_running_loop().call_soon(self._on_exit, start.key, -signal.SIGKILL)
                continue
            self._alive.add(start.key)
            self._starting.add(start.key)
            self._order(do="spawn", key=start.key, env=start.env, out=start.out, err=start.err)

    def hurry(self, now: bool) -> None:
        """A spare has time: its parent warms up behind everyone else, if its priority can be raised again."""
        if self._warm_pid is not None and now != self._hurried and system.may_raise_priority():
            self._hurried = now
            with contextlib.suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, self._warm_pid, self._base_nice if now else SPARE_NICE)

    def serve_store(self, listener: socket.socket, host: str, port: int) -> None:
        """Hand the listening socket to a store process; ours is closed."""
        self._alive.add(STORE)
        message = json.dumps({"do": "store", "key": STORE, "host": host, "port": port}).encode()
        self._unsent.append((message, listener))
        self._send_orders()

    def signal(self, number: int, keys: Iterable[str], *, group: bool = True) -> None:
        if keys := list(keys):
            self._order(do="signal", signal=int(number), keys=keys, group=group)

    async def stop(self, number: int, grace_s: float, *, freeze_s: float = 0.0) -> None:
        """Signal the ranks, kill what is left after the grace and what they left behind; returns when nothing is.

        With `freeze_s` they are held still for that long first.
        """
        if self._lost:
            return
        self._ticket += 1
        done = self._stops[self._ticket] = asyncio.get_running_loop().create_future()
        self._order(do="stop", signal=int(number), grace_s=grace_s, freeze_s=freeze_s, ticket=self._ticket)
        try:
            async with asyncio.timeout(freeze_s + grace_s + STOP_MARGIN_S):
                await done
        except TimeoutError:
            self._lose("its warm parent does not obey")  # stopped, perhaps: what is below it ends with its guard
            self.dismiss()

    def hasten(self, grace_s: float) -> None:
        """A stop that is under way gets no more than this much time."""
        self._order(do="hasten", grace_s=grace_s)

    # The guard

    async def release(self, timeout_s: float = 3.0) -> None:
        """The agent leaves in good order: end everything below, and report nothing."""
        self._released = True
        self.tell_guard(Word(release=True))
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
        """Make sure that nothing of them is left, whatever state it is in."""
        self._forget_sockets()
        if self._guard.poll() is None:
            self._guard.kill()
            self._guard.wait()

    def tell_guard(self, told: Posting | Word) -> None:
        """The guard acts when this stops coming."""
        if self._lost:
            return
        try:
            self._guard_socket.send(line(told))
        except BlockingIOError:
            return  # it has many unread beats already: they say the same
        except OSError as error:
            self._lose(f"the guard is gone: {error.strerror}")

    def _order(self, **order: Any) -> None:
        self._unsent.append((json.dumps(order).encode(), None))
        self._send_orders()

    def _send_orders(self) -> None:
        """As many as the socket takes; a parent that is busy importing reads the rest later."""
        loop = asyncio.get_running_loop()
        while self._unsent and not self._lost:
            message, listener = self._unsent[0]
            try:
                socket.send_fds(self._warm_socket, [message], [] if listener is None else [listener.fileno()])
            except BlockingIOError:
                self._blocked = True
                loop.add_writer(self._warm_socket, self._send_orders)
                return
            except OSError as error:
                self._lose(f"the warm parent is gone: {error.strerror}")
                return
            self._unsent.popleft()
            if listener is not None:
                listener.close()
        if self._blocked and not self._lost:
            self._blocked = False
            loop.remove_writer(self._warm_socket)

    def _hear_guard(self) -> None:
        try:
            data = self._guard_socket.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose("its guard died")

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
            self._ended(news["exited"], news["status"])
        elif "cleared" in news:
            for key, status in news["ends"]:
                self._ended(key, status)
            done = self._stops.pop(news["cleared"], None)
            if done is not None and not done.done():
                done.set_result(None)
        elif "spawned" in news:
            self._starting.discard(news["spawned"])
            self._pids[news["spawned"]] = news["pid"]
            if not self._starting:
                self._on_up()
        elif "warming" in news:
            self._warm_pid = news["warming"]
        elif "ready" in news:
            self.torch_loaded = bool(news["torch"])
            for problem in news["problems"]:
                self._on_note(f"could not preload {problem}")
            if not self.warm_ready.done():
                self.warm_ready.set_result(news["took_s"])

    def _ended(self, key: str, status: int) -> None:
        self._alive.discard(key)
        self._pids.pop(key, None)
        if key != STORE:
            self._on_exit(key, status)

    def _lose(self, why: str) -> None:
        if self._lost:
            return
        self._lost = True
        self._forget_sockets()
        if self._released:
            return
        for done in self._stops.values():
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
                loop.remove_writer(end)
                end.close()


def _is_terminal(fd: int) -> bool:
    try:
        return os.isatty(fd)
    except OSError:
        return True

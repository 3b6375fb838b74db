"""The agent's handle on what runs below it: the guard, the warm parent, the ranks of a round and its store.

They live until their guard or warm parent dies; then every rank is reported dead and the agent starts others.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from muster.node import system, whereabouts
from muster.node.beginning import write_plan
from muster.node.guard import Posting, Word, line
from muster.node.heirs import Experience, Heirs
from muster.node.parent_line import ParentLine
from muster.node.program import Program, interpreter_flags
from muster.node.warm import STORE
from muster.types import modules

STOP_MARGIN_S = 2.0


@dataclass(frozen=True)
class Start:
    """One rank to start."""

    key: str
    env: dict[str, str]
    out: str
    err: str
    notes: str = ""  # where it writes down what it imports


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
        experience: Experience,
        on_exit: Callable[[str, int], None],
        on_up: Callable[[], None],
        on_signalled: Callable[[], None],
        on_lost: Callable[[str], None],
        on_note: Callable[[str], None],
    ) -> None:
        self._program = program
        self._posting = posting
        self._hold = hold
        self._on_exit = on_exit
        self._on_up = on_up
        self._on_signalled = on_signalled
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
        self.doomed = False  # a module is not there that ranks import first, or their file does not compile
        self._importing = ""
        self._room = min(sum(len(os.fsencode(part)) + 1 for part in (program.target, *program.args)) + 64, 4096)
        self._experience = experience
        self._heirs = Heirs(program, experience, self._hire_heir, on_ready=self._heir_is_ready, on_note=on_note)
        self._guard: subprocess.Popen[bytes]
        self._guard_socket: socket.socket
        self._hire_socket: socket.socket
        self._parent = ParentLine(self._take, self._lose)
        self._hire()

    @property
    def lost(self) -> bool:
        return self._lost

    @property
    def doing(self) -> str:
        """What ranks would have to wait for now: the imports of the first parent. Later ones warm up beside it."""
        return "" if self._lost or self.warm_ready.done() else self._importing

    @property
    def alive(self) -> set[str]:
        """Keys of ranks whose end has not been seen."""
        return self._alive - {STORE}

    def pid_of(self, key: str) -> int | None:
        """The process of a rank whose end has not been seen."""
        return self._pids.get(key) if key in self._alive else None

    def _hire(self) -> None:
        plan = write_plan(self._program._replace(without=tuple(self._experience.unfit)))
        self._guard_socket, guard_end = socket.socketpair()
        self._hire_socket, hire_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        fds = (guard_end.fileno(), hire_end.fileno(), self._parent.theirs.fileno(), plan)
        env = os.environ | {"PYTHONFAULTHANDLER": "1"}
        if self._posting.saves is not None:
            env[whereabouts.FOLDER_VARIABLE] = self._posting.saves.scratch
        stdin = subprocess.DEVNULL if _is_terminal(0) else None
        command = [
            sys.executable,
            *interpreter_flags(),
            "-m",
            "muster.node.bootstrap",
            *map(str, fds),
            str(self._room),
        ]
        with system.deaf_children():
            self._guard = subprocess.Popen(
                command, pass_fds=(*fds, *self._hold), stdin=stdin, start_new_session=True, env=env
            )
        guard_end.close()
        hire_end.close()
        self._parent.handed_over()
        os.close(plan)
        self._guard_socket.setblocking(False)
        self._hire_socket.setblocking(False)
        asyncio.get_running_loop().add_reader(self._guard_socket, self._hear_guard)
        self.tell_guard(self._posting)

    # Who takes over

    def learned(self, modules: tuple[str, ...]) -> None:
        """What ranks import by themselves, here or elsewhere, might as well be imported ahead."""
        if not self._program.auto:
            return
        if self._experience.learn(modules) or self._experience.heirs == 0:
            self._compare()

    def _compare(self) -> None:
        if self.warm_ready.done() and not self._lost:
            if self.torch_loaded:
                self._heirs.prepare()
            if self._experience.modules:
                newest = self._heirs.ready or self._parent
                newest.order(do="compare", modules=self._experience.modules)

    def _hire_heir(
        self, program: Program, on_news: Callable[[dict[str, Any]], None], on_end: Callable[[str], None]
    ) -> ParentLine:
        """Below the same guard: who says that nothing is left must know of everybody."""
        heir, plan = ParentLine(on_news, on_end), write_plan(program)
        with contextlib.suppress(OSError):  # then the guard is gone, or busy, and nobody has the other end
            socket.send_fds(self._hire_socket, [str(self._room).encode()], [heir.theirs.fileno(), plan])
        heir.handed_over()
        os.close(plan)
        return heir

    def _heir_is_ready(self) -> None:
        self._hand_over()
        self._compare()

    def _hand_over(self) -> None:
        """Only while nothing runs: a parent can be asked what it started, and nobody else can."""
        if self._lost or self._alive or self._starting or self._stops:
            return
        if (found := self._heirs.take()) is not None:
            before, (self._parent, self.torch_loaded) = self._parent, found
            self._parent.on_news, self._parent.on_end = self._take, self._lose
            before.close()

    # Ranks

    def spawn(self, starts: Iterable[Start]) -> None:
        """Start ranks. Where there is no parent any more they end at once, as ranks do."""
        self._hand_over()
        self.hurry(True)
        for start in starts:
            if self._lost:
                asyncio.get_running_loop().call_soon(self._on_exit, start.key, -signal.SIGKILL)
                continue
            self._alive.add(start.key)
            self._starting.add(start.key)
            notes = start.notes if self._program.auto else ""
            told = {"env": start.env, "out": start.out, "err": start.err, "notes": notes}
            self._order(do="spawn", key=start.key, lease_s=self._posting.lease_s, **told)

    def hurry(self, now: bool) -> None:
        """A spare has time: its parent warms up behind everyone else."""
        self._parent.hurry(now)

    def serve_store(self, listener: socket.socket, host: str, port: int) -> None:
        """Hand the listening socket to a store process; ours is closed."""
        self._hand_over()
        self._alive.add(STORE)
        self._parent.order(listener, do="store", key=STORE, host=host, port=port)

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
        if not self._lost:
            self._parent.order(**order)

    def _hear_guard(self) -> None:
        try:
            data = self._guard_socket.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._lose("its guard died")

    def _take(self, news: dict[str, Any]) -> None:
        if "exited" in news:
            self._ended(news["exited"], news["status"])
        elif "cleared" in news:
            for key, status in news["ends"]:
                self._ended(key, status)
            done = self._stops.pop(news["cleared"], None)
            if done is not None and not done.done():
                done.set_result(None)
        elif "signalled" in news:
            self._on_signalled()
        elif "spawned" in news:
            self._starting.discard(news["spawned"])
            self._pids[news["spawned"]] = news["pid"]
            if not self._starting:
                self._on_up()
        elif "importing" in news:
            self._importing = modules.doing(str(news["importing"]))
        elif "unfit" in news:
            self._heirs.note_unfit(news)
        elif "lacking" in news:
            self._heirs.compared(news["lacking"])
        elif "ready" in news:
            self.torch_loaded = bool(news["torch"])
            self.doomed = bool(news["doomed"])
            for problem in news["problems"]:
                self._on_note(f"could not preload {problem}")
            if not self.warm_ready.done():
                self.warm_ready.set_result(news["took_s"])
                if not self.alive:
                    self._compare()

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
        self._heirs.close()
        self._parent.close()
        for end in (self._guard_socket, self._hire_socket):
            if end.fileno() >= 0:
                asyncio.get_running_loop().remove_reader(end)
                end.close()


def offer_store(
    processes: RankProcesses, listener: socket.socket, at: tuple[str, int], wanted: Callable[[], bool]
) -> None:
    """Start the round's store: at once where torch is loaded, else when the first rank asks for it."""
    loop = asyncio.get_running_loop()

    def serve() -> None:
        if listener.fileno() < 0:
            return
        loop.remove_reader(listener)
        if wanted() and not processes.lost:
            processes.serve_store(listener, *at)
        else:
            listener.close()

    if processes.torch_loaded:
        serve()
        return
    loop.add_reader(listener, serve)
    processes.warm_ready.add_done_callback(lambda _: serve() if processes.torch_loaded else None)


def _is_terminal(fd: int) -> bool:
    try:
        return os.isatty(fd)
    except OSError:
        return True

"""The guard: a small process beside each agent that outlives it by just long enough.

It is the parent of the warm parent and inherits every orphan below it, so it can say for certain when no rank and
no grandchild is left. When the agent dies, or `core.member.guard` says that its time is up, the guard kills them all
and tells the coordinator `gone(round)` over a connection of its own. Ranks that are in the middle of a save when the
agent dies may end it, as long as the agent's lease lasts.

`muster.node.bootstrap` starts the warm parent and then calls `main`; the agent's first line says the rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from muster.core.member.guard import GuardState
from muster.core.member.orders import Beat
from muster.node import bootstrap, saves, system
from muster.node.warm import LOOK_S, LOOK_SOON_S
from muster.types import codec
from muster.types.frames import Frame, GoneFrame, HelloFrame, Introduction
from muster.types.world import LEASE_S, MemberId, RunId
from muster.world.connection import Address, Connection, CoordinatorRefused

REPORT_TIMEOUT_S = 10.0
LEAVE_S = 0.02  # let the last frame leave before the process does


@dataclass(frozen=True)
class Posting:
    """Whom a guard stands by: the agent's first line."""

    run_id: RunId
    member_id: MemberId
    name: str
    lease_s: float
    addresses: tuple[Address, ...] = ()
    saves: saves.Where | None = None  # None: nobody's saves are waited for


@dataclass(frozen=True)
class Word:
    """What the agent tells its guard, again and again."""

    until: float | None = None  # None: no rank runs, so none has to end
    lease_s: float = LEASE_S
    round: int | None = None
    addresses: tuple[Address, ...] = field(default=())
    release: bool = False  # the agent leaves in good order: end everything, report nothing


def word(beat: Beat, addresses: list[Address]) -> Word:
    until = None if beat.until == float("inf") else beat.until
    return Word(until, beat.lease_s, beat.round, tuple(addresses))


def line(told: Posting | Word) -> bytes:
    return json.dumps(codec.to_wire(told, names=codec.plain)).encode() + b"\n"


class Guard:
    """Stands by an agent and, when that ends, clears what was below it. `clear()` returns when it is gone."""

    def __init__(self, reader: asyncio.StreamReader, clear: Callable[[], Awaitable[None]]) -> None:
        self._reader = reader
        self._saves: saves.Saves | None = None
        self._clear = clear
        self._reported = asyncio.Event()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        posting = codec.from_wire(Posting, json.loads(await self._reader.readline()), names=codec.plain)
        self._state = GuardState(posting.lease_s, loop.time())
        self._addresses = list(posting.addresses)
        self._saves = saves.Saves(posting.saves) if posting.saves is not None else None
        member = Introduction(posting.member_id, posting.name)
        self._connection = Connection(
            lambda: self._addresses,
            posting.run_id,
            "guard",
            token=os.environ.get("MUSTER_RUN_TOKEN") or None,
            hello=lambda local: HelloFrame(member=member),
            on_frame=self._hear,
        )
        connected = loop.create_task(self._stay_connected())
        sampling = loop.create_task(self._watch_files())
        released = await self._stand_by()
        sampling.cancel()
        if not released:
            await self._saves_end()
        await self._clear()
        self._state.cleared = True
        if released or self._state.round is None:
            return
        self._say(self._state.report())
        done = loop.create_task(self._reported.wait())
        await asyncio.wait({done, connected}, timeout=REPORT_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)

    # Saves

    async def _watch_files(self) -> None:
        """So that files which are always open are told from those of a save."""
        while self._saves is not None:
            await asyncio.sleep(saves.SAMPLE_S)
            if self._state.round is not None:
                with contextlib.suppress(TimeoutError):
                    look = asyncio.to_thread(self._saves.sample, self._below(), asyncio.get_running_loop().time())
                    await asyncio.wait_for(look, saves.SAMPLE_S)

    async def _saves_end(self) -> None:
        """On a thread: nobody knows how long a disk takes to say what is on it, and the lease does not wait."""
        left_s = self._state.due_at - asyncio.get_running_loop().time()
        if self._saves is None or self._state.round is None or left_s <= 0:
            return
        over = self._saves.over(self._below, saves.Patience(left_s, left_s), lambda busy: None)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.to_thread(asyncio.run, over), left_s)

    def _below(self) -> list[saves.WatchedRank]:
        """All that is below counts as the first rank: who is who only the agent knew."""
        assert self._saves is not None
        marks = self._saves.marks(self._state.round)
        return [saves.WatchedRank(number, mark, None if number else os.getpid()) for number, mark in enumerate(marks)]

    async def _stay_connected(self) -> None:
        try:
            await self._connection.run()
        except CoordinatorRefused:
            return  # the coordinator will go by the clock instead

    async def _stand_by(self) -> bool:
        """Follow the agent until it dies, or its time is up; True if it lets go in good order."""
        loop = asyncio.get_running_loop()
        while told := await self._next_word():
            said = codec.from_wire(Word, json.loads(told), names=codec.plain)
            if said.release:
                return True
            until = float("inf") if said.until is None else said.until
            self._state.beat(until, said.lease_s, said.round, loop.time())
            self._addresses = list(said.addresses) or self._addresses
        return False

    async def _next_word(self) -> bytes:
        """Nothing, if it is dead or its time is up. What it had said by the time that we got to look counts."""
        for due_at in (self._state.due_at, -math.inf):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(due_at):
                    try:
                        return await self._reader.readline()
                    except ConnectionError:
                        return b""
        return b""

    def _hear(self, frame: Frame) -> None:
        self._say(self._state.heard(frame))

    def _say(self, frame: Frame | None) -> None:
        if frame is not None and self._connection.send(frame) and isinstance(frame, GoneFrame):
            asyncio.get_running_loop().call_later(LEAVE_S, self._reported.set)


class Below:
    """What lives below a guard: its warm parents and, generation after generation, everything that they started.

    The agent asks for another parent with the two descriptors that it is to have, and how much room for a command line.
    """

    def __init__(self, warm_pid: int, hire_fd: int) -> None:
        self._parents = {warm_pid}
        self._child_ended = asyncio.Event()
        self._hire = socket.socket(fileno=hire_fd)
        self._hire.setblocking(False)
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGCHLD, self._child_ended.set)
        loop.add_reader(self._hire, self._start_another)

    def _start_another(self) -> None:
        try:
            room, fds, _, _ = socket.recv_fds(self._hire, 64, 2)
        except BlockingIOError:
            return
        except OSError:
            room, fds = b"", []
        if len(fds) != 2:  # the agent is gone
            asyncio.get_running_loop().remove_reader(self._hire)
            return
        self._parents -= {pid for pid, _ in system.reap()[0]}
        try:
            self._parents.add(bootstrap.start_parent(fds[0], fds[1], int(room)))
        except OSError:  # the agent sees that nobody has them
            for fd in fds:
                os.close(fd)

    async def clear(self) -> None:
        """Kill all of it. The kernel says when nothing is left: we inherit every orphan."""
        asyncio.get_running_loop().remove_reader(self._hire)
        for pid in self._parents:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        patience_s = LOOK_SOON_S
        while system.reap()[1]:
            self._child_ended.clear()
            try:
                async with asyncio.timeout(patience_s):
                    await self._child_ended.wait()
            except TimeoutError:
                system.kill_children()
                patience_s = LOOK_S


async def stand(control_fd: int, clear: Callable[[], Awaitable[None]]) -> None:
    reader, _writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=control_fd))
    await Guard(reader, clear).run()
    os._exit(0)  # nothing to clean up, and the agent waits for us


async def _main(control_fd: int, hire_fd: int, warm_pid: int) -> None:
    system.adopt_orphans()
    await stand(control_fd, Below(warm_pid, hire_fd).clear)


def main(control_fd: int, hire_fd: int, warm_pid: int) -> None:
    asyncio.run(_main(control_fd, hire_fd, warm_pid))

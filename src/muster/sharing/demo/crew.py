"""How does the demo start its worker processes, talk to them and end them?

All are forked by one parent that has torch in memory (`nursery`). Each has a socket to here: orders go out with a
number, answers come back with it. That a worker is gone is known the moment its socket closes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pickle
import signal
import socket
import sys
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from muster.errors import MusterError
from muster.sharing.demo import wire
from muster.sharing.demo.wire import Answer, Ended, Failed, Fork, Forked, FromParent, Kill, Letter, Order, Role, Warm

_WARM_S = 60.0
_END_S = 5.0
_ANSWER_S = 30.0
_LAST_LOOKS, _LOOK_S = 100, 0.02
_MOST_BYTES = 65536

A = TypeVar("A")


class WorkerDied(MusterError):
    """A worker process is gone, and with it what it held."""

    code = "worker_died"


class WorkerFailed(MusterError):
    """A worker could not do what it was told."""

    code = "worker_failed"


class Worker:
    """One process, seen from here."""

    def __init__(self, name: str, pid: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.name, self.pid = name, pid
        self.gone = asyncio.Event()
        self._reader, self._writer = reader, writer
        self._number = 0
        self._asked: dict[int, asyncio.Future[Answer]] = {}
        self._listening = asyncio.create_task(self._listen())

    async def ask(self, order: Order, answer: type[A]) -> A:
        """Send an order and wait for its answer. Giving up on the wait does not take the order back."""
        if self.gone.is_set():
            raise self._death()
        number = self._number = self._number + 1
        future = self._asked[number] = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(wire.frame(Letter(number, order)))
            async with asyncio.timeout(_ANSWER_S):  # not wait_for: it loses a cancellation that meets the answer
                got = await future
        except TimeoutError:
            raise WorkerFailed(f"{self.name} (process {self.pid}) did not answer for {_ANSWER_S:g} s") from None
        finally:
            self._asked.pop(number, None)
        if isinstance(got, Failed):
            raise WorkerFailed(f"{self.name}: {got.why}")
        if not isinstance(got, answer):
            raise WorkerFailed(f"{self.name} answered {got!r} to {type(order).__name__}")
        return got

    async def hang_up(self) -> None:
        """The worker ends when it sees this."""
        self._writer.close()
        self._listening.cancel()
        await asyncio.gather(self._listening, return_exceptions=True)

    async def _listen(self) -> None:
        try:
            while True:
                size = wire.length_of(await self._reader.readexactly(wire.HEADER_SIZE))
                letter = wire.opened(await self._reader.readexactly(size))
                future = self._asked.get(letter.number)
                if future is not None and not future.done():
                    future.set_result(letter.content)  # type: ignore[arg-type]
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.gone.set()
            for future in self._asked.values():
                if not future.done():
                    future.set_exception(self._death())

    def _death(self) -> WorkerDied:
        return WorkerDied(f"{self.name} (process {self.pid}) is gone")


class Crew:
    """The parent and its workers; all are gone when the block is left."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process: asyncio.subprocess.Process | None = None
        self._control, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._warm = asyncio.Event()
        self._pids: dict[str, asyncio.Future[int]] = {}
        self._running: dict[int, asyncio.Event] = {}
        self._workers: list[Worker] = []
        self._listening: asyncio.Task[None] | None = None
        self.lost = asyncio.Event()  # the parent is gone

    async def __aenter__(self) -> Crew:
        self._control.setblocking(False)
        try:
            with self._log.open("wb") as log:
                command = [sys.executable, "-m", "muster.sharing.demo.nursery", str(self._theirs.fileno())]
                self._process = await asyncio.create_subprocess_exec(
                    *command,
                    pass_fds=[self._theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,  # an interrupt at the terminal is for the demo, which then ends them
                    env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
                )
            self._theirs.close()
            self._listening = asyncio.create_task(self._listen())
            await self._until_warm()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close()

    @property
    def anything_left(self) -> bool:
        """Is any process of it there? Asks the machine, not the books."""
        if self._process is None:
            return False
        try:
            os.killpg(self._process.pid, 0)
        except ProcessLookupError:
            return False
        return True

    async def fork(self, name: str, role: Role) -> Worker:
        ours, theirs = socket.socketpair()
        pid = self._pids[name] = asyncio.get_running_loop().create_future()
        with theirs:
            socket.send_fds(self._control, [pickle.dumps(Fork(name, role))], [theirs.fileno()])
        try:
            reader, writer = await asyncio.open_connection(sock=ours)
            async with asyncio.timeout(_WARM_S):
                worker = Worker(name, await pid, reader, writer)
        except BaseException:
            ours.close()
            raise
        self._workers.append(worker)
        return worker

    async def end(self, workers: Iterable[Worker]) -> None:
        """Returns when these processes are gone for certain, and with them all that they held."""
        chosen = list(workers)
        await asyncio.gather(*(worker.hang_up() for worker in chosen))
        for worker in chosen:
            if worker.pid in self._running:
                self._send(Kill(worker.pid))
        events = [event for worker in chosen if (event := self._running.get(worker.pid)) is not None]
        async with asyncio.timeout(_END_S):
            await asyncio.gather(*(event.wait() for event in events))

    async def _until_warm(self) -> None:
        try:
            async with asyncio.timeout(_WARM_S):
                await self._warm.wait()
        except TimeoutError:
            raise WorkerFailed(f"the workers' parent took more than {_WARM_S:g} s to start") from None
        if self.lost.is_set():
            raise WorkerFailed(f"the workers' parent did not start:\n{self._log.read_text(errors='replace')[-2000:]}")

    async def _listen(self) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(ConnectionError):
            while data := await loop.sock_recv(self._control, _MOST_BYTES):
                self._hear(pickle.loads(data))
        self.lost.set()
        self._warm.set()
        for pid in self._pids.values():
            if not pid.done():
                pid.set_exception(WorkerDied("the workers' parent is gone"))

    def _hear(self, message: FromParent) -> None:
        match message:
            case Warm():
                self._warm.set()
            case Forked(name, pid):
                self._running[pid] = asyncio.Event()
                if not self._pids[name].done():
                    self._pids[name].set_result(pid)
            case Ended(pid, _):
                self._running.pop(pid).set()

    def _send(self, order: Kill) -> None:
        with contextlib.suppress(ConnectionError):
            self._control.send(pickle.dumps(order))

    async def _close(self) -> None:
        """First by asking, then by force; shielded from a second interrupt by being short."""
        await asyncio.gather(*(worker.hang_up() for worker in self._workers))
        self._theirs.close()
        if self._listening is not None:
            self._listening.cancel()
            await asyncio.gather(self._listening, return_exceptions=True)
        self._control.close()  # the parent ends what is left, then itself
        if self._process is None:
            return
        try:
            async with asyncio.timeout(_END_S):
                await self._process.wait()
        except TimeoutError:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)  # its own group: nobody else is in it
            await self._process.wait()
        for _ in range(_LAST_LOOKS):  # where the parent was killed, its children are reaped by somebody else
            if not self.anything_left:
                break
            await asyncio.sleep(_LOOK_S)

"""How does the demo start the processes of its ranks, talk to them and end them?

multiprocessing's fork server imports torch once and forks each of them. Each has a pipe to here and answers orders one
after the other. All die with the fork server, and that with the demo, however it ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import multiprocessing
import os
import signal
import time
from collections import deque
from collections.abc import Iterable
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from muster.demos.orders import A, Failed, RankOrder
from muster.errors import MusterError

_context = multiprocessing.get_context("forkserver")
_END_S = 5.0
_ANSWER_S = 30.0
_LAST_LOOKS, _LOOK_S = 100, 0.02
_UNKNOWN = 255  # multiprocessing's exit code of a process whose fork server did not live to see its end


class WorkerDied(MusterError):
    """A process is gone, and with it what it held."""

    code = "worker_died"


class WorkerFailed(MusterError):
    """A process could not do what it was told."""

    code = "worker_failed"


class RankProcess:
    """One process, seen from here."""

    def __init__(self, process: BaseProcess, connection: Connection) -> None:
        self.process, self.name, self.pid = process, process.name, process.pid or 0
        self.gone = asyncio.Event()
        self._connection = connection
        self._asked: deque[asyncio.Future[Any]] = deque()  # answers come in the order of the orders
        asyncio.get_running_loop().add_reader(connection.fileno(), self._hear)

    async def ask(self, order: RankOrder[A]) -> A:
        """Send an order and wait for its answer. Giving up on the wait does not take the order back."""
        if self.gone.is_set():
            raise self.death()
        answer: asyncio.Future[A] = asyncio.get_running_loop().create_future()
        self._asked.append(answer)
        with contextlib.suppress(ConnectionError):  # it is gone, which `_hear` is about to see
            self._connection.send(order)
        try:
            async with asyncio.timeout(_ANSWER_S):  # not wait_for: it loses a cancellation that meets the answer
                return await answer
        except TimeoutError:
            raise WorkerFailed(f"{self.name} (process {self.pid}) did not answer for {_ANSWER_S:g} s") from None

    def death(self) -> WorkerDied:
        return WorkerDied(f"{self.name} (process {self.pid}) is gone")

    def hang_up(self) -> None:
        """The process ends when it sees this."""
        asyncio.get_running_loop().remove_reader(self._connection.fileno())
        self._connection.close()

    def _hear(self) -> None:
        try:
            said = self._connection.recv()
        except (EOFError, OSError):
            return self._lost()
        answer = self._asked.popleft()
        if answer.done():
            return  # whoever asked has given up
        if isinstance(said, Failed):
            answer.set_exception(WorkerFailed(f"{self.name}: {said.why}"))
        else:
            answer.set_result(said)

    def _lost(self) -> None:
        asyncio.get_running_loop().remove_reader(self._connection.fileno())
        self.gone.set()
        for answer in self._asked:
            if not answer.done():
                answer.set_exception(self.death())


def start_fork_server() -> None:
    """Returns when it has torch in memory. It dies with the thread that calls this."""
    forkserver.set_forkserver_preload(["muster.demos.preload"])
    resource_tracker.ensure_running()  # else `forkserver` does it, and unblocks the signal
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:  # an interrupt at the terminal is for the demo alone, which then ends all that inherit this mask
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    first = _context.Process(daemon=True)
    _start(first)
    first.join()


def _start(process: BaseProcess) -> None:
    try:
        process.start()
    except (EOFError, OSError) as error:
        raise WorkerFailed(f"{process.name} did not start: {error!r}") from error


class DemoProcesses:
    """The processes of all ranks."""

    def __init__(self) -> None:
        self._started: list[RankProcess] = []

    def close(self) -> None:
        """All are gone after this."""
        for one in self._started:
            one.hang_up()
        with contextlib.suppress(WorkerFailed):  # what is left then is told by `anything_left`
            self.end(self._started)
        for _ in range(_LAST_LOOKS):  # where the fork server was killed, its children are reaped by somebody else
            if not self.anything_left:
                break
            time.sleep(_LOOK_S)

    @property
    def lost(self) -> bool:
        """Is the fork server gone?"""
        return any(one.process.exitcode == _UNKNOWN for one in self._started)

    @property
    def anything_left(self) -> bool:
        """Is any process of a rank there? Asks the machine, not the books."""
        return any(os.path.exists(f"/proc/{one.pid}") for one in self._started)

    def start(self, name: str, cluster: str) -> RankProcess:
        ours, theirs = _context.Pipe()
        process = _context.Process(target=_become, args=(cluster, theirs), name=name, daemon=True)
        with theirs:
            _start(process)
        self._started.append(RankProcess(process, ours))
        return self._started[-1]

    def end(self, chosen: Iterable[RankProcess]) -> None:
        """Returns when these processes are gone for certain, and with them all that they held."""
        processes = [one.process for one in chosen]
        for process in processes:
            process.kill()
        for process in processes:
            process.join(_END_S)
            if process.exitcode is None:
                raise WorkerFailed(f"{process.name} (process {process.pid}) cannot be ended")


def _become(cluster: str, connection: Connection) -> None:
    """In the new process. By name, so that the demo's own does not import torch."""
    importlib.import_module("muster.demos.ranks").serve(cluster, connection)

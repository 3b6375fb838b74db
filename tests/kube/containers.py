"""One container as a local process: its output with times, its end, and everything that it started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from muster.backends.local.processes import MemoryGroup
from tests.kube.guard import kill_marked

_OUTPUT_S = 1.0


@dataclass
class Log:
    """Lines with the time at which they came; kept for as long as the Pod object."""

    lines: list[tuple[str, bytes]] = field(default_factory=list)
    ended: bool = False
    _news: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, line: bytes) -> None:
        self.lines.append((datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f000Z"), line))
        self._wake()

    def end(self) -> None:
        self.ended = True
        self._wake()

    async def news(self) -> None:
        await self._news.wait()

    def _wake(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()


class _Reader(asyncio.Protocol):
    def __init__(self, log: Log) -> None:
        self._log = log
        self._rest = b""
        self.done = asyncio.get_running_loop().create_future()

    def data_received(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            self._log.add(line + b"\n")

    def connection_lost(self, problem: Exception | None) -> None:
        if self._rest:
            self._log.add(self._rest)
        if not self.done.done():
            self.done.set_result(None)


@dataclass(frozen=True)
class End:
    code: int
    oom: bool


class Pretended:
    """No process at all: for thousands of Pods that only have to be there."""

    pid = 0

    def __init__(self) -> None:
        self.killed_for_memory = False
        self._signal = asyncio.get_running_loop().create_future()

    @property
    def alive(self) -> bool:
        return not self._signal.done()

    def signal(self, number: int) -> None:
        if self.alive:
            self._signal.set_result(number)

    async def end(self, log: Log) -> End:
        return End(128 + await self._signal, self.killed_for_memory)


class Container:
    """Started when made; `mark` is in the environment of all that it starts."""

    def __init__(self, argv: tuple[str, ...], env: Mapping[str, str], cwd: Path, mark: str, limit: int = 0) -> None:
        """Raises OSError when it cannot be started."""
        self.mark = mark
        name, _, value = mark.partition("=")
        self._group = MemoryGroup(value) if limit else None
        if self._group and self._group.limit(limit):
            inside = 'echo $$ >"$0"; exec "$@"'
            argv = ("sh", "-c", inside, str(self._group.path / "cgroup.procs"), *argv)
        reading, writing = os.pipe()
        try:
            self._process = subprocess.Popen(
                argv,
                env={**env, name: value},
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=writing,
                stderr=writing,
                start_new_session=True,
            )
        except OSError:
            os.close(reading)
            raise
        finally:
            os.close(writing)
        self.killed_for_memory = False
        self._output = os.fdopen(reading, "rb", 0)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.returncode is None

    def signal(self, number: int) -> None:
        """To the main process alone, as the kubelet does."""
        if self.alive:
            self._process.send_signal(number)

    async def end(self, log: Log) -> End:
        """Reads what it writes until it ends; then nothing of it is left."""
        loop = asyncio.get_running_loop()
        transport, reader = await loop.connect_read_pipe(lambda: _Reader(log), self._output)
        await self._exited(loop)
        oom = self.killed_for_memory or self._ran_out()
        await loop.run_in_executor(None, kill_marked, self.mark)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(reader.done, _OUTPUT_S)
        transport.close()
        if self._group:
            self._group.remove()
        code = self._process.returncode
        return End(128 - code if code < 0 else code, oom)

    async def _exited(self, loop: asyncio.AbstractEventLoop) -> None:
        handle = os.pidfd_open(self.pid)
        ended = asyncio.Event()
        loop.add_reader(handle, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(handle)
            os.close(handle)
        self._process.wait()

    def _ran_out(self) -> bool:
        if self._group is None or self._process.returncode == 0:
            return False
        for name in ("memory.oom_control", "memory.events"):
            with contextlib.suppress(OSError):
                words = (self._group.path / name).read_text().split()
                return int(words[words.index("oom_kill") + 1]) > 0
        return False

"""Checks of incoming packages: few at once, in processes with limits, with turns that are fair between namespaces.

A package is read by its check and by nothing else in the control plane. How many may come and wait is bounded for each
namespace and in total.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

from muster import errors, package_check
from muster.core.training import edits
from muster.types.codec import Problem

log = logging.getLogger("muster.server")

OPEN_OF_NAMESPACE, OPEN_IN_ALL = 4, 32  # packages that come, wait or are checked
WALL_S = 180.0
_LONGEST_ANSWER = 4096
_KEPT_VARIABLES = ("PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "HOME", "LANG", "LC_ALL")


class FairTurns:
    """So many at once. The next turn goes to the namespace that has waited longest since its last one."""

    def __init__(self, at_once: int) -> None:
        self._free = at_once
        self._waiting: OrderedDict[str, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, namespace: str) -> AsyncIterator[None]:
        if self._free:
            self._free -= 1
        else:
            await self._wait(namespace)
        try:
            yield
        finally:
            self._pass_on()

    async def _wait(self, namespace: str) -> None:
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(namespace, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._pass_on()  # it came in the same moment
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            namespace, turns = self._waiting.popitem(last=False)
            waiting = deque(turn for turn in turns if not turn.done())
            if not waiting:
                continue
            waiting.popleft().set_result(None)
            if waiting:
                self._waiting[namespace] = waiting  # behind the other namespaces
            return
        self._free += 1


class PackageChecks:
    def __init__(self, at_once: int | None = None) -> None:
        self._turns = FairTurns(at_once or max(1, min(4, (os.cpu_count() or 1) // 2)))
        self._open: Counter[str] = Counter()

    @contextmanager
    def place(self, namespace: str) -> Iterator[None]:
        """Hold one of the places for packages that come. TooManyRequests if there is none."""
        if self._open[namespace] >= OPEN_OF_NAMESPACE:
            raise errors.TooManyRequests(
                f"{OPEN_OF_NAMESPACE} packages of namespace {namespace!r} are already being sent or checked",
                hint="send this one again in a few seconds",
            )
        if self._open.total() >= OPEN_IN_ALL:
            raise errors.TooManyRequests(
                f"{OPEN_IN_ALL} packages are already being sent or checked", hint="send this one again in a few seconds"
            )
        self._open[namespace] += 1
        try:
            yield
        finally:
            self._open[namespace] -= 1
            if not self._open[namespace]:
                del self._open[namespace]

    async def check(self, namespace: str, file: Path, digest: str) -> None:
        """InvalidRequest says why that file is not that package; Unavailable that it could not be checked."""
        async with self._turns.turn(namespace):
            code, answer = await _run(file, digest)
        if answer.startswith("whole ") and code == 0:
            return
        if answer.startswith("refused ") and code == 0:
            raise _refused(answer.removeprefix("refused "))
        if code == -signal.SIGXCPU:
            raise _refused(f"its check needs more than {package_check.CPU_S} s of a processor")
        log.error("the check of package %s… ended with code %s", digest[:19], code)
        raise errors.Unavailable("the package could not be checked", hint="send it again")


def _refused(reason: str) -> errors.MusterError:
    return edits.refused([Problem("body", f"this package is refused: {reason}")], "the package")


async def _run(file: Path, digest: str) -> tuple[int | None, str]:
    """Return the exit code of a check and its line. The process ends with the caller."""
    command = (sys.executable, "-P", "-m", package_check.__name__, str(file), digest)
    env = {name: os.environ[name] for name in _KEPT_VARIABLES if name in os.environ}
    try:
        process = await asyncio.create_subprocess_exec(
            *command, env=env, cwd="/", stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE
        )
    except OSError as error:
        raise errors.Unavailable(f"packages cannot be checked now: {error.strerror}", hint="send it again") from None
    assert process.stdout is not None
    try:
        async with asyncio.timeout(WALL_S):
            answer = await process.stdout.read(_LONGEST_ANSWER)
            return await process.wait(), answer.decode(errors="replace").rstrip("\n")
    except TimeoutError:
        raise errors.Unavailable(
            f"the package was not checked within {WALL_S:g} s: the machine is busy", hint="send it again"
        ) from None
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()

"""The agent's part in bringing back the control plane of its own machine: looks, and the start itself.

`core.restart` decides. The new control plane is no descendant of the agent that starts it: the agent ends everything
below itself when it leaves.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from muster.core import restart
from muster.core.restart import LostControlPlane
from muster.node import system
from muster.sdk import home as homes
from muster.sdk import launch_record

READY_S = 60.0  # how long other agents leave a start alone
DETACH_S = 10.0
# The process between us and the control plane ends at once, so that the control plane gets another parent.
_DETACH = "import os, sys; os.fork() and os._exit(0); os.setsid(); os.execv(sys.argv[1], sys.argv[1:])"


class PlaneRestart:
    """Starts the control plane of `home` again when it is lost. `is_connected` says whether this agent is served."""

    def __init__(self, home: Path, is_connected: Callable[[], bool], say: Callable[[str], None]) -> None:
        self._home = home
        self._is_connected = is_connected
        self._say = say
        self._lost = asyncio.Event()

    def notice_loss(self) -> None:
        """Look soon; called whenever the connection to the control plane ends or cannot be made."""
        self._lost.set()

    async def run(self) -> None:
        """Serve one loss after the other, forever."""
        while True:
            await self._lost.wait()
            self._lost.clear()
            if not self._is_connected():
                await self._bring_back()

    async def _bring_back(self) -> None:
        """Look until this agent is connected again, or nothing that an agent may do is left."""
        pause_s: float | None = random.uniform(*restart.FIRST_S)
        told = ""
        while pause_s is not None:
            await asyncio.sleep(pause_s)
            if self._is_connected():
                return
            seen = self._look()
            plan = restart.decide(seen)
            if plan.start:
                pause_s = await self._start()
                continue
            if plan.reason != told and not seen.runs:
                self._say(f"the control plane is gone and is not started here: {plan.reason}")
            told, pause_s = plan.reason, plan.look_after_s
            if pause_s is not None:
                pause_s *= random.uniform(1.0, 1.5)

    def _look(self) -> LostControlPlane:
        where = self._home
        count, ago_s = launch_record.starts(where)
        return LostControlPlane(
            homes.is_locked(where), homes.was_stopped(where), launch_record.obstacle(where), count, ago_s
        )

    async def _start(self) -> float:
        """Start it unless another process does; returns when to look again."""
        with _start_lock(self._home) as locked:
            seen = self._look()  # it may have been started, or stopped, since we decided
            if not locked or not restart.decide(seen).start:
                return restart.AGAIN_S
            count = restart.starts_in_a_row(seen) + 1
            try:
                launch_record.note_start(self._home, count)
                ready = await asyncio.to_thread(_spawn, self._home)
            except (OSError, ValueError, subprocess.SubprocessError) as error:
                self._say(f"the control plane is gone and cannot be started again: {error}")
                return restart.PAUSES.after(count)
            self._say(f"the control plane ended without being stopped: started again ({count} in a row)")
            try:
                await _await_line(ready)
            finally:
                os.close(ready)
        return restart.AGAIN_S


@contextlib.contextmanager
def _start_lock(home: Path) -> Iterator[bool]:
    """The lock that every start takes. False if another process has it."""
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        opened = os.open(home / "start.lock", flags, 0o600)
    except OSError:
        yield False
        return
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(opened)


def _spawn(home: Path) -> int:
    """Start the control plane as it was started before; returns the descriptor on which it reports that it serves."""
    record = launch_record.read(home)
    ready, report = os.pipe()
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        with open(os.open(home / "daemon.log", flags, 0o600), "ab") as log, system.orphans_go_to_init():
            subprocess.run(
                [sys.executable, "-I", "-S", "-c", _DETACH, *record.argv, "--ready-fd", str(report)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=(report,),
                start_new_session=True,
                cwd=record.cwd,
                env=record.env,
                timeout=DETACH_S,
                check=True,
            )
    except BaseException:
        os.close(ready)
        raise
    finally:
        os.close(report)
    return ready


async def _await_line(ready: int) -> None:
    """Wait until it serves or has ended, which closes the pipe."""
    loop = asyncio.get_running_loop()
    said = asyncio.Event()
    loop.add_reader(ready, said.set)
    try:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READY_S):
                await said.wait()
    finally:
        loop.remove_reader(ready)

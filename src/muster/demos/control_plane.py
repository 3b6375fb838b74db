"""Where is the demo's pool? In a control plane of its own, which begins and ends with the demo.

It has a home of its own, and GPUs that are only numbers. `keeper` stands between it and the demo.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

from muster.backends.local import processes
from muster.demos import keeper
from muster.errors import MusterError
from muster.sdk import home as homes

_START_S = 60.0
_END_S = 20.0
_LAST_LINES = 10


class ControlPlaneGone(MusterError):
    """Nobody plans any more."""

    code = "control_plane_gone"


class ControlPlane:
    """Begun at once, so that it starts while other things are made ready; it serves when `serving` returns."""

    def __init__(self, folder: Path, gpus: int) -> None:
        self._folder, self._home = folder, folder / "home"
        self._ready, ready = os.pipe()
        env = {name: value for name, value in os.environ.items() if not name.startswith("MUSTER_")}
        try:
            self._keeper = subprocess.Popen(
                [sys.executable, "-m", keeper.__name__, str(self._home), str(ready)],
                stdin=subprocess.PIPE,
                env={**env, "MUSTER_GPUS": str(gpus)},
                pass_fds=(ready,),
                start_new_session=True,  # an interrupt at the terminal is for the demo alone
            )
        finally:
            os.close(ready)

    @property
    def pid(self) -> int:
        """Of the process above all that this starts."""
        return self._keeper.pid

    async def serving(self) -> tuple[str, str]:
        """Where it is, and the token that it wants."""
        heard = asyncio.Event()
        asyncio.get_running_loop().add_reader(self._ready, heard.set)
        try:
            async with asyncio.timeout(_START_S):
                await heard.wait()
        except TimeoutError:
            raise ControlPlaneGone(f"the control plane does not serve after {_START_S:g} s") from None
        finally:
            asyncio.get_running_loop().remove_reader(self._ready)
        url, token = os.read(self._ready, 4096).decode().strip(), homes.token(self._home)
        if not url or token is None:
            raise ControlPlaneGone(f"the control plane did not start: {self._last_words()}")
        return url, token

    async def gone(self) -> None:
        """Returns when it is."""
        end = os.pidfd_open(self.pid)
        ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(end, ended.set)
        try:
            await ended.wait()
        finally:
            asyncio.get_running_loop().remove_reader(end)
            os.close(end)

    def close(self) -> None:
        """Nothing of it is left after this."""
        os.close(self._ready)
        assert self._keeper.stdin is not None
        self._keeper.stdin.close()
        try:
            self._keeper.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()
        self._end_workers()

    def _end_workers(self) -> None:
        """There are some only if the keeper was killed. What is below them ends with them."""
        for run, name in processes.agents(self._home / "coordinator.addr"):
            if (pid := processes.find("--run-id", run, "--name", name)) is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _last_words(self) -> str:
        try:
            lines = (self._folder / keeper.LOG).read_text(errors="replace").splitlines()
        except OSError:
            lines = []
        return "\n".join(lines[-_LAST_LINES:]) or "it said nothing"

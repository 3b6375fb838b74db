"""`python -m muster.coordinator`: a coordinator that serves any number of runs. Also `muster coordinator`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import os
import queue
import select
import shlex
import socket
import sys
import threading
import time
from pathlib import Path

from muster import files, run_token
from muster.run_token import KeptToken
from muster.types.run_event import RunEvent
from muster.types.world import MemberId, RunId
from muster.world import wire
from muster.world.service import Coordinator, default_state_path, serve
from muster.world.statefile import StateFile, StateFileBusy

UNREAD_LINES = 1000  # what may wait for a reader; later lines are lost
FINISH_S = 1.0


def run(
    listen: str,
    *,
    state: Path | None = None,
    idle_s: float | None = None,
    outcome_ttl_s: float = 600.0,
    leave_when_ended: bool = False,
    ready_fd: int | None = None,
    quiet: bool = False,
    keep_token: bool = False,
    beside: str | None = None,
) -> int:
    """Serve until stopped; returns an exit code. One clear line on bad input."""
    starter = os.getppid()
    try:
        host, port = wire.parse_address(listen)
    except ValueError as error:
        return _refuse(str(error), 2)
    try:
        path = state or (default_state_path(files.home(), host, port) if port else None)
        kept = StateFile(path, keep_s=outcome_ttl_s) if path else None
    except StateFileBusy as error:
        return _refuse(f"{error}; join that one, or choose another --listen", 1)
    except OSError as error:
        return _refuse(f"cannot keep a state file: {error}; set MUSTER_HOME or --state", 1)
    output = _Output()
    try:
        access = _Access(host, port, keep=keep_token)
    except OSError as error:
        if kept is not None:
            kept.close(remove=False)
        return _refuse(f"cannot keep the run token: {error}; set MUSTER_HOME or {run_token.VARIABLE}", 1)

    def tell(run_id: RunId, line: RunEvent) -> None:
        if not quiet:
            output.say(f"{time.strftime('%H:%M:%S')} {run_id} {line.kind}: {line.text}")

    def ready(host: str, port: int) -> None:
        address = wire.show_address(host, port)
        for line in access.listens(host, port):
            output.say(f"muster coordinator: {line}", 2)
        if ready_fd is not None:
            os.write(ready_fd, f"{address}\n".encode())
            os.close(ready_fd)
            _close_stderr_after(starter)
        if not quiet:
            output.say(f"coordinator listens on {address}")

    coordinator = Coordinator(
        token=access.token,
        state=kept,
        outcome_ttl_s=outcome_ttl_s,
        on_event=tell,
        beside=MemberId(beside) if beside else None,
    )
    try:
        idle = asyncio.run(
            serve(coordinator, host, port, idle_s=idle_s, leave_when_ended=leave_when_ended, on_ready=ready)
        )
    except OSError as error:
        access.ended(for_good=True)
        if kept is not None:
            kept.close(remove=False)
        if ready_fd is not None and error.errno == errno.EADDRINUSE:
            # The process that started this one may use the coordinator that listens there.
            os.write(ready_fd, f"{wire.ADDRESS_TAKEN}\n".encode())
            return 1
        return _refuse(f"cannot listen on {listen}: {error.strerror or error}; choose another --listen", 1)
    over = idle and not coordinator.posts.follows  # else it has to be known when it is started again that others lead
    access.ended(for_good=over or not port)
    if kept is not None:
        kept.close(remove=over)
    output.finish()
    return 0


class _Access:
    """The token that all have to know, and the file in which this user's other processes find it.

    A token that was given is kept nowhere, unless whoever started us has just made it (`keep`): that one knows it, so
    a home that cannot be written is no reason to end.
    """

    def __init__(self, host: str, port: int, *, keep: bool) -> None:
        self._host, self._home = host, files.home()
        given = run_token.given()
        self._keeps = keep or given is None
        self._file: KeptToken | None = None
        self._said: list[str] = []
        try:
            if self._keeps:
                files.private_folder(self._home / "coordinators")
                self._file = KeptToken(self._home, host, port, given) if port else None
        except OSError as error:
            if given is None:
                raise
            self._keeps = False
            self._said.append(f"cannot keep the run token for others to find: {error}; set MUSTER_HOME")
        self.token = given or (self._file.token if self._file is not None else run_token.new())

    def listens(self, host: str, port: int) -> list[str]:
        """Nobody else has the address now. Returns what has to be said to a person."""
        if self._keeps:
            self._file = self._file or KeptToken(self._home, host, port, self.token)
            self._file.listens()
            if not wire.is_loopback(host):
                command = f"ssh {socket.gethostname()} cat {_quoted(str(self._file.path))}"
                self._said.append(f"on other machines: export {run_token.VARIABLE}=$({command})")
        run_token.clear_others(self._home, self._host, port, but=self._file.path if self._file is not None else None)
        return self._said

    def ended(self, *, for_good: bool) -> None:
        if self._file is not None:
            self._file.close(remove=for_good)


def _quoted(path: str) -> str:
    """For the shell of another machine, by way of this one."""
    once = shlex.quote(path)
    return path if once == path else shlex.quote(once)


class _Output:
    """Lines for whoever reads our output. One that reads slowly, or is gone, is no reason to stand still."""

    def __init__(self) -> None:
        self._lines: queue.Queue[tuple[int, str]] = queue.Queue(UNREAD_LINES)
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()

    def say(self, line: str, where: int = 1) -> None:
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait((where, line))

    def _write(self) -> None:
        while (told := self._lines.get())[1]:
            try:
                os.write(told[0], f"{told[1]}\n".encode())
            except OSError:
                continue  # closed, or no room where it goes: later lines may get through

    def finish(self) -> None:
        self.say("")
        self._writer.join(FINISH_S)


def _close_stderr_after(pid: int) -> None:
    """Close stderr when that process ends. A pipe to another program stays open otherwise, and its reader waits."""
    try:
        process = os.pidfd_open(pid)
    except OSError:
        return

    def wait() -> None:
        select.select([process], [], [])
        os.close(process)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)

    threading.Thread(target=wait, name="stderr", daemon=True).start()


def _refuse(message: str, code: int) -> int:
    print(f"muster coordinator: {message}", file=sys.stderr)
    return code


def main() -> int:
    parser = argparse.ArgumentParser(prog="muster coordinator", description=__doc__)
    parser.add_argument("--listen", default="127.0.0.1:29400", metavar="HOST:PORT")
    parser.add_argument("--state", type=Path, default=None)
    parser.add_argument("--idle-s", type=float, default=None)
    parser.add_argument("--outcome-ttl-s", type=float, default=600.0)
    parser.add_argument("--ready-fd", type=int, default=None)
    parser.add_argument("--leave-when-ended", action="store_true")
    parser.add_argument("--keep-token", action="store_true", help="let others of this user find MUSTER_RUN_TOKEN")
    parser.add_argument("--beside", metavar="MEMBER", help="a member that is lost with this process")
    given = parser.parse_args()
    return run(
        given.listen,
        state=given.state,
        idle_s=given.idle_s,
        outcome_ttl_s=given.outcome_ttl_s,
        leave_when_ended=given.leave_when_ended,
        ready_fd=given.ready_fd,
        quiet=given.ready_fd is not None,
        keep_token=given.keep_token,
        beside=given.beside,
    )


if __name__ == "__main__":
    sys.exit(main())

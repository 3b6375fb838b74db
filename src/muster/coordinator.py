"""`python -m muster.coordinator`: a coordinator that serves any number of runs. Also `muster coordinator`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import queue
import sys
import threading
import time
from pathlib import Path

from muster import files
from muster.types.run_event import RunEvent
from muster.types.world import RunId
from muster.world import wire
from muster.world.service import Coordinator, check_listen, default_state_path, serve
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
) -> int:
    """Serve until stopped; returns an exit code. One clear line on bad input."""
    token = os.environ.get("MUSTER_RUN_TOKEN") or None
    try:
        host, port = wire.parse_address(listen)
        check_listen(host, token)
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

    def tell(run_id: RunId, line: RunEvent) -> None:
        if not quiet:
            output.say(f"{time.strftime('%H:%M:%S')} {run_id} {line.kind}: {line.text}")

    def ready(host: str, port: int) -> None:
        address = wire.show_address(host, port)
        if ready_fd is not None:
            os.write(ready_fd, f"{address}\n".encode())
            os.close(ready_fd)
        if not quiet:
            output.say(f"coordinator listens on {address}")

    coordinator = Coordinator(token=token, state=kept, outcome_ttl_s=outcome_ttl_s, on_event=tell)
    try:
        idle = asyncio.run(
            serve(coordinator, host, port, idle_s=idle_s, leave_when_ended=leave_when_ended, on_ready=ready)
        )
    except OSError as error:
        if kept is not None:
            kept.close(remove=False)
        return _refuse(f"cannot listen on {listen}: {error.strerror or error}; choose another --listen", 1)
    if kept is not None:
        kept.close(remove=idle)
    output.finish()
    return 0


class _Output:
    """Lines for whoever reads our standard output. One that reads slowly, or is gone, is no reason to stand still."""

    def __init__(self) -> None:
        self._lines: queue.Queue[str] = queue.Queue(UNREAD_LINES)
        self._writer = threading.Thread(target=self._write, daemon=True)
        self._writer.start()

    def say(self, line: str) -> None:
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(line)

    def _write(self) -> None:
        while line := self._lines.get():
            try:
                os.write(1, f"{line}\n".encode())
            except OSError:
                continue  # closed, or no room where it goes: later lines may get through

    def finish(self) -> None:
        self.say("")
        self._writer.join(FINISH_S)


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
    given = parser.parse_args()
    return run(
        given.listen,
        state=given.state,
        idle_s=given.idle_s,
        outcome_ttl_s=given.outcome_ttl_s,
        leave_when_ended=given.leave_when_ended,
        ready_fd=given.ready_fd,
        quiet=given.ready_fd is not None,
    )


if __name__ == "__main__":
    sys.exit(main())

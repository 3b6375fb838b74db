"""The guard of a torchrun node: its ranks are torchrun's children, so they are known by a mark in their environment.

Runs as `python -m muster.node.torchrun_guard CONTROL_FD MEMBER_ID`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from muster.node import guard

MARK = "MUSTER_MEMBER"
LOOK_S = 0.01  # processes that are not our children end without telling us


def bearers(member_id: str) -> list[int]:
    """Processes that carry the mark of this member, zombies not counted."""
    mark = f"{MARK}={member_id}".encode()
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit() or int(entry) == os.getpid():
            continue
        try:
            with open(f"/proc/{entry}/environ", "rb") as file:
                environ = file.read()
        except OSError:
            continue
        if mark in environ.split(b"\0"):
            found.append(int(entry))
    return found


async def clear(member_id: str) -> None:
    """Kill them until none is left."""
    while pids := bearers(member_id):
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        await asyncio.sleep(LOOK_S)


async def _main(control_fd: int, member_id: str) -> None:
    await guard.stand(control_fd, lambda: clear(member_id))


if __name__ == "__main__":
    asyncio.run(_main(int(sys.argv[1]), sys.argv[2]))

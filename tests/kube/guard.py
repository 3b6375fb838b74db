"""Which processes carry a mark in their environment, and how do they all go once the test process is gone?

Started as a program it waits until its stdin ends, which also happens when the test process is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time


def marked(mark: str) -> list[int]:
    """Processes with this `NAME=VALUE` in their environment, this one excepted."""
    wanted = b"\0" + mark.encode() + b"\0"
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) != os.getpid():
            with contextlib.suppress(OSError), open(f"/proc/{entry}/environ", "rb") as file:
                if wanted in b"\0" + file.read() + b"\0":
                    found.append(int(entry))
    return found


def signal_marked(mark: str, number: int) -> int:
    """Returns how many there were."""
    pids = marked(mark)
    for pid in pids:
        with contextlib.suppress(OSError):
            os.kill(pid, number)
    return len(pids)


def kill_marked(mark: str, timeout_s: float = 10.0) -> bool:
    """Until none is left: one of them may start another meanwhile. False when some would not go."""
    deadline = time.monotonic() + timeout_s
    while signal_marked(mark, signal.SIGKILL):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


class Guard:
    """Ends all that carry the mark when this process ends, however it ends."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, mark], stdin=subprocess.PIPE, start_new_session=True
        )

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(20)


if __name__ == "__main__":
    sys.stdin.buffer.read()
    sys.exit(0 if kill_marked(sys.argv[1]) else 1)

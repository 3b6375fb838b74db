"""A command of which nothing is left, whenever it is told to end."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from tests.fleet import Fleet, eventually


def test_told_to_end_while_its_command_starts_it_leaves_nothing(fleet: Fleet) -> None:
    for _ in range(5):
        words = ("-m", "muster.node.contained", str(os.getpid()), "/bin/sh", "-c", "sleep 600; true")
        below = fleet.start(sys.executable, *words)
        started = Path(f"/proc/{below.pid}/task/{below.pid}/children")
        eventually(started.read_text, "its command is being started")
        below.kill(signal.SIGTERM)
        assert below.wait(10) == 143
        fleet.assert_nothing_left()

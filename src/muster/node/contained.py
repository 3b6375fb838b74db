"""Runs a command of which nothing is left when it ends, is told to end, or its parent dies.

Runs as `python -m muster.node.contained PARENT_PID COMMAND …` and exits as the command does.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time

from muster.node import system
from muster.node.warm import LOOK_S


def main() -> int:
    parent = int(sys.argv[1])
    system.adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    system.die_with_parent(parent, signal.SIGTERM)
    try:
        code = subprocess.Popen(sys.argv[2:]).wait()
    finally:  # also if it was told while the command was being started
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # told once is enough
        while system.reap()[1]:
            system.kill_children()
            time.sleep(LOOK_S)
    return 128 - code if code < 0 else code


if __name__ == "__main__":
    sys.exit(main())

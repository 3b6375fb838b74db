"""How can nothing outlive the demo, though the workers of a control plane are made to outlive it?

usage: python -m muster.demos.keeper HOME READY_FD    standard input: open for as long as the demo lives

A process between the two. It starts the control plane, and all that is orphaned below it becomes its child. When the
demo hangs up, or is killed, or the control plane ends, it kills everything below itself. Then it removes what the demo
left on the disk, if the demo cannot do that any more.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

from muster.node import system

LOG = "daemon.log"
_LOOK_S = 0.01


def keep(home: Path, ready: int) -> int:
    system.adopt_orphans()
    demo, me = os.getppid(), os.getpid()
    with open(home.parent / LOG, "ab") as log:
        daemon = subprocess.Popen(
            [sys.executable, "-m", "muster.daemon", "--home", str(home), "--ready-fd", str(ready)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(ready,),
            preexec_fn=lambda: system.die_with_parent(me),
        )
    os.close(ready)
    ended = os.pidfd_open(daemon.pid)
    select.select([sys.stdin, ended], [], [])
    daemon.send_signal(signal.SIGKILL)  # first, or it would start anew what is killed
    while system.reap()[1]:
        system.kill_children()
        time.sleep(_LOOK_S)
    if os.getppid() != demo:
        shutil.rmtree(home.parent, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(keep(Path(sys.argv[1]), int(sys.argv[2])))

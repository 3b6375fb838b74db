"""How does a warm parent begin, and begin anew in the same process when an import has left what ranks must not have?"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from typing import NamedTuple, NoReturn

from muster.node import system
from muster.node.program import Program

_LOOK_S = 0.003


def write_plan(program: Program) -> int:
    """A file for a warm parent to read what its ranks will run."""
    plan = os.memfd_create("muster-plan")
    os.write(plan, json.dumps(program._asdict()).encode())
    os.lseek(plan, 0, os.SEEK_SET)
    return plan


class Beginning(NamedTuple):
    """How this process found itself."""

    descriptors: set[int]
    environment: dict[str, str]
    folder: str
    umask: int
    blocked: set[int]
    ignored: set[int]

    @classmethod
    def now(cls) -> Beginning:
        os.umask(umask := os.umask(0o077))
        blocked = set(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        return cls(_descriptors(), dict(os.environ), os.getcwd(), umask, blocked, _ignored())

    def again(self, program: Program, control_fd: int) -> NoReturn:
        """Threads end with their program; whatever else an import may have left is ended here."""
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked | system.ASK_TO_END)
        while system.reap()[1]:
            system.kill_children()
            time.sleep(_LOOK_S)
        for number in _ignored() - self.ignored:
            signal.signal(number, signal.SIG_DFL)
        os.chdir(self.folder)
        os.umask(self.umask)
        for left in _descriptors() - self.descriptors:
            os.set_inheritable(left, False)
        plan = write_plan(program)
        os.set_inheritable(plan, True)
        os.set_inheritable(control_fd, True)
        given = sys.orig_argv.index("-m") + 2  # behind which: control, plan, guard, room
        command = [*sys.orig_argv[:given], sys.argv[1], str(plan), *sys.argv[3:]]
        os.execve(sys.executable, command, self.environment)


def _descriptors() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the listing itself
            os.fstat(int(name))
            found.add(int(name))
    return found


def _ignored() -> set[int]:
    return {number for number in signal.valid_signals() if signal.getsignal(number) is signal.SIG_IGN}

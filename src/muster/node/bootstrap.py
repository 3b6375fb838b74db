"""Starts the warm parent, then becomes its guard.

In this order, and with as few imports as can be, because the parent's import of torch is what everyone waits for.
Runs as `python -m muster.node.bootstrap CONTROL_FD HIRE_FD WARM_FD PLAN_FD ROOM`.
"""

import os
import sys


def main() -> None:
    control_fd, hire_fd, warm_fd, plan_fd, room = (int(argument) for argument in sys.argv[1:6])
    for own in (control_fd, hire_fd):
        os.set_inheritable(own, False)
    warm_pid = start_parent(warm_fd, plan_fd, room)

    from muster.node import guard

    guard.main(control_fd, hire_fd, warm_pid)


def start_parent(warm_fd: int, plan_fd: int, room: int) -> int:
    """A child of this process. The two descriptors are its own then."""
    interpreter = sys.orig_argv[1 : sys.orig_argv.index("-m")]
    given = [str(warm_fd), str(plan_fd), str(os.getpid()), "." * room]
    command = [sys.executable, *interpreter, "-m", "muster.node.warm", *given]
    pid = os.fork()  # not posix_spawn, which leaves signals ignored that ranks would inherit
    if pid == 0:
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            for fd in (warm_fd, plan_fd):
                os.set_inheritable(fd, True)
            os.execv(sys.executable, command)
        finally:
            os._exit(127)
    os.close(warm_fd)
    os.close(plan_fd)
    return pid


if __name__ == "__main__":
    main()

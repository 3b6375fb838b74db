"""Starts the warm parent, then becomes its guard.

In this order, and with as few imports as can be, because the parent's import of torch is what everyone waits for.
Runs as `python -m muster.node.bootstrap CONTROL_FD WARM_FD PLAN_FD ROOM`.
"""

import os
import sys


def main() -> None:
    control_fd, warm_fd, plan_fd, room = (int(argument) for argument in sys.argv[1:5])
    interpreter = sys.orig_argv[: sys.orig_argv.index("-m")]
    arguments = [str(warm_fd), str(plan_fd), str(os.getpid()), "." * room]  # this process will be its parent
    command = [sys.executable, *interpreter[1:], "-m", "muster.node.warm", *arguments]
    os.set_inheritable(control_fd, False)
    warm_pid = os.fork()  # not posix_spawn, which leaves signals ignored that ranks would inherit
    if warm_pid == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        os.execv(sys.executable, command)
    os.close(warm_fd)
    os.close(plan_fd)

    from muster.node import guard

    guard.main(control_fd, warm_pid)


if __name__ == "__main__":
    main()

"""Where do worker processes come from? One parent imports torch once, and forks each worker ready to go.

Started as `python -m muster.sharing.demo.nursery FD`. It forks on order, reaps what ends and says so. When the demo
hangs up, it ends every worker that is left and then itself.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import select
import signal
import socket
import sys
import time
import warnings
from multiprocessing.connection import Connection
from typing import NoReturn

import torch

from muster.sharing.demo import policy as policies
from muster.sharing.demo import workers
from muster.sharing.demo.tasks import LENGTH
from muster.sharing.demo.wire import Ended, Fork, Forked, FromParent, Kill, Warm

_MOST_BYTES = 65536
_GRACE_S = 2.0  # for workers that are about to see that their socket is closed


def main() -> None:
    control = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the demo decides what an interrupt means
    _warm_up()
    Nursery(control).serve()


def _warm_up() -> None:
    """Everything that the first use of torch would set up, except for threads, which a fork does not copy."""
    torch.set_num_threads(1)
    policy = policies.Policy()
    for _ in policies.speak(policy, (0,) * LENGTH, count=1, seed=0):
        pass
    del policy
    gc.collect()
    gc.freeze()  # a worker's collections neither touch nor copy what is shared


class Nursery:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._children: set[int] = set()
        self._wake_r, self._wake_w = os.pipe()
        os.set_blocking(self._wake_w, False)
        os.set_blocking(self._wake_r, False)
        signal.set_wakeup_fd(self._wake_w)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        self._tell(Warm())
        while True:
            ready, _, _ = select.select([self._control.fileno(), self._wake_r], [], [])
            if self._wake_r in ready:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_r, _MOST_BYTES)
                self._reap()
            if self._control.fileno() in ready and not self._follow():
                return self._leave()

    def _follow(self) -> bool:
        """Carry out one order; False when the demo has hung up."""
        try:
            data, fds, _, _ = socket.recv_fds(self._control, _MOST_BYTES, 1)
        except ConnectionError:
            return False
        if not data:
            return False
        match pickle.loads(data):
            case Fork() as order:
                self._fork(order, fds[0])
            case Kill(pid) if pid in self._children:
                os.kill(pid, signal.SIGKILL)
        return True

    def _fork(self, order: Fork, fd: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads of BLAS, which see to themselves
            pid = os.fork()
        if pid == 0:
            self._become(order, fd)
        os.close(fd)
        self._children.add(pid)
        self._tell(Forked(order.name, pid))

    def _become(self, order: Fork, fd: int) -> NoReturn:
        """In the child. Leaves without the parent's clean-up, which is not its own."""
        status = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._control.close()
            workers.serve(order.role, Connection(fd))
            status = 0
        finally:
            if status:
                sys.excepthook(*sys.exc_info())
            os._exit(status)

    def _reap(self) -> None:
        for pid in list(self._children):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                self._children.discard(pid)
                self._tell(Ended(pid, os.waitstatus_to_exitcode(status)))

    def _leave(self) -> None:
        until = time.monotonic() + _GRACE_S
        while self._children and (left := until - time.monotonic()) > 0:
            select.select([self._wake_r], [], [], left)
            with contextlib.suppress(BlockingIOError):
                os.read(self._wake_r, _MOST_BYTES)
            self._reap()
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)

    def _tell(self, message: FromParent) -> None:
        with contextlib.suppress(ConnectionError):  # it has hung up, which `serve` sees as well
            self._control.send(pickle.dumps(message))


if __name__ == "__main__":
    main()

"""Which addresses can Pods of a test have? A network of the test's own, where a whole range is local.

The API server takes no 127.0.0.0/8 in Endpoints, so that loopback alone would not do.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import socket
import subprocess

_RANGE = "10.77.0.0/16"
_CLONE_NEWNET = 0x40000000
_numbers = itertools.count(1)


def isolate() -> None:
    """Moves this thread, and all threads and processes that it starts from now on, into a network with loopback only.

    Raises OSError without the right to do so; `unshare -rn` around the test run is another way to give it.
    """
    if _bindable("10.77.0.1"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if not _alone() and libc.unshare(_CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "no network of its own for the tests: run them as root, or by unshare -rn")
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    subprocess.run(["ip", "route", "add", "local", _RANGE, "dev", "lo"], check=True)


def new_address() -> str:
    """One that no other Pod of these tests has; on 127.0.0.0/8 when the network is shared."""
    number = next(_numbers)
    own = f"10.77.{number // 250 % 250}.{number % 250 + 1}"
    return own if _bindable(own) else f"127.{20 + os.getpid() % 200}.{number // 250 % 250}.{number % 250 + 1}"


def _alone() -> bool:
    """Nothing but loopback here: somebody has made a network for us already."""
    return [name for _, name in socket.if_nameindex()] == ["lo"]


def _bindable(address: str) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True

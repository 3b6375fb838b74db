"""Is the other end of a connection on this machine, and which socket listens there?

Where both ends have the same address the kernel itself connected them, and it can be asked. Where two sockets cannot
listen at once, a socket that is not the coordinator's is proof that the coordinator does not listen there any more.
"""

from __future__ import annotations

import contextlib
import ipaddress
from typing import Any

from muster import sockets
from muster.core.member.verdict import Listener
from muster.sockets import End


def end(name: tuple[Any, ...] | None) -> End | None:
    return sockets.end(name) if name else None


def on_this_machine(here: End | None, there: End | None) -> bool:
    if here is None or there is None:
        return False
    with contextlib.suppress(ValueError):
        return here[0] == there[0] or ipaddress.ip_address(there[0]).is_loopback
    return False


def listener_at(place: End) -> Listener | None:
    """Who listens there, on this machine; None if nobody does. OSError: it cannot be known."""
    found = sockets.find(place)
    return None if found is None else Listener(*found)

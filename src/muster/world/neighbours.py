"""Is the other end of a connection on this machine, and which socket listens there?

Where both ends have the same address the kernel itself connected them, and it can be asked. Where two sockets cannot
listen at once, a socket that is not the coordinator's is proof that the coordinator does not listen there any more.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import struct
from typing import Any

from muster.core.member.verdict import Listener

End = tuple[str, int]  # host and port

# From <linux/netlink.h>, <linux/sock_diag.h> and <linux/inet_diag.h>.
_SOCK_DIAG, _BY_FAMILY, _REQUEST, _ERROR = 4, 20, 1, 2
_HEAD, _KIND, _PORTS, _OWNER = (struct.Struct(form) for form in ("=IHHII", "=BBBBI", ">HH", "=II"))
_ANY_STATE, _LISTENS, _ANY_DEVICE_AND_COOKIE = 0xFFFFFFFF, 10, bytes(4) + b"\xff" * 8
_STATE_AT, _PORTS_AT, _OWNER_AT = 17, 20, 80


def end(name: tuple[Any, ...] | None) -> End | None:
    """A socket's name, without the scope that IPv6 adds, and as IPv4 where it is that."""
    if not name:
        return None
    try:
        address = ipaddress.ip_address(str(name[0]).partition("%")[0])
    except ValueError:
        return str(name[0]), int(name[1])
    return str(getattr(address, "ipv4_mapped", None) or address), int(name[1])


def on_this_machine(here: End | None, there: End | None) -> bool:
    if here is None or there is None:
        return False
    with contextlib.suppress(ValueError):
        return here[0] == there[0] or ipaddress.ip_address(there[0]).is_loopback
    return False


def listener_at(place: End) -> Listener | None:
    """Who listens there, on this machine; None if nobody does. OSError: it cannot be known."""
    family = socket.AF_INET6 if ":" in place[0] else socket.AF_INET
    ports = _PORTS.pack(place[1], 0)
    ends = ports + socket.inet_pton(family, place[0]).ljust(32, b"\0") + _ANY_DEVICE_AND_COOKIE
    question = _KIND.pack(family, socket.IPPROTO_TCP, 0, 0, _ANY_STATE) + ends
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG) as kernel:
        kernel.setblocking(False)  # it answers while it is asked
        kernel.connect((0, 0))  # so that nobody else can answer
        kernel.send(_HEAD.pack(_HEAD.size + len(question), _BY_FAMILY, _REQUEST, 1, 0) + question)
        answer = kernel.recv(4096)
    if _HEAD.unpack_from(answer)[1] == _ERROR:
        code = -struct.unpack_from("=i", answer, _HEAD.size)[0]
        if code == errno.ENOENT:
            return None
        raise OSError(code, "the kernel does not tell who listens")
    is_it = answer[_STATE_AT] == _LISTENS and answer[_PORTS_AT : _PORTS_AT + 2] == ports[:2]
    return Listener(*_OWNER.unpack_from(answer, _OWNER_AT)) if is_it else None

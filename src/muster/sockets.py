"""Which socket has these ends, and whose is it? The kernel of this machine is asked. Standard library only."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import struct
from typing import Any, NamedTuple

# From <linux/netlink.h>, <linux/sock_diag.h> and <linux/inet_diag.h>.
_SOCK_DIAG, _BY_FAMILY, _REQUEST, _ERROR = 4, 20, 1, 2
_HEAD, _KIND, _PORTS, _OWNER = (struct.Struct(form) for form in ("=IHHII", "=BBBBI", ">HH", "=II"))
_ANY_STATE, _ANY_DEVICE_AND_COOKIE = 0xFFFFFFFF, bytes(4) + b"\xff" * 8
_STATE_AT, _PORTS_AT, _OWNER_AT = 17, 20, 80
LISTENS = 10  # a state of TCP

End = tuple[str, int]  # host and port


class FoundSocket(NamedTuple):
    uid: int
    inode: int  # 0 until it is accepted


def end(name: tuple[Any, ...]) -> End:
    """A socket's name, without the scope that IPv6 adds, and as IPv4 where it is that."""
    try:
        address = ipaddress.ip_address(str(name[0]).partition("%")[0])
    except ValueError:
        return str(name[0]), int(name[1])
    return str(getattr(address, "ipv4_mapped", None) or address), int(name[1])


def family_of(place: End) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in place[0] else socket.AF_INET


def find(local: End, remote: End | None = None) -> FoundSocket | None:
    """In microseconds, whatever else is open. Without `remote` the one that listens; OSError: it cannot be known."""
    family = family_of(local)
    ports = _PORTS.pack(local[1], remote[1] if remote else 0)
    hosts = [socket.inet_pton(family, one[0]) if one else b"" for one in (local, remote)]
    ends = ports + b"".join(host.ljust(16, b"\0") for host in hosts) + _ANY_DEVICE_AND_COOKIE
    question = _KIND.pack(family, socket.IPPROTO_TCP, 0, 0, _ANY_STATE) + ends
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _SOCK_DIAG) as kernel:
        kernel.setblocking(False)  # it answers while it is asked
        kernel.connect((0, 0))  # so that nobody but the kernel can answer
        kernel.send(_HEAD.pack(_HEAD.size + len(question), _BY_FAMILY, _REQUEST, 1, 0) + question)
        answer = kernel.recv(4096)
    if _HEAD.unpack_from(answer)[1] == _ERROR:
        code = -struct.unpack_from("=i", answer, _HEAD.size)[0]
        if code == errno.ENOENT:
            return None
        raise OSError(code, os.strerror(code))
    same = answer[_PORTS_AT : _PORTS_AT + len(ports)] == ports  # else it is the listener that was not asked for
    listens = answer[_STATE_AT] == LISTENS
    return FoundSocket(*_OWNER.unpack_from(answer, _OWNER_AT)) if same and (remote is not None or listens) else None

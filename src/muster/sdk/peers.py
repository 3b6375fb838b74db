"""Whose process is at the other end of a connection, and may it be sent a token?

Plain HTTP proves nothing: when a control plane is gone, any user of the machine can take its port and wait for the
tokens of its clients. The kernel knows whose the other end of a connection within this machine is. It is asked about
every connection, before anything is sent on it; a connection that is open stays with whom it was made.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import pwd
import socket
import sys
from collections.abc import Callable
from pathlib import Path

from muster import sockets
from muster.sockets import End, FoundSocket

_NET = Path("/proc/net")
_UNKNOWN_USERS = 65534  # stands for all users that our user namespace does not have


class Unproved(Exception):
    """Nobody has proved that our user or root serves there."""

    hint = "muster server status shows where yours is; others need https, or MUSTER_INSECURE=1 if you trust them"


_Look = Callable[[End, End | None], FoundSocket | None]


def check(connection: socket.socket) -> None:
    """Raise Unproved unless the other end is ours or root's; root could read our token anyway."""
    try:
        host, port = sockets.end(connection.getpeername())
        owner = owner_of(connection)
    except OSError as error:
        raise Unproved(f"whose server it is cannot be known ({error}): nothing was sent") from error
    at = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    if owner is None:
        local = ipaddress.ip_address(host).is_loopback
        why = "it cannot be seen whose that is" if local else "plain http from another machine proves nothing"
        raise Unproved(f"{at} has not proved whose server it is, so nothing was sent: {why}")
    if not _is_trusted(owner):
        raise Unproved(f"{at} is served by user {_name_of(owner)}, not by yours: nothing was sent")


def owner_of(connection: socket.socket) -> int | None:
    """The user whose socket is the other end; None if this machine has no such socket."""
    here, there = sockets.end(connection.getsockname()), sockets.end(connection.getpeername())
    with contextlib.suppress(OSError):
        found = _owner(sockets.find, here, there)
        if found is not None or sockets.find(here, there) is not None:
            return found
    return _owner(_by_proc_net, here, there)  # a kernel that does not even find our own end


def _owner(look: _Look, here: End, there: End) -> int | None:
    """Until it is accepted a connection seems to be root's; it is the listener's.

    A listener that is closed takes with it what it has not accepted, and while it is open nobody else can listen
    there. So the listener found is the connection's own if that was not accepted before, and still is not after.
    """
    found = look(there, here)
    if found is None or found.inode:
        return found and found.uid
    listener, found = look(there, None), look(there, here)
    if found is None or found.inode:
        return found and found.uid
    return listener and listener.uid


def _is_trusted(uid: int) -> bool:
    if uid == _UNKNOWN_USERS and Path("/proc/self/uid_map").read_text().split() != ["0", "0", "4294967295"]:
        return False  # whoever it is: we may be called so, too
    return uid in (0, os.geteuid())


def _name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _by_proc_net(local: End, remote: End | None) -> FoundSocket | None:
    """From the list of all sockets, if netlink does not answer. Where several listen on a port, it is nobody's."""
    hosts = {_canonical(local[0])} | (set() if remote else {_canonical("0.0.0.0"), _canonical("::")})
    found = set()
    for name in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):
            for row in (_NET / name).read_text().splitlines()[1:]:
                words = row.split()
                (host, port), other = _end(words[1]), _end(words[2])
                is_it = other == (_canonical(remote[0]), remote[1]) if remote else int(words[3], 16) == sockets.LISTENS
                if is_it and port == local[1] and host in hosts:
                    found.add(FoundSocket(int(words[7]), int(words[9])))
    return found.pop() if len({one.uid for one in found}) == 1 else None


def _canonical(host: str) -> bytes:
    address = ipaddress.ip_address(host)
    return address.packed if address.version == 6 else b"\0" * 10 + b"\xff\xff" + address.packed


def _end(shown: str) -> tuple[bytes, int]:
    """`0100007F:1F90`: words of 32 bits, each as this machine has it in its memory."""
    host, port = shown.split(":")
    words = [bytes.fromhex(host[at : at + 8]) for at in range(0, len(host), 8)]
    packed = b"".join(word[::-1] if sys.byteorder == "little" else word for word in words)
    return packed if len(packed) == 16 else b"\0" * 10 + b"\xff\xff" + packed, int(port, 16)

"""How are connections taken, so that no crowd takes the process down? A few at a turn, so that others can go for them.

asyncio's own servers take all that wait before anybody sees the first of them, do not count those that have not
finished a TLS handshake, and print a traceback for each that they cannot take. Standard library only.
"""

from __future__ import annotations

import asyncio
import errno
import functools
import ipaddress
import logging
import socket
import ssl
from collections.abc import Callable
from typing import Any

log = logging.getLogger("muster.listening")

AT_ONCE = 64  # at a turn: ten thousand workers come at once, and each turn looks at all of them
BACKLOG = 4096
AGAIN_S = 0.5  # until it is tried again, when the system has no more
TOLD_EVERY_S = 60.0  # an outage that comes and goes is told once
_SHORTAGE = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)

Arrival = asyncio.Task[tuple[asyncio.Transport, asyncio.Protocol]]
Admit = Callable[[socket.socket, str], Any]


class Door:
    """One listening socket. `admit` gets each connection and whose it is.

    Nobody is kept waiting for room: a queue that a crowd has filled is one behind which everybody else waits. Whoever
    admits lets somebody go instead, or closes it.
    """

    def __init__(self, listener: socket.socket, admit: Admit, *, name: str, backlog: int = BACKLOG) -> None:
        self._listener = listener
        self._admit = admit
        self._name = name
        self._resting: asyncio.TimerHandle | None = None
        self._told_at: float | None = None
        self._loop = asyncio.get_running_loop()
        listener.setblocking(False)
        listener.listen(backlog)
        self._loop.add_reader(listener, self._come_in)

    def close(self) -> None:
        if self._resting is not None:
            self._resting.cancel()
        if self._listener.fileno() >= 0:
            self._loop.remove_reader(self._listener)
            self._listener.close()

    async def wait_closed(self) -> None:
        """As asyncio's servers have it."""

    def _come_in(self) -> None:
        for _ in range(AT_ONCE):
            try:
                taken, address = self._listener.accept()
            except OSError as error:
                if error.errno in _SHORTAGE:
                    self._tell(error)
                    self._rest()
                return  # nobody waits any more, or whoever did has left
            taken.setblocking(False)
            _notice_silence(taken)
            self._admit(taken, whose(str(address[0])))

    def _rest(self) -> None:
        self._loop.remove_reader(self._listener)
        self._resting = self._loop.call_later(AGAIN_S, self._loop.add_reader, self._listener, self._come_in)

    def _tell(self, error: OSError) -> None:
        now = self._loop.time()
        if self._told_at is None or now - self._told_at > TOLD_EVERY_S:
            log.warning("%s: no connection can be taken for now (%s); ulimit -n", self._name, error.strerror)
        self._told_at = now


async def bound(host: str, port: int) -> list[socket.socket]:
    """Sockets on every address of that name, bound as asyncio would."""
    server = await asyncio.get_running_loop().create_server(
        asyncio.Protocol, host, port, reuse_address=True, start_serving=False
    )
    try:
        return [one.dup() for one in server.sockets]
    finally:
        server.close()


def reachable(host: str) -> str:
    """For one who listens everywhere, an address of this machine that others can use too."""
    if host not in ("0.0.0.0", "::"):
        return host
    family, far = (socket.AF_INET6, "2001:db8::1") if ":" in host else (socket.AF_INET, "192.0.2.1")
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((far, 9))  # sends nothing: it only asks which address would be used
            return str(probe.getsockname()[0])
        except OSError:
            return "::1" if ":" in host else "127.0.0.1"


def arrive(
    taken: socket.socket,
    protocol: Callable[[], asyncio.BaseProtocol],
    *,
    tls: ssl.SSLContext | None = None,
    within_s: float | None = None,
) -> Arrival:
    """Let a connection be served by that protocol. If that fails nobody has to hear of it: it is closed."""
    loop = asyncio.get_running_loop()
    handshake = within_s if tls is not None else None
    connecting = loop.connect_accepted_socket(protocol, taken, ssl=tls, ssl_handshake_timeout=handshake)
    task: Arrival = loop.create_task(connecting)  # type: ignore[arg-type]

    def over(task: Arrival) -> None:
        if task.cancelled() or task.exception() is not None:
            loop.call_soon(taken.close)

    task.add_done_callback(over)
    return task


@functools.lru_cache(maxsize=4096)
def whose(host: str) -> str:
    """Who counts as one client: an address, or the network of 64 bits that is handed out as one."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return host
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    return str(address.ipv4_mapped or ipaddress.IPv6Network((address, 64), strict=False))


def _notice_silence(taken: socket.socket) -> None:
    """A peer whose machine is gone says nothing, not even that: the kernel asks after it."""
    taken.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, 60), (socket.TCP_KEEPINTVL, 15), (socket.TCP_KEEPCNT, 4)):
        taken.setsockopt(socket.IPPROTO_TCP, option, value)

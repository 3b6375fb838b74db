"""What does `mesh.probeAddress` mean? Where a worker is reached over the overlay, told once for all workers.

HOST, HOST:PORT or [V6]:PORT, in which `{worker}` stands for the worker's name; or a network like 10.8.0.0/16, in which
each worker's machine has an address of its own.
"""

from __future__ import annotations

import ipaddress

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def read(told: str) -> Network | tuple[str, int]:
    """A network, or a host and a port (0 where any will do); ValueError says what is wrong."""
    try:
        if "/" in told:
            return ipaddress.ip_network(told, strict=False)
        host, port = _split(told)
    except ValueError:
        host, port = "", 0
    if not host or any(char.isspace() or char in "\0[]" for char in host):
        raise ValueError(f"{told!r} is not HOST, HOST:PORT or a network like 10.8.0.0/16")
    return host, port


def _split(told: str) -> tuple[str, int]:
    if told.startswith("["):
        host, end, rest = told[1:].partition("]")
        return host if end else "", _port(rest.removeprefix(":")) if rest else 0
    host, colon, port = told.rpartition(":")
    return (host, _port(port)) if colon and ":" not in host else (told, 0)


def _port(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 0 < int(text) < 65536:
        raise ValueError(f"{text!r} is not a port")
    return int(text)

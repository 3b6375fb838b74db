"""Settings of `wait`, read from the environment: node, endpoint, prefix and times. Standard library only."""

from __future__ import annotations

import math
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import quote

PORT = 2379
TIMEOUT_S = 60.0
POLL_S = 2.0
LEAST_POLL_S = 0.01
EVER_S = 1e8  # three years: what clocks and sockets still take

NODES = ("NODE_NAME", "KUBERNETES_NODE_NAME")
ENDPOINTS = {"MUSTER_MESH_ENDPOINT": "", "MUSTER_RDZV_ENDPOINT": "", "BASILICA_RDZV_ENDPOINT": "basilica"}
_NAME = re.compile(r"[^\s\x00-\x1f\x7f:/?#@\[\]\\%]+")


class Unusable(ValueError):
    """A setting that means nothing."""


@dataclass(frozen=True)
class Target:
    node: str  # percent-encoded, as all of a path
    host: str
    port: int
    prefix: str
    timeout_s: float = TIMEOUT_S
    poll_s: float = POLL_S

    @property
    def endpoint(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def path(self, key: str) -> str:
        return f"/v2/keys/{self.prefix}/{key}/{self.node}"


def read(env: Mapping[str, str], timeout: object = None) -> Target | None:
    """None: there is nothing to wait for. Raises `Unusable`."""
    node = next((env[name] for name in NODES if env.get(name)), "")
    source = next((name for name in ENDPOINTS if env.get(name, "").strip()), "")
    if not node or not source:
        return None
    host, port = _endpoint(source, env[source].strip())
    prefix = ENDPOINTS[source] or env.get("MUSTER_MESH_PREFIX", "").strip("/ ") or "muster"
    if timeout is None and env.get("MUSTER_MESH_TIMEOUT_S"):
        timeout_s = _seconds("MUSTER_MESH_TIMEOUT_S", env["MUSTER_MESH_TIMEOUT_S"])
    else:
        timeout_s = _seconds("timeout", TIMEOUT_S if timeout is None else timeout)
    poll_s = _seconds("MUSTER_MESH_POLL_S", env.get("MUSTER_MESH_POLL_S") or POLL_S)
    if poll_s == 0:
        raise Unusable("MUSTER_MESH_POLL_S must be more than 0")
    encoded = "/".join(_encoded(part) for part in prefix.split("/") if part)
    return Target(_encoded(node), host, port, encoded, timeout_s, max(poll_s, LEAST_POLL_S))


def _encoded(name: str) -> str:
    return quote(name, safe="", errors="surrogateescape")


def _endpoint(source: str, text: str) -> tuple[str, int]:
    """Return host and port of HOST, HOST:PORT, [IPv6]:PORT, a bare IPv6 address, or a URL such as http://HOST:PORT/.

    Of a URL only host and port are used. https is refused: muster reads the keys over plain HTTP.
    """
    scheme, url, remainder = text.partition("://")
    if url and scheme.lower() == "https":
        raise Unusable(f"{source}={text!r} asks for TLS, but the keys are read over plain HTTP: give http://HOST:PORT")
    authority = _authority(remainder) if url and scheme.lower() == "http" else text.rstrip("/")
    host, colon, port = authority, "", ""
    if not (authority.endswith("]") or _is_ipv6(authority)) and ":" in authority:
        host, colon, port = authority.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1] if _is_ipv6(host[1:-1]) else ""
    elif not (_is_ipv6(host) and not colon):
        host = _ascii(host) if _NAME.fullmatch(host) else ""
    number = int(port) if port.isascii() and port.isdigit() and len(port) < 6 else 0 if colon else PORT
    if not host or not 0 < number < 65536:
        raise Unusable(f"{source}={text!r} is not HOST:PORT")
    return host, number


def _authority(remainder: str) -> str:
    """Return HOST:PORT from the part of a URL after its scheme: without user, path, query and fragment."""
    return re.split(r"[/?#]", remainder, maxsplit=1)[0].rpartition("@")[2]


def _is_ipv6(text: str) -> bool:
    try:
        socket.inet_pton(socket.AF_INET6, text.partition("%")[0])
    except (OSError, ValueError):
        return False
    return all(char.isalnum() or char in "._-" for char in text.partition("%")[2])


def _ascii(name: str) -> str:
    try:
        return name if name.isascii() else name.encode("idna").decode()
    except UnicodeError:
        return ""


def _seconds(name: str, value: object) -> float:
    try:
        seconds = value.total_seconds() if isinstance(value, timedelta) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        seconds = math.nan
    if not seconds >= 0:  # not a number is neither
        raise Unusable(f"{name}={value!r} is not a number of seconds")
    return min(seconds, EVER_S)

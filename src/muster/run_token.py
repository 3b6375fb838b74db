"""How does one find the token of a coordinator on this machine? In a file that only its user can read, by its address.

A coordinator that is given no token makes one and keeps it there for as long as somebody may come back to it. Agents
and `muster world` of the same user look there; to another machine a person has to carry it. Standard library only.
"""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from muster import files
from muster.world import neighbours

Address = tuple[str, int]

VARIABLE = "MUSTER_RUN_TOKEN"
LOOK_S = 0.05
TELL_AFTER_S = 1.0
_EVERYWHERE = ("0.0.0.0", "::")


class AnotherUsersPort(Exception):
    """Somebody else listens where a coordinator of ours was looked for."""


def given() -> str | None:
    return os.environ.get(VARIABLE) or None


def file_of(home: Path, host: str, port: int) -> Path:
    """By the machine, too: several may share a home, and each has a 127.0.0.1."""
    return home / "coordinators" / f"{host.replace(':', '_')}-{port}@{_machine()}.token"


def _machine() -> str:
    return re.sub(r"[^\w.-]", "_", socket.gethostname())


def read(path: Path) -> str | None:
    try:
        token = files.read_private(path).strip()
    except OSError:
        return None
    return token if re.fullmatch(r"[0-9a-f]{64}", token) else None


def new() -> str:
    return secrets.token_hex(32)


def find(home: Path, where: Iterable[Address]) -> str | None:
    """The token of the coordinator that is reached there, if that is on this machine and ours."""
    for host, port in where:
        here = _own_addresses(host)
        local = ("localhost",) if any(ipaddress.ip_address(one).is_loopback for one in here) else ()
        names = (host, *here, *local, socket.gethostname(), *_EVERYWHERE) if here else ()
        for name in dict.fromkeys(names):
            if token := read(file_of(home, name, port)):
                return token
    return None


def await_found(
    home: Path, where: Callable[[], list[Address]], timeout_s: float, on_wait: Callable[[str], None] = lambda why: None
) -> str | None:
    """`find`, for one who may come before the coordinator; TimeoutError if that does not come.

    None if there is no file though somebody listens, or may. On this machine that can only be a coordinator of an older
    version, and only of this user: the port is whose who takes it first.
    """
    now = time.monotonic()
    deadline, told_at = now + timeout_s, now + min(TELL_AFTER_S, timeout_s)
    while True:
        addresses = where()
        listeners = [_listeners(address) for address in addresses]
        if token := find(home, addresses):  # it is written before its coordinator listens, so it is looked for after
            return token
        if any(uids is None or uids for uids in listeners):
            _check_owners(addresses, listeners)
            return None
        why = f"{', '.join(f'{host}:{port}' for host, port in addresses)}: connection refused"
        if time.monotonic() >= told_at:
            told_at = float("inf")
            on_wait(why)
        if time.monotonic() >= deadline:
            raise TimeoutError(why)
        time.sleep(LOOK_S)


def is_others(address: Address) -> bool:
    """Return True if it is certain that a process of another user listens there."""
    return bool((_listeners(address) or set()) - {0, os.geteuid()})


def may_listen(address: Address) -> bool:
    """Return False if it is certain that no process listens there."""
    uids = _listeners(address)
    return uids is None or bool(uids)


def _check_owners(addresses: list[Address], listeners: list[set[int] | None]) -> None:
    for (host, port), uids in zip(addresses, listeners, strict=True):
        if uids and uids - {0, os.geteuid()}:
            raise AnotherUsersPort(f"another user listens on {host}:{port}: choose another port, or set {VARIABLE}")


class KeptToken:
    """The file of a coordinator. What is there may be another one's, until this one listens.

    Whoever is given no token takes that which is there: members of before may still have it, and of several who start
    at once all but one will find the port taken and join that one.
    """

    def __init__(self, home: Path, host: str, port: int, token: str | None = None) -> None:
        self.path = file_of(home, host, port)
        self._mine = -1
        files.private_folder(self.path.parent)
        self.token = token or read(self.path) or new()
        try:
            self._mine = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            os.write(self._mine, f"{self.token}\n".encode())
        except FileExistsError:
            self.token = token or self._of_another() or self.token

    def _of_another(self) -> str | None:
        """It may have been made a moment ago, and be empty."""
        for _ in range(10):
            if token := read(self.path):
                return token
            time.sleep(0.01)
        return None

    def listens(self) -> None:
        """Now the address is this one's alone, and so is the file."""
        files.write_private(self.path, f"{self.token}\n")
        self._let_go()
        self._mine = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def close(self, *, remove: bool) -> None:
        """Remove it, unless another coordinator has put its own there."""
        with contextlib.suppress(OSError):
            if remove and os.path.samestat(os.fstat(self._mine), os.lstat(self.path)):
                self.path.unlink()
        self._let_go()

    def _let_go(self) -> None:
        if self._mine >= 0:
            os.close(self._mine)
            self._mine = -1


def clear_others(home: Path, host: str, port: int, but: Path | None) -> None:
    """What is kept for an address on which another coordinator listens by now was left by one that was killed."""
    mine = file_of(home, host, port)
    for path in mine.parent.glob(f"*-{port}@{_machine()}.token"):
        alike = ("_" in path.name.partition("@")[0]) == (":" in host)
        if path != but and (path == mine or (host in _EVERYWHERE and alike)):
            with contextlib.suppress(OSError):
                path.unlink()


def _own_addresses(host: str) -> list[str]:
    """Which addresses a name has, if they are of this machine."""
    found = []
    with contextlib.suppress(OSError):
        for family, kind, _, _, place in socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, kind) as probe:
                probe.bind(place)
                found.append(str(place[0]).partition("%")[0])
    return found


def _listeners(address: Address) -> set[int] | None:
    """Whose processes listen there; None if it is another machine's address, or cannot be known."""
    here = _own_addresses(address[0])
    try:
        found = [neighbours.listener_at((one, address[1])) for one in here]
    except OSError:
        return None
    return {one.uid for one in found if one is not None} if here else None

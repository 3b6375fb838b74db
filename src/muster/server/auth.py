"""Who is asking, and may they? Bearer tokens with a role and namespaces, kept hashed in one file.

Nothing here speaks HTTP: `front` takes the token from the request and sends the errors.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import ipaddress
import json
import os
import re
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from muster.errors import AlreadyExists, Forbidden, InvalidRequest, NotFound, Unauthenticated, Unavailable
from muster.files import write_private
from muster.types.codec import Invalid, Problem, from_wire, limited, to_wire
from muster.types.training import DNS_LABEL

Role = Literal["viewer", "editor", "admin"]
ROLES: tuple[Role, ...] = ("viewer", "editor", "admin")
ALL = "*"
EMBEDDED = "embedded"
TOKENS_FILE = "tokens.json"
EMBEDDED_FILE = "token"

_NAME = r"[A-Za-z0-9]([-A-Za-z0-9._@]*[A-Za-z0-9])?"


@dataclass(frozen=True)
class Identity:
    """Whom a token stands for. Its name is the actor of every event that its requests cause."""

    name: str = limited(pattern=_NAME, max_length=63, about="is not a name for a token")
    role: Role = "viewer"
    namespaces: tuple[str, ...] = limited((), max_items=10_000)

    def sees(self, namespace: str) -> bool:
        return self.role == "admin" or ALL in self.namespaces or namespace in self.namespaces

    @property
    def sees_all(self) -> bool:
        return self.role == "admin" or ALL in self.namespaces

    def must_read(self, namespace: str) -> None:
        if not self.sees(namespace):
            raise Forbidden(
                f"token {self.name!r} may not read namespace {namespace!r}",
                hint=f"it is for {', '.join(self.namespaces) or 'no namespace'}; ask an admin for another token",
            )

    def must_write(self, namespace: str) -> None:
        self.must_read(namespace)
        if self.role == "viewer":
            raise Forbidden(
                f"token {self.name!r} is a viewer's: it may not change anything in namespace {namespace!r}",
                hint="use the token of an editor",
            )


@dataclass(frozen=True)
class _StoredToken:
    """A token as the file holds it."""

    name: str
    sha256: str = limited(pattern="[0-9a-f]{64}", about="is not a SHA-256 in hexadecimal")
    role: Role = "viewer"
    namespaces: tuple[str, ...] = ()

    @property
    def identity(self) -> Identity:
        return Identity(self.name, self.role, self.namespaces)


class Tokens:
    """The tokens of one home. The file is read again when it changes, so that a revocation counts at once."""

    def __init__(self, home: Path) -> None:
        self._path = home / TOKENS_FILE
        self._seen: tuple[int, int, int] | None = None
        self._by_hash: dict[str, _StoredToken] = {}

    def identify(self, token: str) -> Identity:
        """Whose token it is. Raises Unauthenticated."""
        digest = _digest(token)
        self._refresh()
        kept = self._by_hash.get(digest)
        # A dictionary of digests tells a guesser nothing about tokens; the last comparison is constant-time as well.
        if kept is None or not hmac.compare_digest(kept.sha256, digest):
            raise Unauthenticated("the token is not known here", hint="it may have been revoked; ask for a new one")
        return kept.identity

    def knows(self, identity: Identity) -> bool:
        """Whether a token that was good when a stream began still is."""
        self._refresh()
        return any(kept.identity == identity for kept in self._by_hash.values())

    def create(self, name: str, role: Role, namespaces: tuple[str, ...] = (ALL,), *, token: str | None = None) -> str:
        """A new token, in clear: this is the only time that anyone sees it."""
        _check(name, role, namespaces)
        kept = self._load()
        if any(one.name == name for one in kept):
            raise AlreadyExists(f"there is a token {name!r} already", hint="revoke it first, or choose another name")
        token = token or f"mst_{secrets.token_urlsafe(32)}"
        self._save([*kept, _StoredToken(name, _digest(token), role, namespaces)])
        return token

    def revoke(self, name: str) -> None:
        kept = self._load()
        left = [one for one in kept if one.name != name]
        if len(left) == len(kept):
            raise NotFound(f"there is no token {name!r}")
        self._save(left)

    def list(self) -> tuple[Identity, ...]:
        return tuple(one.identity for one in self._load())

    def _refresh(self) -> None:
        stamp = _stamp_of(self._path)
        if stamp != self._seen:
            self._by_hash = {kept.sha256: kept for kept in self._load()}
            self._seen = stamp

    def _load(self) -> tuple[_StoredToken, ...]:
        try:
            data = json.loads(self._path.read_text())
        except FileNotFoundError:
            return ()
        except (OSError, ValueError) as error:
            raise Unavailable(f"the tokens of this server cannot be read: {type(error).__name__}") from error
        try:
            return tuple(from_wire(_StoredToken, one) for one in (data if isinstance(data, list) else []))
        except Invalid as error:
            raise Unavailable("the tokens of this server cannot be read: an entry is malformed") from error

    def _save(self, kept: Sequence[_StoredToken]) -> None:
        write_private(self._path, json.dumps([to_wire(one) for one in kept], indent=1), durable=True)


def ensure_embedded(home: Path, given: str | None = None) -> str:
    """The token of the embedded server's own user: made once, kept in a file that only the user can read.

    `given`: somebody else keeps it.
    """
    path = home / EMBEDDED_FILE
    tokens = Tokens(home)
    if given is not None:
        write_private(path, given + "\n", durable=True)
    with contextlib.suppress(FileNotFoundError):
        token = path.read_text().strip()
        with contextlib.suppress(Unauthenticated):
            if token and tokens.identify(token).role == "admin":
                os.chmod(path, 0o600)
                return token
    with contextlib.suppress(NotFound):
        tokens.revoke(EMBEDDED)  # the file was lost: a token that nobody has is no use
    token = tokens.create(EMBEDDED, "admin", token=given)
    write_private(path, token + "\n", durable=True)
    return token


def check_listen(host: str, *, tls: bool, insecure: bool) -> None:
    """Refuse to send tokens over a network in clear, unless told to."""
    if tls or insecure or is_loopback(host):
        return
    raise ValueError(
        f"refusing to listen on {host or 'all addresses'} without TLS: tokens would travel in clear; "
        "give a certificate and key, or --insecure if something in front of it encrypts"
    )


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False  # a name may resolve to anything


def _check(name: str, role: str, namespaces: tuple[str, ...]) -> None:
    problems = []
    if not re.fullmatch(_NAME, name) or len(name) > 63:
        problems.append(Problem("name", f"{name[:80]!r} is not a name for a token"))
    if role not in ROLES:
        problems.append(Problem("role", f"must be one of {', '.join(ROLES)}, not {role!r}"))
    if not namespaces:
        problems.append(Problem("namespaces", "at least one is needed; * stands for all"))
    problems += [
        Problem("namespaces", f"{one[:80]!r} is not a namespace")
        for one in namespaces
        if one != ALL and not re.fullmatch(DNS_LABEL, one)
    ]
    if problems:
        raise InvalidRequest("; ".join(problem.message for problem in problems), problems=tuple(problems))


def _digest(token: str) -> str:
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).hexdigest()


def _stamp_of(path: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return (found.st_mtime_ns, found.st_size, found.st_ino)

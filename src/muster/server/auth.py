"""Who is asking, and may they? Bearer tokens with a role, namespaces and an end, kept hashed in one file.

Whoever changes the file holds a lock; when a token was last used is kept in another file, which only the
control plane writes (`token_use`). Nothing here speaks HTTP: `front` takes the token from the request and sends the
errors.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import hashlib
import hmac
import ipaddress
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

from muster import files
from muster.errors import AlreadyExists, Forbidden, InvalidRequest, NotFound, Unauthenticated, Unavailable
from muster.files import own_folder, write_private
from muster.server.token_use import SAVE_EVERY_S, TokenUse
from muster.types.codec import Invalid, Problem, from_wire, limited, show_time, to_wire
from muster.types.event import EMBEDDED
from muster.types.training import DNS_LABEL

Role = Literal["viewer", "editor", "admin"]
ROLES: tuple[Role, ...] = ("viewer", "editor", "admin")
ALL = "*"
TOKENS_FILE = "tokens.json"
EMBEDDED_FILE = "token"
LOCK_FILE = "tokens.lock"
GRACE = timedelta(hours=1)  # how long a rotated token is good beside its successor

_MOST_FORMER = 8
_LOCK_WITHIN_S = 10.0
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

    def covers(self, other: Identity) -> bool:
        """Whether it may do all that the other may."""
        if ROLES.index(self.role) < ROLES.index(other.role):
            return False
        return self.sees_all or not (other.sees_all or set(other.namespaces) - set(self.namespaces))

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
class Pass:
    """A token that was good when it was shown."""

    identity: Identity
    sha256: str


class ExpiredToken(Unauthenticated):
    """One that was good once. Whoever has it may know; `name` is for the audit."""

    def __init__(self, name: str, why: str, hint: str) -> None:
        super().__init__(f"the token {why}", hint=hint)
        self.name = name


@dataclass(frozen=True)
class FormerSecret:
    """What a token was before it was rotated."""

    until: datetime
    sha256: str = limited(pattern="[0-9a-f]{64}", about="is not a SHA-256 in hexadecimal")


@dataclass(frozen=True)
class StoredToken:
    """A token as the file holds it. Versions before 0.2 knew neither times nor rotation."""

    name: str
    sha256: str = limited(pattern="[0-9a-f]{64}", about="is not a SHA-256 in hexadecimal")
    role: Role = "viewer"
    namespaces: tuple[str, ...] = ()
    created: datetime | None = None  # its present secret
    expires: datetime | None = None
    former: tuple[FormerSecret, ...] = ()

    @property
    def identity(self) -> Identity:
        return Identity(self.name, self.role, self.namespaces)

    @property
    def secrets(self) -> tuple[str, ...]:
        return (self.sha256, *(one.sha256 for one in self.former))

    def must_be_good(self, sha256: str, now: datetime) -> None:
        """Raises ExpiredToken if that secret of it is over, by the wall clock."""
        if self.expires is not None and now >= self.expires:
            hint = f"muster token rotate {self.name} --expires 7d, where the control plane runs, makes a new one"
            raise ExpiredToken(self.name, f"expired at {show_time(self.expires)}", hint)
        for one in self.former:
            if one.sha256 == sha256 and now >= one.until:
                raise ExpiredToken(self.name, f"was rotated, and expired at {show_time(one.until)}", "use the new one")

    def rotated(self, sha256: str, now: datetime, grace: timedelta, expires: datetime | None) -> StoredToken:
        """With another secret; those before it are good for a while, but none for longer than that."""
        present = FormerSecret(self.expires or now + grace, self.sha256)
        former = [replace(one, until=min(one.until, now + grace)) for one in (*self.former, present)]
        left = [one for one in former if one.until > now]
        return replace(self, sha256=sha256, created=now, expires=expires, former=tuple(left[-_MOST_FORMER:]))


@dataclass(frozen=True)
class ListedToken:
    """A token as people see it."""

    name: str
    role: Role
    namespaces: tuple[str, ...]
    created: datetime | None
    expires: datetime | None
    last_use: datetime | None


def _wall() -> datetime:
    return datetime.now(UTC)


class Tokens:
    """The tokens of one home. The file is read again when it changes, so that a revocation counts at once."""

    def __init__(self, home: Path, now: Callable[[], datetime] = _wall) -> None:
        self._home = home
        self._path = home / TOKENS_FILE
        self._now = now
        self._seen: tuple[int, int, int] | None = None
        self._by_hash: dict[str, tuple[StoredToken, Pass]] = {}
        self.use = TokenUse(home)

    def identify(self, token: str) -> Identity:
        """Whose token it is. Raises Unauthenticated."""
        return self.admit(token).identity

    def admit(self, token: str) -> Pass:
        """A token that is good now. Raises Unauthenticated."""
        digest = _digest(token)
        self.refresh()
        stored, shown = self._by_hash.get(digest, (None, None))
        # A dictionary of digests tells a guesser nothing about tokens; the last comparison is constant-time as well.
        if stored is None or shown is None or not hmac.compare_digest(shown.sha256, digest):
            raise Unauthenticated("the token is not known here", hint="it may have been revoked; ask for a new one")
        now = self._now()
        stored.must_be_good(digest, now)
        self.use.note(digest, now)
        return shown

    def check(self, shown: Pass) -> None:
        """Whether a token that was good when a stream began still is, for as much. Call `refresh` before."""
        stored, _ = self._by_hash.get(shown.sha256, (None, None))
        if stored is None:
            raise Unauthenticated("the token was revoked", hint="ask for a new one")
        stored.must_be_good(shown.sha256, self._now())
        if not stored.identity.covers(shown.identity):
            raise Unauthenticated("the token may do less than before", hint="ask again with what it may do now")

    def peers(self, identity: Identity) -> frozenset[str]:
        """Return the names of the tokens that are no admins' and share a namespace with that token."""
        tokens = (stored.identity for stored, _ in self._by_hash.values() if stored.role != "admin")
        shared = set(identity.namespaces)
        return frozenset(one.name for one in tokens if not shared.isdisjoint(one.namespaces))

    def refresh(self) -> None:
        """Read the file again if it has changed. Raises Unavailable."""
        stamp = _stamp_of(self._path)
        if stamp != self._seen:
            kept = self._load()
            self._by_hash = {digest: (one, Pass(one.identity, digest)) for one in kept for digest in one.secrets}
            self._seen = stamp

    def create(
        self,
        name: str,
        role: Role,
        namespaces: tuple[str, ...] = (ALL,),
        *,
        expires_in: timedelta | None = None,
        token: str | None = None,
    ) -> str:
        """A new token, in clear: this is the only time that anyone sees it."""
        _check(name, role, namespaces)
        token, now = token or _new_secret(), self._now()
        with _locked(self._home):
            kept = self._load()
            if any(one.name == name for one in kept):
                raise AlreadyExists(
                    f"there is a token {name!r} already", hint=f"muster token rotate {name}, or choose another name"
                )
            made = StoredToken(name, _digest(token), role, namespaces, created=now, expires=_after(now, expires_in))
            self._save([*kept, made])
        return token

    def rotate(self, name: str, *, grace: timedelta = GRACE, expires_in: timedelta | None = None) -> str:
        """Another secret for a token, in clear. Without a new end it lasts as long as it did before.

        The present secret is good for `grace`, so that those who have it can be given the new one.
        """
        token, now = _new_secret(), self._now()
        with _locked(self._home):
            kept = self._load()
            one = next((one for one in kept if one.name == name), None)
            if one is None:
                raise NotFound(f"there is no token {name!r}")
            if expires_in is None and one.expires is not None and one.created is not None:
                expires_in = one.expires - one.created
            changed = one.rotated(_digest(token), now, grace, _after(now, expires_in))
            self._save([changed if other is one else other for other in kept])
            if name == EMBEDDED:  # both are good by now: whoever reads the file is let in before and after
                write_private(self._home / EMBEDDED_FILE, token + "\n", durable=True)
        return token

    def revoke(self, name: str) -> None:
        with _locked(self._home):
            kept = self._load()
            left = [one for one in kept if one.name != name]
            if len(left) == len(kept):
                raise NotFound(f"there is no token {name!r}")
            self._save(left)

    def list(self) -> tuple[Identity, ...]:
        return tuple(one.identity for one in self._load())

    def listed(self) -> tuple[ListedToken, ...]:
        used = TokenUse(self._home)
        return tuple(
            ListedToken(one.name, one.role, one.namespaces, one.created, one.expires, used.latest(one.secrets))
            for one in self._load()
        )

    async def keep_use(self) -> None:
        """Write down when each was last used, for ever; those that are gone are forgotten."""
        while True:
            await asyncio.sleep(1.0)
            if (text := self.use.unsaved(self._by_hash)) is not None:
                await asyncio.to_thread(self.use.write, text)
                await asyncio.sleep(SAVE_EVERY_S)

    def save_use(self) -> None:
        if (text := self.use.unsaved(self._by_hash)) is not None:
            self.use.write(text)

    def _load(self) -> tuple[StoredToken, ...]:
        try:
            return read_tokens(files.read_text(self._path))
        except FileNotFoundError:
            return ()
        except Invalid as error:
            raise Unavailable("the tokens of this server cannot be read: an entry is malformed") from error
        except (OSError, ValueError) as error:
            raise Unavailable(f"the tokens of this server cannot be read: {type(error).__name__}") from error

    def _save(self, kept: Sequence[StoredToken]) -> None:
        text = json.dumps([to_wire(one) for one in kept], indent=1)
        try:
            write_private(self._path, text, durable=True)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT) or not _write_over(self._path, text.encode()):
                hint = f"make room in {self._home}, then again"
                raise Unavailable(f"the tokens cannot be changed: {error.strerror}", hint=hint) from error


def read_tokens(text: str) -> tuple[StoredToken, ...]:
    """What a file of tokens holds. Raises ValueError."""
    data = json.loads(text)
    return tuple(from_wire(StoredToken, one) for one in (data if isinstance(data, list) else []))


def _write_over(path: Path, text: bytes) -> bool:
    """Where there is no room for a second file; False if it is too long. Whoever fills the disk must be revocable.

    The rest is blank until it is cut off, so that it can be read at every moment but that of the one write.
    """
    with contextlib.suppress(OSError), files.changing(path) as opened:
        size = os.fstat(opened).st_size
        if len(text) <= size and os.pwrite(opened, text.ljust(size), 0) == size:
            os.ftruncate(opened, len(text))
            os.fsync(opened)
            return True
    return False


def _new_secret() -> str:
    return f"mst_{secrets.token_urlsafe(32)}"


def _after(now: datetime, span: timedelta | None) -> datetime | None:
    return None if span is None else now + span


@contextlib.contextmanager
def _locked(home: Path) -> Iterator[None]:
    """One at a time: two that read, change and write the file would lose each other's change."""
    own_folder(home)
    lock = os.open(home / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        until = time.monotonic() + _LOCK_WITHIN_S
        while not _taken(lock):
            if time.monotonic() > until:
                raise Unavailable("another command changes the tokens", hint="try again")
            time.sleep(0.01)
        yield
    finally:
        os.close(lock)


def _taken(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def ensure_embedded(home: Path, given: str | None = None) -> str:
    """The token of the embedded server's own user: made once, kept in a file that only the user can read.

    `given`: somebody else keeps it.
    """
    path = home / EMBEDDED_FILE
    tokens = Tokens(home)
    if given is not None:
        write_private(path, given + "\n", durable=True)
    with contextlib.suppress(FileNotFoundError):
        token = files.read_text(path).strip()
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

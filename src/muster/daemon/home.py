"""Whose home is it, and is all there that was left? What is found in MUSTER_HOME before anything there is served.

The identity is made at the first start and kept in three places: in the database, in `identity.json`, and in
`logs/.home`. The database is written first, so that a crash in between leaves a home that knows itself. What is
decided of it is `core.home`'s.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from muster import errors
from muster.backends.local import processes
from muster.clock import boot_id
from muster.core import home as rules
from muster.core.home import Found, Kept
from muster.files import read_text, write_private
from muster.store import evidence, reached
from muster.types.codec import Invalid, from_wire, limited, to_wire

DATABASE = "muster.db"
IDENTITY = "identity.json"
REACHED = "reached"
_LOGS_MARK = ".home"
_UID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")


@dataclass(frozen=True)
class HomeIdentity:
    """What `identity.json` holds. Only the owner of the home can read it."""

    id: str = limited(pattern=r"[0-9a-f]{32}", about="is no identity of a home")
    secret: str = limited(pattern=r"[0-9a-f]{64}", about="is no secret")  # what its backups are sealed with
    forgotten: tuple[str, ...] = ()  # trainings that were given up, while their logs are there


def look(home: Path) -> Found:
    """The home as it is. The count is read before the database, which may be written meanwhile."""
    identity = read_identity(home)
    certain = reached.read(home / REACHED).certain(boot_id())
    folders = frozenset(_log_folders(home))
    kept = evidence.look(home / DATABASE, folders)
    return Found(
        database=str(home / DATABASE),
        kept=kept,
        marks=dict(_marks(home, identity)),
        reached=certain,
        living=processes.agents(home / "coordinator.addr"),
        folders=folders,
        forgotten=identity.forgotten if identity is not None else (),
        twins=tuple(sorted(_twins(home, kept))),
    )


def checked(home: Path) -> Found:
    """The home, if nothing of it is lost. Raises MusterError with what to type."""
    found = look(home)
    if what := rules.loss(found):
        raise lost(found, what)
    return found


def lost(found: Found, what: str) -> errors.MusterError:
    return errors.MusterError(rules.advice(found, what), code="home_lost")


def identity_of(found: Found) -> str:
    """Whose home it is if it is served as it is."""
    return found.kept.home or next(iter(found.marks.values()), "") or new_identity()


def new_identity() -> str:
    return secrets.token_hex(16)


def settle(home: Path, identity: str, found: Found, *, forget: bool) -> None:
    """The database has this identity: everything else of the home is to have it, too."""
    before = read_identity(home)
    known = before.forgotten if before is not None else ()
    given_up = {*known, *(found.unexplained if forget else ())} & set(found.folders)
    secret = before.secret if before is not None and before.id == identity else secrets.token_hex(32)
    after = HomeIdentity(identity, secret, tuple(sorted(given_up)))
    if after != before:
        write_identity(home, after)
    if dict(_marks(home, None)).get(str(_logs_mark(home))) != identity:
        write_private(_logs_mark(home), identity + "\n", durable=True)


def set_aside(home: Path, why: str, *, copy: bool = False) -> Path | None:
    """Keep the database that is there under another name; where it went, if there is any.

    The WAL goes first: without it the file shows that something is missing, and nobody serves it.
    """
    aside = home / f"{DATABASE}.before-{why}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(2)}"
    moved = False
    for suffix in ("-wal", ""):
        path, to = home / f"{DATABASE}{suffix}", aside.with_name(f"{aside.name}{suffix}")
        if path.exists() and path.stat().st_size:
            shutil.copy2(path, to) if copy else os.replace(path, to)
            moved = True
    if not copy:
        (home / f"{DATABASE}-shm").unlink(missing_ok=True)  # it is made anew from the other two
    return aside if moved else None


# Files -------------------------------------------------------------------------------------------


def read_identity(home: Path) -> HomeIdentity | None:
    """None if there is none; one that cannot be read is told, for the database may still have it."""
    path = home / IDENTITY
    try:
        return from_wire(HomeIdentity, json.loads(read_text(path)), strict=False)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, Invalid) as error:
        raise errors.MusterError(
            f"{path} cannot be read: {error}", hint=f"rm {path}, if you know that the home is yours; it is made anew"
        ) from error


def write_identity(home: Path, identity: HomeIdentity) -> None:
    write_private(home / IDENTITY, json.dumps(to_wire(identity)) + "\n", durable=True)


def _twins(home: Path, kept: Kept) -> set[str]:
    """Other folders that are this home as well, and in which workers of its trainings look for their coordinator."""
    found = set()
    for there, uid, _ in processes.all_agents() if kept.home else ():
        if uid in kept.trainings and there.parent.resolve() != home.resolve():
            with contextlib.suppress(errors.MusterError):
                other = read_identity(there.parent)
                found |= {str(there.parent)} if other is not None and other.id == kept.home else set()
    return found


def _marks(home: Path, identity: HomeIdentity | None) -> Iterator[tuple[str, str]]:
    if identity is not None:
        yield str(home / IDENTITY), identity.id
    with contextlib.suppress(OSError, ValueError):
        if told := read_text(_logs_mark(home)).strip():
            yield str(_logs_mark(home)), told


def _logs_mark(home: Path) -> Path:
    return home / "logs" / _LOGS_MARK


def _log_folders(home: Path) -> Iterator[str]:
    with contextlib.suppress(FileNotFoundError), os.scandir(home / "logs") as entries:
        yield from (
            entry.name for entry in entries if _UID.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        )

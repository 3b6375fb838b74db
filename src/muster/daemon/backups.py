"""How does a home get into one file, and back out of it?

A backup is a tar file: the database as of one moment, the files beside it that people write, and a manifest with their
digests, sealed with a secret of the home that made it. It is made under another name and linked to its own when it is
whole. Logs, checkpoints and the embedded token are not in it.

A restore looks at everything before it touches anything. What was there is moved aside, the WAL first, so that whoever
starts a control plane in between is refused. The database that comes in its place counts on from where the home had
got to: versions, events and transactions are never numbered twice.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import io
import json
import os
import sqlite3
import stat
import tarfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from muster import __version__, errors
from muster.core import home as rules
from muster.core.home import FileState, Found, Kept
from muster.daemon import home as homes
from muster.daemon.home import HomeIdentity
from muster.files import own_folder, sync_folder, write_private
from muster.home_lock import HomeLock
from muster.store import evidence, reached, schema
from muster.types.codec import Invalid, from_wire, to_wire

FORMAT = 1
MANIFEST = "manifest.json"
BESIDE = ("tokens.json", "quotas.json", "rates.json")
_MOST_BESIDE = 16 << 20
_MOST_MANIFEST = 1 << 20
_CHUNK = 1 << 20
_SQLITE = b"SQLite format 3\0"
_LATEST = "SELECT max(version) FROM changes UNION ALL SELECT max(version) FROM objects"
_AHEAD = 1_000_000  # versions and events that may have been given since the backup was made


@dataclass(frozen=True)
class Manifest:
    """What is in a backup."""

    format: int
    home: str
    made_at: datetime
    version: str  # of muster
    trainings: int
    commits: int
    files: Mapping[str, str]  # name → SHA-256
    seal: str = ""


@dataclass(frozen=True)
class Restored:
    """What a restore did, and what it left."""

    home: str
    made_at: datetime | None  # unknown of a plain copy of a database
    trainings: int
    before: str | None  # where the database is that was there before
    files: tuple[str, ...]  # that were missing and came from the backup
    adopted: tuple[str, ...]  # workers that run and that it knows
    unknown: tuple[str, ...]  # workers that run and that it does not know
    only_logs: tuple[str, ...]  # trainings that it does not know, and whose logs stay


# Making one --------------------------------------------------------------------------------------


def make(home: Path, to: Path, *, force: bool = False) -> Manifest:
    """Write a backup of a home, served or not. Raises MusterError; `to` is then as it was."""
    found = replace(homes.look(home), living=(), folders=(), twins=())  # only the database is meant
    if what := rules.loss(found):
        raise homes.lost(found, what)
    if found.kept.state is not FileState.READABLE:
        raise errors.NotFound(f"there is nothing to back up: {found.database} does not exist", hint="see MUSTER_HOME")
    if to.exists() and not force:
        raise _taken(to)
    with _disk(to), _drafts(to) as (database, archive):
        kept = _snapshot(Path(found.database), database)
        manifest = _pack(home, kept, database, archive)
        _publish(archive, to, force=force)
    return manifest


def _taken(to: Path) -> errors.AlreadyExists:
    return errors.AlreadyExists(f"{to} exists already", hint="choose another name, or give --force to replace it")


def _snapshot(path: Path, to: Path) -> Kept:
    """The database as of one moment; nobody who writes it meanwhile is held up."""
    try:
        with contextlib.closing(evidence.opened(path)) as source, contextlib.closing(sqlite3.connect(to)) as copy:
            source.backup(copy)
            copy.execute("PRAGMA journal_mode = DELETE")  # one file, with nothing beside it
    except sqlite3.Error as error:
        raise errors.Unavailable(f"{path} cannot be copied: {error}", hint="see that both disks work") from error
    return _sound(to, path)


def _sound(path: Path, shown: Path) -> Kept:
    """What is in a copy, every page of which was looked at."""
    kept = evidence.look(path)
    fault = kept.fault
    if kept.state is FileState.READABLE:
        try:
            with contextlib.closing(evidence.opened(path)) as connection:
                said = str(connection.execute("PRAGMA integrity_check(1)").fetchone()[0])
                fault = "" if said == "ok" else said
        except sqlite3.DatabaseError as error:
            fault = str(error)
    if fault or kept.state is not FileState.READABLE:
        raise _unusable(shown, f"its database is damaged ({fault or 'it is empty'})")
    return kept


def _pack(home: Path, kept: Kept, database: Path, archive: Path) -> Manifest:
    beside = {name: raw for name in BESIDE if (raw := _small(home / name)) is not None}
    digests = {homes.DATABASE: _digest_of(database)}
    digests |= {name: hashlib.sha256(raw).hexdigest() for name, raw in beside.items()}
    made = Manifest(FORMAT, kept.home, _now(), __version__, len(kept.trainings), kept.commits, digests)
    identity = homes.read_identity(home)
    made = replace(made, seal=_seal(made, identity)) if identity is not None else made
    with open(archive, "r+b") as file:
        with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as tar:
            _add(tar, MANIFEST, json.dumps(to_wire(made), indent=1).encode())
            for name, raw in beside.items():
                _add(tar, name, raw)
            with open(database, "rb") as source:
                tar.addfile(_entry(homes.DATABASE, os.fstat(source.fileno()).st_size), source)
        file.flush()
        os.fsync(file.fileno())
    return made


def _add(tar: tarfile.TarFile, name: str, raw: bytes) -> None:
    tar.addfile(_entry(name, len(raw)), io.BytesIO(raw))


def _entry(name: str, size: int) -> tarfile.TarInfo:
    made = tarfile.TarInfo(name)
    made.size, made.mode, made.mtime = size, 0o600, int(_now().timestamp())
    return made


def _publish(draft: Path, to: Path, *, force: bool) -> None:
    if force:
        os.replace(draft, to)
    else:
        try:
            os.link(draft, to)  # refuses to take the place of another file, also of one that came just now
        except FileExistsError:
            raise _taken(to) from None
    sync_folder(to.parent)


@contextlib.contextmanager
def _drafts(to: Path) -> Iterator[tuple[Path, Path]]:
    """Two private files beside `to` that are gone at the end. One that was killed has left its own: they go, too."""
    for left in to.parent.glob(f".{to.name}.*.part"):
        pid = left.name.removesuffix(".part").split(".")[-2]
        if pid.isdecimal() and not Path(f"/proc/{pid}").exists():
            left.unlink(missing_ok=True)
    drafts = [to.with_name(f".{to.name}.{os.getpid()}.{kind}.part") for kind in ("db", "tar")]
    try:
        for draft in drafts:
            os.close(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        yield drafts[0], drafts[1]
    finally:
        for draft in drafts:
            for path in (draft, Path(f"{draft}-journal"), Path(f"{draft}-wal"), Path(f"{draft}-shm")):
                path.unlink(missing_ok=True)


@contextlib.contextmanager
def _disk(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise errors.MusterError(
            f"{path} cannot be written: {error.strerror or error}", hint="choose another place"
        ) from error


# Putting one back --------------------------------------------------------------------------------


def restore(home: Path, backup: Path, *, force: bool = False) -> Restored:
    """Put a backup in the place of what a home has. Raises MusterError; the home is then as it was.

    `force`: also one of another home, or one of which nobody knows.
    """
    with _disk(home):
        own_folder(home)
    with _alone(home), _disk(home), _drafts(home / homes.DATABASE) as (draft, _):
        identity, before = homes.read_identity(home), _look_if_possible(home)
        manifest, beside = _unpack(backup, draft, identity)
        kept = _sound(draft, backup)
        mine = _whose(kept, manifest, identity, before, backup, force=force)
        _count_on(draft, backup, mine, home)
        aside = homes.set_aside(home, "restore")
        os.replace(draft, home / homes.DATABASE)
        sync_folder(home)
        put = tuple(name for name, raw in beside.items() if _put_if_missing(home / name, raw))
        found = homes.look(home)
        homes.settle(home, mine, found, forget=True)
    strangers = {name for _, name in found.strangers}
    return Restored(
        mine,
        manifest.made_at if manifest is not None else None,
        len(kept.trainings),
        str(aside) if aside is not None else None,
        put,
        tuple(name for _, name in found.living if name not in strangers),
        tuple(sorted(strangers)),
        tuple(found.unexplained),
    )


@contextlib.contextmanager
def _alone(home: Path) -> Iterator[None]:
    """As long as this lasts no control plane serves the home."""
    try:
        lock = HomeLock(home)
    except BlockingIOError:
        raise errors.Conflict(
            "the control plane runs: what it knows cannot be replaced under it", hint="muster server stop, then again"
        ) from None
    try:
        yield
    finally:
        lock.release()


def _look_if_possible(home: Path) -> Found | None:
    try:
        return homes.look(home)
    except errors.Unavailable:
        return None  # it cannot be read: a reason to restore


def _unpack(backup: Path, draft: Path, identity: HomeIdentity | None) -> tuple[Manifest | None, dict[str, bytes]]:
    """The database of a backup as a draft; its manifest, and what is beside. A plain copy of a database has neither."""
    with _trusted(backup) as file:
        start = file.read(len(_SQLITE))
        file.seek(0)
        if start == _SQLITE:
            _copy(file, draft)
            _copy_wal(backup, draft)
            return None, {}
        try:
            with tarfile.open(fileobj=file, mode="r:") as tar:
                return _unpack_tar(tar, backup, draft, identity)
        except (tarfile.TarError, EOFError) as error:
            raise _unusable(backup, f"it is not a backup, or not all of one ({error})") from error


def _unpack_tar(
    tar: tarfile.TarFile, backup: Path, draft: Path, identity: HomeIdentity | None
) -> tuple[Manifest, dict[str, bytes]]:
    first = tar.next()
    if first is None or first.name != MANIFEST:
        raise _unusable(backup, "it is not a backup")
    manifest = _read_manifest(_taken_from(tar, first, _MOST_MANIFEST, backup), backup)
    if identity is not None and identity.id == manifest.home and not _is_sealed(manifest, identity):
        raise _unusable(backup, "it was changed since this home made it: its seal is broken")
    found: dict[str, str] = {}
    beside: dict[str, bytes] = {}
    while (entry := tar.next()) is not None:
        if entry.name == homes.DATABASE:
            found[entry.name] = _copy(_opened(tar, entry, backup), draft)
        elif entry.name in BESIDE:
            beside[entry.name] = raw = _taken_from(tar, entry, _MOST_BESIDE, backup)
            found[entry.name] = hashlib.sha256(raw).hexdigest()
        else:
            raise _unusable(backup, f"it has a file that no backup has: {entry.name[:80]!r}")
    if found != dict(manifest.files) or homes.DATABASE not in found:
        raise _unusable(backup, "its files are not those that its manifest lists: it is torn, or was changed")
    return manifest, beside


def _read_manifest(raw: bytes, backup: Path) -> Manifest:
    try:
        data = json.loads(raw)
        if isinstance(data, dict) and int(data.get("format", 0)) > FORMAT:
            raise _unusable(backup, f"a newer muster made it (format {data['format']}, this one knows {FORMAT})")
        return from_wire(Manifest, data, strict=False)
    except (ValueError, TypeError, Invalid, RecursionError) as error:
        raise _unusable(backup, f"its manifest cannot be read: {str(error)[:200]}") from error


def _whose(
    kept: Kept,
    manifest: Manifest | None,
    identity: HomeIdentity | None,
    before: Found | None,
    backup: Path,
    *,
    force: bool,
) -> str:
    """The identity that the home has afterwards."""
    if manifest is not None and manifest.home != kept.home:
        raise _unusable(backup, "its database is not that of the home which its manifest names")
    marks = {*(before.marks.values() if before is not None else ()), *([identity.id] if identity is not None else [])}
    used = before is None or before.used
    if not force and (marks - {kept.home} or (used and not kept.home)):
        whose = "of another home" if kept.home else "of a home that nobody knows"
        raise errors.Conflict(f"{backup} is {whose}", retryable=False, hint="give --force to make it this home's")
    return (identity.id if identity is not None else "") or next(iter(marks), "") or kept.home or homes.new_identity()


def _count_on(draft: Path, backup: Path, home: str, where: Path) -> None:
    """Nothing that was numbered since the backup is numbered again; a copy of before the restore shows as older."""
    count = reached.read(where / homes.REACHED)
    try:
        with contextlib.closing(sqlite3.connect(draft, isolation_level=None)) as database:
            database.execute("PRAGMA journal_mode = DELETE")
            schema.bring_up_to_date(database, backup, home)
            database.execute("BEGIN")
            version = max(int(row[0] or 0) for row in database.execute(_LATEST))
            version = max(version, schema.number(database, schema.FLOOR))
            commits = max(schema.number(database, schema.COMMITS), count.written, count.forced) + 1
            schema.put_note(database, schema.FLOOR, str(version + _AHEAD))
            schema.put_note(database, schema.COMMITS, str(commits))
            database.execute("UPDATE sqlite_sequence SET seq = seq + ? WHERE name = 'events'", (_AHEAD,))
            database.execute("COMMIT")
    except sqlite3.Error as error:
        raise _unusable(backup, f"its database cannot be used: {error}") from error
    with open(draft, "rb") as file:
        os.fsync(file.fileno())


def _put_if_missing(path: Path, raw: bytes) -> bool:
    """What is there stays: a token that was revoked since must not come back to life."""
    if path.exists():
        return False
    write_private(path, raw.decode(errors="replace"), durable=True)
    return True


# Reading what somebody hands us ------------------------------------------------------------------


@contextlib.contextmanager
def _trusted(path: Path) -> Iterator[IO[bytes]]:
    """A regular file that nobody else can have written: it has tokens in it, and what workers are to run."""
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except FileNotFoundError:
        raise errors.NotFound(f"there is no file {path}") from None
    except OSError as error:
        raise errors.MusterError(f"{path} cannot be read: {error.strerror}") from error
    with open(opened, "rb") as file:
        found = os.fstat(opened)
        if not stat.S_ISREG(found.st_mode):
            raise _unusable(path, "it is not a regular file")
        if found.st_uid not in (0, os.geteuid()) or found.st_mode & 0o022:
            hint = f"if you trust it: cp {path} mine && chmod 600 mine, then restore mine"
            raise errors.MusterError(f"{path} is refused: other users can write it", code="backup_unusable", hint=hint)
        yield file


def _opened(tar: tarfile.TarFile, entry: tarfile.TarInfo, backup: Path) -> IO[bytes]:
    file = tar.extractfile(entry) if entry.isreg() and not entry.issparse() else None
    if file is None:
        raise _unusable(backup, f"{entry.name[:80]!r} in it is no file")
    return file


def _taken_from(tar: tarfile.TarFile, entry: tarfile.TarInfo, most: int, backup: Path) -> bytes:
    if entry.size > most:
        raise _unusable(backup, f"{entry.name[:80]!r} in it is larger than it can be")
    return _opened(tar, entry, backup).read()


def _copy(file: IO[bytes], to: Path) -> str:
    """Copy what is left of a file; its digest."""
    digest = hashlib.sha256()
    with open(to, "r+b") as copy:
        copy.truncate(0)
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            copy.write(chunk)
    return digest.hexdigest()


def _copy_wal(backup: Path, draft: Path) -> None:
    """A copy of a database may have its latest writes in a second file, as what a restore moved aside does."""
    beside = Path(f"{backup}-wal")
    if beside.exists():
        with _trusted(beside) as file:
            wal = Path(f"{draft}-wal")
            os.close(os.open(wal, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            _copy(file, wal)


def _digest_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _small(path: Path) -> bytes | None:
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(raw) > _MOST_BESIDE:
        raise errors.MusterError(f"{path} is too large for a backup")
    return raw


def _seal(manifest: Manifest, identity: HomeIdentity) -> str:
    shown = json.dumps(to_wire(replace(manifest, seal="")), sort_keys=True).encode()
    return hmac.new(bytes.fromhex(identity.secret), shown, hashlib.sha256).hexdigest()


def _is_sealed(manifest: Manifest, identity: HomeIdentity) -> bool:
    return hmac.compare_digest(manifest.seal.encode(), _seal(manifest, identity).encode())


def _unusable(backup: Path, why: str) -> errors.MusterError:
    return errors.MusterError(f"{backup} cannot be used: {why}; nothing was changed", code="backup_unusable")


def _now() -> datetime:
    return datetime.now(UTC)

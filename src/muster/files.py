"""Where are muster's own files, how is one replaced in one step, and how is one opened where others write?

What lies in somebody else's folder may be a link to a secret, a pipe that nobody writes, or a device: only a regular
file is opened, only by its one name, without following links and without waiting. And a folder in a place that all
users share may be somebody else's, under the name that ours would have. Standard library only.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

PREFIX = "muster-"  # of temporary folders of ours
_MOST_REMOVED = 16  # folders that one start removes, so that it is not slow
_CAREFUL = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


def home(env: Mapping[str, str] = os.environ) -> Path:
    """Where this user's control plane, coordinators and tokens are."""
    return Path(os.path.expanduser(env.get("MUSTER_HOME") or "~/.muster")).absolute()


def place() -> str:
    """Which files a process sees: two that say the same see the same ones. Nobody can guess it; empty if unknown."""
    import hashlib

    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        told = f"{boot} {os.stat('/proc/self/ns/mnt').st_ino} {os.stat('/').st_dev} {os.stat('/').st_ino}"
    except OSError:
        return ""
    return hashlib.sha256(told.encode()).hexdigest()[:32]


def write_private(path: Path, text: str, *, durable: bool = False) -> None:
    """Replace a file in one step; nobody but its owner can ever read it.

    A killed process leaves the old one or the new one. `durable`: so does a machine that loses its power, and the new
    one is on the disk when this returns.
    """
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    draft = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        with open(draft, "x", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
            file.write(text)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    if durable:
        sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """What was renamed or linked there is on the disk when this returns."""
    opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def own_folder(path: Path) -> None:
    """Have the folder of what we trust, so that nobody else can write in it. Else OSError says why it cannot be.

    Others may have written in it until now: it is closed to them first, and nothing that is there may be theirs.
    """
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    found, mine = os.stat(path), {0, os.geteuid()}
    if found.st_uid not in mine:
        raise OSError(errno.EPERM, "belongs to another user", str(path))
    if not found.st_mode & 0o022:
        return
    if found.st_uid != os.geteuid():
        raise OSError(errno.EPERM, "may be written by others; choose a folder in it", str(path))
    os.chmod(path, stat.S_IMODE(found.st_mode) & ~0o022)
    with os.scandir(path) as entries:
        theirs = [entry.path for entry in entries if entry.stat(follow_symlinks=False).st_uid not in mine]
    if theirs:
        os.chmod(path, stat.S_IMODE(found.st_mode))  # it is looked at again the next time
        raise OSError(errno.EPERM, "others may write here, and this is not yours: look at it, and remove it", theirs[0])


def scratch(*names: str) -> Path:
    """A folder that only we can write, in the system's temporary one. It is made, and lasts.

    Its usual name is known to all, so that somebody may have taken it first; then it gets one that nobody can guess.
    """
    import tempfile  # not everybody who opens a file has to pay for it

    place = _shared_place()
    usual = place / f"muster-{os.getuid()}"
    try:
        return _private_below(usual, names)
    except OSError:
        return _private_below(Path(tempfile.mkdtemp(prefix=f"{usual.name}-", dir=place)), names)


def temporary() -> str:
    """Make a folder for this process in the temporary folder; the caller removes it.

    Folders of processes that were killed are removed first.
    """
    import tempfile

    parent = _shared_place()
    _remove_abandoned(parent)
    return tempfile.mkdtemp(prefix=_prefix_of_process(), dir=parent)


def _prefix_of_process() -> str:
    """Return the start of a folder's name that says whose it is; without a process where the kernel does not say it.

    The name has the process from the first moment on, so that no folder is ever without an owner.
    """
    started, space = start_of(os.getpid()), _process_space()
    return f"{PREFIX}{os.getpid()}-{started}-{space}-" if started and space else PREFIX


def start_of(pid: int) -> int | None:
    """Return when a process started, in clock ticks after the boot; None if there is no such process."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (FileNotFoundError, ProcessLookupError):
        return None


def _process_space() -> str:
    """Return a name for the boot and the pid namespace in which a pid means something; "" if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot[:8]}-{os.stat('/proc/self/ns/pid').st_ino:x}"
    except OSError:
        return ""


def _remove_abandoned(parent: Path) -> None:
    """Remove folders whose process is known to be dead: of this boot and pid namespace, and of this user."""
    import re
    import shutil

    if not (space := _process_space()):
        return
    name = re.compile(rf"{PREFIX}(\d+)-(\d+)-{re.escape(space)}-\w+")
    removed = 0
    with os.scandir(parent) as entries:
        for entry in entries:
            match = name.fullmatch(entry.name)
            if match is None or removed >= _MOST_REMOVED:
                continue
            try:
                is_own = entry.stat(follow_symlinks=False).st_uid == os.geteuid() and entry.is_dir(
                    follow_symlinks=False
                )
                is_dead = start_of(int(match[1])) != int(match[2])
            except OSError:
                continue  # in doubt it stays
            if is_own and is_dead:
                shutil.rmtree(entry.path, ignore_errors=True)
                removed += 1


def _shared_place() -> Path:
    """The temporary folder, or one of our own where others could put something else in the place of what we make.

    If there is no home either, as in a container of which only a volume can be written, nobody else is there.
    """
    import tempfile

    place = Path(tempfile.gettempdir()).resolve()
    if not _others_may_rename_in(place):
        return place
    try:
        return private_folder(home() / "scratch")
    except OSError:
        return place


def _others_may_rename_in(place: Path) -> bool:
    """Also what is on the way to it. A group of the same number as its only member is no company."""
    trusted = {0, os.geteuid(), os.stat("/").st_uid}  # in a container root may have another number
    for one in (place, *place.parents):
        found = os.stat(one)
        shared = found.st_mode & stat.S_IWOTH or (found.st_mode & stat.S_IWGRP and found.st_gid != found.st_uid)
        if found.st_uid not in trusted or (shared and not found.st_mode & stat.S_ISVTX):
            return True
    return False


def _private_below(top: Path, names: tuple[str, ...]) -> Path:
    path = private_folder(top)
    for name in names:
        path = private_folder(path / name)
    return path


def private_folder(path: Path) -> Path:
    """Have a folder, no link, that is ours and closed to others, with those above it. Else OSError says what it is."""
    try:
        path.mkdir(mode=0o700)
    except FileNotFoundError:
        private_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)
    except FileExistsError:
        pass  # whose it is shows below
    with folder(path) as opened:
        found = os.fstat(opened)
        if found.st_uid != os.geteuid():
            raise OSError(errno.EPERM, "belongs to another user", str(path))
        if stat.S_IMODE(found.st_mode) & 0o077:
            os.fchmod(opened, 0o700)
    return path


@contextmanager
def folder(name: str | Path, within: int | None = None) -> Iterator[int]:
    """A descriptor of a folder that is no link; `within` is that of the folder which has it."""
    opened = os.open(name, os.O_RDONLY | os.O_DIRECTORY | _CAREFUL, dir_fd=within)
    try:
        yield opened
    finally:
        os.close(opened)


@contextmanager
def reading(name: str | Path, within: int | None = None) -> Iterator[int]:
    """A descriptor of a regular file. Anything else raises OSError and is not touched."""
    _check(os.stat(name, dir_fd=within, follow_symlinks=False), name)
    opened = os.open(name, os.O_RDONLY | _CAREFUL, dir_fd=within)
    try:
        _check(os.fstat(opened), name)  # it may be another one by now
        yield opened
    finally:
        os.close(opened)


def read_bytes(name: str | Path, most: int) -> bytes:
    """How a regular file begins. Anything else raises OSError, and nobody waits for it."""
    with reading(name) as opened:
        return os.read(opened, most)


def read_text(path: Path) -> str:
    """What a regular file says, also by way of a link. Anything else raises OSError, and nobody waits for it."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EPERM, "is not a regular file", str(path))
        return file.read()


def read_private(path: Path, most: int = 4096) -> str:
    """What a file says that only we can read and write. OSError if it is any other."""
    with reading(path) as opened:
        found = os.fstat(opened)
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise OSError(errno.EPERM, "can be read or written by others", str(path))
        return os.read(opened, most).decode(errors="replace")


@contextmanager
def changing(name: str | Path, within: int | None = None) -> Iterator[int]:
    """A descriptor of a regular file that is there, to change it."""
    _check(os.stat(name, dir_fd=within, follow_symlinks=False), name)
    opened = os.open(name, os.O_RDWR | _CAREFUL, dir_fd=within)
    try:
        _check(os.fstat(opened), name)
        yield opened
    finally:
        os.close(opened)


@contextmanager
def appending(name: str | Path) -> Iterator[int]:
    """A descriptor to write at the end of a regular file, which is made if there is none."""
    opened = os.open(name, os.O_WRONLY | os.O_APPEND | os.O_CREAT | _CAREFUL, 0o666)
    try:
        _check(os.fstat(opened), name)
        os.set_blocking(opened, True)
        yield opened
    finally:
        os.close(opened)


def is_plain(found: os.stat_result) -> bool:
    """A second name would make it a way to show a file of another folder, as a link does."""
    return stat.S_ISREG(found.st_mode) and found.st_nlink <= 1


def _check(found: os.stat_result, name: str | Path) -> None:
    if not is_plain(found):
        raise OSError(errno.EPERM, "is not a regular file with one name", str(name))

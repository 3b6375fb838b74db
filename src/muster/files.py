"""Where are muster's own files, how is one replaced in one step, and how is one opened where others write?

What lies in somebody else's folder may be a link to a secret, a pipe that nobody writes, or a device: only a regular
file is opened, only by its one name, without following links and without waiting. Standard library only.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

_CAREFUL = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY


def home(env: Mapping[str, str] = os.environ) -> Path:
    """Where this user's control plane, coordinators and tokens are."""
    return Path(env.get("MUSTER_HOME") or "~/.muster").expanduser().absolute()


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
        parent = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(parent)
        finally:
            os.close(parent)


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

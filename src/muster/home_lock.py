"""The lock of a home: held by the control plane that serves it. Standard library only.

The lock is on the folder itself, so that removing files does not free it, and on HOME/daemon.lock, because network file
systems refuse to lock a folder. Where only the file is locked, `is_ours` detects that the file was removed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from pathlib import Path

LOCK_FILE = "daemon.lock"
PROBE_S = 0.5  # how long other commands that only look may keep the lock from its next holder

_PLAIN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_POLL_S = 0.01
_NO_FOLDER_LOCKS = {errno.EBADF, errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


class HomeLock:
    """A lock on a home that is held until `release`, or until the process ends."""

    def __init__(self, home: Path) -> None:
        """Raise BlockingIOError if another process holds it, OSError if it cannot be taken."""
        self._home = home
        self._is_folder_locked = True
        self._folder = os.open(home, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._file = -1
        try:
            self._file = os.open(home / LOCK_FILE, os.O_RDWR | os.O_CREAT | _PLAIN, 0o600)
            try:
                _lock(self._folder)
            except BlockingIOError:
                raise
            except OSError as error:
                if error.errno not in _NO_FOLDER_LOCKS:
                    raise
                self._is_folder_locked = False
            _lock(self._file)
        except OSError:
            self.release()
            raise

    def is_ours(self) -> bool:
        """Return whether the home still has its path, and its lock. A file system that does not answer says nothing."""
        try:
            if not _is_at(self._folder, self._home):
                return False
            return self._is_folder_locked or _is_at(self._file, self._home / LOCK_FILE)
        except OSError:
            return True

    def release(self) -> None:
        for opened in (self._file, self._folder):
            if opened >= 0:
                os.close(opened)
        self._file = self._folder = -1


def is_locked(home: Path) -> bool:
    """Return whether a process holds the lock of that home."""
    return _is_held(home, os.O_DIRECTORY | os.O_CLOEXEC) or _is_held(home / LOCK_FILE, _PLAIN)


def wait_until_free(home: Path) -> None:
    """Wait until no process holds the lock of that home. The kernel frees it when the process has ended."""
    for path, flags in ((home, os.O_DIRECTORY | os.O_CLOEXEC), (home / LOCK_FILE, _PLAIN)):
        try:
            opened = os.open(path, os.O_RDONLY | flags)
        except OSError:
            continue
        try:
            fcntl.flock(opened, fcntl.LOCK_SH)
        except OSError:
            continue
        finally:
            os.close(opened)


def _lock(opened: int) -> None:
    until = time.monotonic() + PROBE_S
    while True:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > until:
                raise
            time.sleep(_POLL_S)


def _is_held(path: Path, flags: int) -> bool:
    try:
        opened = os.open(path, os.O_RDONLY | flags)
    except OSError:
        return False
    try:
        fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(opened)


def _is_at(opened: int, path: Path) -> bool:
    """Return whether that path names the open file or folder."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(opened))
    except (FileNotFoundError, NotADirectoryError):
        return False

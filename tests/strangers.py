"""Another user of this machine, for tests of what such a one can do to us. Only root can be two users."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from shutil import rmtree

import pytest

NOBODY = 65534

two_users = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")

_TAKE_ITS_PLACE = f"""
import asyncio, os, socket, sys
from pathlib import Path
from muster.node import shell
from muster.types.frames import AskFrame, HelloFrame, Introduction
from muster.types.world import MemberId, RunId
from muster.world.connection import Connection, CoordinatorRefused, ask
os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY})
os.chdir("/")
os.umask(0)
"""


def stranger(code: str, *words: object) -> subprocess.CompletedProcess[str]:
    """What comes of code that another user runs; it finds the words in `sys.argv[1:]`."""
    command = [sys.executable, "-c", _TAKE_ITS_PLACE + code, *map(str, words)]
    env = {key: value for key, value in os.environ.items() if not key.startswith("MUSTER_")}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)


@contextmanager
def shared_place(mode: int = 0o1777) -> Iterator[Path]:
    """A folder as /tmp is one."""
    path = Path(tempfile.mkdtemp(prefix="shared-", dir="/tmp"))
    path.chmod(mode)
    try:
        yield path
    finally:
        rmtree(path)

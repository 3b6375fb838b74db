"""The interpreter that a training asks for, checked before a worker starts with it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from muster import __version__

_PATIENCE_S = 60.0
_MOST_KNOWN = 64
_VERSIONS = "import sys, muster; print(*sys.version_info[:2], muster.__version__)"


# Interpreters that hang must not take the threads that all other work of the control plane needs.
_threads = ThreadPoolExecutor(2, thread_name_prefix="interpreter")
_good: dict[tuple[str, int], None] = {}  # interpreters that passed, with the times of their files


def program(asked: str | None) -> list[str]:
    """Return the command of `muster-node` under the interpreter, or under our own. Raise ValueError if it cannot be."""
    if asked is None or _is_own(asked):
        beside = os.path.join(os.path.dirname(sys.executable), "muster-node")
        return [beside] if os.access(beside, os.X_OK) else [sys.executable, "-m", "muster.node.cli"]
    return [asked, "-m", "muster.node.cli"]


async def check(asked: str | None) -> None:
    """Raise ValueError, which names both interpreters, unless workers can run under the one that was asked for."""
    if asked is None or _is_own(asked):
        return
    changed = _stat(asked)
    if (asked, changed) in _good:
        return
    if why := await asyncio.get_running_loop().run_in_executor(_threads, _problem, asked):
        raise _refused(asked, why)
    # A refusal is not remembered: users follow its hint and try again, and a busy machine may have been too slow.
    _good[asked, changed] = None
    while len(_good) > _MOST_KNOWN:
        del _good[next(iter(_good))]


def _is_own(asked: str) -> bool:
    return os.path.abspath(asked) == os.path.abspath(sys.executable)


def _stat(asked: str) -> int:
    """Return when the interpreter's file was changed. Raise ValueError unless it is a program that is safe to run."""
    try:
        state = os.stat(asked)
    except OSError as error:
        raise _refused(asked, error.strerror or "it cannot be read") from None
    if not os.path.isfile(asked) or not os.access(asked, os.X_OK):
        raise _refused(asked, "it is not a program")
    if state.st_uid not in (0, os.geteuid()) or state.st_mode & 0o002:
        raise _refused(asked, "another user can change it")
    return state.st_mtime_ns


def _problem(asked: str) -> str:
    """Return what is wrong with an interpreter, or nothing."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "MUSTER_"))}
    command = [asked, "-c", _VERSIONS]
    try:
        answer = subprocess.run(command, env=env, cwd="/", capture_output=True, text=True, timeout=_PATIENCE_S)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"it does not answer: {error}"
    words = answer.stdout.split()
    if answer.returncode or len(words) != 3:
        last = (answer.stderr.strip().splitlines() or [f"exit code {answer.returncode}"])[-1]
        return f"muster cannot be imported there: {last}"
    if words[2] != __version__:
        return f"it has muster {words[2]}, the control plane has {__version__}"
    return ""


def _refused(asked: str, why: str) -> ValueError:
    hint = "Install muster there, or submit with --interpreter none to use the control plane's."
    return ValueError(f"interpreter {asked}: {why}; the control plane runs {sys.executable}. {hint}")

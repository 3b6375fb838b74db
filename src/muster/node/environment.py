"""Virtual environments with the packages that trainings require, made once for the same requirements.

An environment sees what the interpreter that runs the agent sees, muster among it, and what is installed in it comes
first. Its name covers all that pip or uv reads to make it. Namespaces share neither environments nor the caches of pip
and uv. Several workers of one machine that want the same environment wait for the first of them. Standard library only.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from muster import files
from muster.node import installer_inputs
from muster.node.installer_inputs import CannotMake

__all__ = ["CannotMake", "python"]

UNUSED_S = 14 * 86_400.0
LAST_LINES = 400
_WHOLE, _LOCK, _PARENT = "whole", ".lock", "_muster_parent.pth"
_OPTIONS, _FILES = ("-e", "--editable"), ("-r", "--requirement", "-c", "--constraint")
_SAFE_PATH = ("-P",)  # a pip.py or logging.py beside the script is no part of pip
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_OWN = "_own"  # of an agent that no control plane started; no namespace has such a name


def python(lines: Sequence[str], cache: Path, namespace: str) -> str:
    """Return the interpreter of an environment with those. Lines that name files mean those of the current folder."""
    if namespace and not _NAMESPACE.fullmatch(namespace):
        raise CannotMake(f"{namespace[:80]!r} is no name of a namespace")
    group = namespace or _OWN
    environments = files.private_folder(cache / "environments")
    folder = files.private_folder(environments / group)
    caches = {
        "PIP_CACHE_DIR": str(files.private_folder(cache / "pip" / group)),
        "UV_CACHE_DIR": str(files.private_folder(cache / "uv" / group)),
    }
    # What was downloaded is found again by its address. A proxy of another namespace may have answered there.
    env = {**os.environ, **caches}
    place = folder / installer_inputs.name_of(lines, env, Path.cwd())
    _forget_unused(environments)
    lock = os.open(f"{place}{_LOCK}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(lock, fcntl.LOCK_SH)  # comes when the worker that makes it is done
    if not (place / _WHOLE).exists():
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / _WHOLE).exists():
            _make(place, lines, env)
        fcntl.flock(lock, fcntl.LOCK_SH)
    os.utime(place / _WHOLE)
    os.set_inheritable(lock, True)  # held for as long as we live, also as another program
    return str(place / "bin" / "python")


def _make(place: Path, lines: Sequence[str], env: Mapping[str, str]) -> None:
    shutil.rmtree(place, ignore_errors=True)
    print(f"muster-node: making an environment with {len(lines)} requirements", file=sys.stderr, flush=True)
    wanted = f"{place}.txt"
    Path(wanted).write_text("\n".join(map(_placed, lines)) + "\n")
    uv = shutil.which("uv")
    made = [uv, "venv", "--python", sys.executable] if uv else [sys.executable, *_SAFE_PATH, "-m", "venv"]
    _run([*made, str(place)], env)
    _show_ours(place)
    own = str(place / "bin" / "python")
    install = (
        [uv, "pip", "install", "--python", own] if uv else [own, *_SAFE_PATH, "-m", "pip", "install", "--no-input"]
    )
    _run([*install, "-r", wanted], env)
    (place / _WHOLE).touch()


def _placed(line: str) -> str:
    """A relative path means the folder that we are in, wherever the line is read."""
    option, _, rest = line.strip().partition(" ")
    if (option in _OPTIONS and rest.strip().startswith(".")) or option in _FILES:
        return f"{option} {os.path.abspath(rest.strip())}"
    return os.path.abspath(option) + line.strip()[len(option) :] if option.startswith(".") else line


def _show_ours(place: Path) -> None:
    """What our interpreter has installed, behind what the environment has."""
    paths = dict.fromkeys(sysconfig.get_paths()[kind] for kind in ("purelib", "platlib"))
    site = next(place.glob("lib/python*/site-packages"))
    lines = [f"import site; site.addsitedir({path!r})" for path in paths]
    (site / _PARENT).write_text("\n".join(lines) + "\n")


def _run(command: Sequence[str], env: Mapping[str, str]) -> None:
    """What it prints is ours to print; its last words say why it failed."""
    quiet = {**env, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_COLOR": "1", "NO_COLOR": "1"}
    quiet.pop("PYTHONPATH", None)
    last = ""
    try:
        with subprocess.Popen(
            command, env=quiet, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as child:
            assert child.stdout is not None
            for line in child.stdout:
                sys.stderr.write(line)
                if line.strip() and not (last.startswith("ERROR") and not line.startswith("ERROR")):
                    last = line.strip()[:LAST_LINES]
            sys.stderr.flush()
    except OSError as error:
        raise CannotMake(f"{command[0]} cannot be run: {error}") from None
    if child.returncode != 0:
        raise CannotMake(last or f"{' '.join(command[:4])} … exits with {child.returncode}")


def _forget_unused(folder: Path) -> None:
    """Remove environments of all namespaces that no worker has used for long, and none uses now."""
    for whole in folder.glob(f"*/*/{_WHOLE}"):
        with contextlib.suppress(OSError):
            if time.time() - whole.stat().st_mtime < UNUSED_S:
                continue
            lock = os.open(f"{whole.parent}{_LOCK}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(whole.parent, ignore_errors=True)
            finally:
                os.close(lock)

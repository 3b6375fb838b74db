"""The oldest torch whose ranks can use a round's store, and the refusal of an older one. Imports no torch."""

from __future__ import annotations

import os
import re
import sys
from importlib.machinery import PathFinder

OLDEST = (2, 8)
_NUMBER = re.compile(r"(\d+)\.(\d+)")
_WRITTEN = re.compile(r"""(?m)^__version__(?:\s*:\s*\w+)?\s*=\s*['"]([^'"\n]{1,100})['"]""")
_MOST = 1 << 16


def refusal(version: str | None = None) -> str:
    """Return one line that says why this version (default: this process's torch) is refused; empty if it is not."""
    version = installed() if version is None else version
    number = _NUMBER.match(version)
    if number is None or (int(number[1]), int(number[2])) >= OLDEST:
        return ""
    needed = ".".join(map(str, OLDEST))
    return (
        f"torch {version} is too old: muster needs torch {needed} or newer. "
        f"Run `{sys.executable} -m pip install 'torch>={needed}'` on each worker"
    )


def installed() -> str:
    """Return the version of the torch that is imported or would be imported; empty if there is none."""
    if (torch := sys.modules.get("torch")) is not None:
        return str(getattr(torch, "__version__", ""))
    spec = PathFinder.find_spec("torch")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        try:
            with open(os.path.join(folder, "version.py"), errors="replace") as file:
                written = _WRITTEN.search(file.read(_MOST))
        except OSError:
            continue
        if written is not None:
            return written[1]
    if spec is None:
        return ""
    from importlib import metadata

    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return ""

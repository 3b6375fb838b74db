"""The check of one package, in a process of its own with little memory, little time and low priority.

usage: python -m muster.package_check FILE DIGEST    Print `whole SIZE` or `refused REASON` on one line.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

from muster import package

MEMORY_BYTES = 256 << 20
CPU_S = 60
NICE = 15


def main() -> None:
    _limit()
    file, digest = sys.argv[1:]
    try:
        answer = f"whole {package.check(Path(file), digest)}"
    except package.BadPackage as wrong:
        answer = f"refused {wrong}"
    except MemoryError:
        answer = f"refused it cannot be checked with {package.shown(MEMORY_BYTES)} of memory"
    sys.stdout.buffer.write(answer.encode(errors="backslashreplace") + b"\n")


def _limit() -> None:
    os.nice(NICE)
    for what, most in (
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_CPU, CPU_S),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hard = resource.getrlimit(what)
        resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


if __name__ == "__main__":
    main()

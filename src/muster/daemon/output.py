"""How long does `daemon.log` become? A control plane that runs for months keeps two files of a bounded length.

Whoever started it in the background has opened the file for it. What is written meanwhile goes to one or the other.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

MOST = 8 << 20  # of each of the two


def keep_short(path: Path, most: int = MOST) -> bool:
    """Go on in a new file if ours is too long; the one before is kept beside as `.1`. Whether it was done."""
    with contextlib.suppress(OSError):  # a disk without room, or a terminal: it stays as it is
        outputs = [number for number in (1, 2) if os.path.samestat(os.fstat(number), os.stat(path))]
        if not outputs or os.stat(path).st_size <= most:
            return False
        draft = path.with_name(f"{path.name}.new")
        made = os.open(draft, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            os.replace(path, path.with_name(f"{path.name}.1"))
            os.replace(draft, path)
            for number in outputs:
                os.dup2(made, number)
        finally:
            os.close(made)
        return True
    return False

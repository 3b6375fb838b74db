"""What is left of a lab, and how does all of it go? Processes, control groups, the folder; mounts go by themselves.

Started as a program it waits until its stdin ends, which also happens when the test process is killed.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from tests.containers import cgroups
from tests.kube.guard import kill_marked


def sweep(mark: str, group: str, folder: Path) -> list[str]:
    """What would not go, in words."""
    left = [] if kill_marked(mark) else [f"processes with {mark}"]
    left += [str(place) for place in cgroups.remove(group)]
    shutil.rmtree(folder, ignore_errors=True)
    return left + ([str(folder)] if folder.exists() else [])


class Janitor:
    """Sweeps when this process ends, however it ends."""

    def __init__(self, mark: str, group: str, folder: Path) -> None:
        words = [sys.executable, "-m", "tests.containers.janitor", mark, group, str(folder)]
        root = Path(__file__).parents[2]
        self._process = subprocess.Popen(words, cwd=root, stdin=subprocess.PIPE, start_new_session=True)

    def close(self) -> None:
        """Sweeps now; fails if anything is left."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(60) == 0, "something of the lab is left: see above"


if __name__ == "__main__":
    sys.stdin.buffer.read()
    if remains := sweep(sys.argv[1], sys.argv[2], Path(sys.argv[3])):
        sys.exit(f"left of the lab: {', '.join(remains)}")

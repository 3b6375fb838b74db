"""A rank that leaves a mark in a log which the ranks of all machines share, 200 times a second, until DIR/go is there.

usage: fenced.py DIR
"""

import os
import sys
import time
from pathlib import Path

BEAT_S = 0.005


class Marks:
    """One line each, appended by one call: the order of the lines is the order in which ranks were at work."""

    def __init__(self, folder: Path) -> None:
        self._file = os.open(folder / "fenced.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        env = os.environ
        self._who = f"{env['MUSTER_ROUND']} {env['RANK']} {env['WORLD_SIZE']} {env['MUSTER_WORKER']} {os.getpid()}"

    def mark(self, kind: str) -> None:
        os.write(self._file, f"{kind} {self._who} {time.monotonic():.6f}\n".encode())


def main() -> None:
    folder = Path(sys.argv[1])
    marks = Marks(folder)
    marks.mark("start")
    while not (folder / "go").exists():
        marks.mark("beat")
        time.sleep(BEAT_S)
    marks.mark("end")


if __name__ == "__main__":
    main()

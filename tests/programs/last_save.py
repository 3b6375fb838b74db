"""A rank that saves when it is asked to end: usage: last_save.py DIR. It is done saving when DIR/go exists."""

import os
import signal
import sys
import time
from pathlib import Path

folder, rank = Path(sys.argv[1]), os.environ["RANK"]


def save(*_: object) -> None:
    (folder / f"asked-{rank}").touch()
    while not (folder / "go").exists():
        time.sleep(0.01)
    (folder / f"saved-{rank}").touch()
    sys.exit(0)


signal.signal(signal.SIGTERM, save)
(folder / f"runs-{rank}").touch()
time.sleep(600)

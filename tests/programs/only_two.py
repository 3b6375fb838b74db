"""A program that can train with two workers, and with no other number. usage: only_two.py DIR"""

import os
import sys
import time
from pathlib import Path

import muster

folder, rank, size = Path(sys.argv[1]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
if size != 2:
    (folder / f"tried-{size}-{os.environ['MUSTER_ROUND']}").touch()
    if rank == size - 1:
        print("loading\nValueError: a batch of 8 cannot be cut in three", file=sys.stderr)
        sys.exit(1)
    time.sleep(600)  # for the one that is missing
step = int(os.environ["MUSTER_ROUND"]) * 1000
while not (folder / "go").exists():
    step += 1
    muster.progress(step)
    time.sleep(0.02)

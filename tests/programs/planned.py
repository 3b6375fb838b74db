"""Ranks that make steps together and lose none when it is planned. usage: planned.py DIR HOW

HOW: term (rank 0 saves when it is asked to end), word (when `muster.should_save()` says so), nothing (it asks, only).
All wait for each other before each step, as with a collective. A step that was made is a line of DIR/steps.
"""

import os
import signal
import sys
import time
from pathlib import Path

import muster

folder, how = Path(sys.argv[1]), sys.argv[2]
rank, size, number = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MUSTER_ROUND"))
kept = Path("kept")
step = int(kept.read_text()) if kept.exists() else 0


def save(step: int) -> None:
    draft = Path("kept.new")
    with open(draft, "w") as file:
        file.write(str(step))
    os.replace(draft, kept)


def asked(*_: object) -> None:
    if rank == 0:
        save(step)
    sys.exit(0)


def together() -> None:
    (folder / f"at-{number}-{step}-{rank}").touch()
    while not all((folder / f"at-{number}-{step}-{one}").exists() for one in range(size)):
        if (folder / "go").exists():
            sys.exit(0)
        time.sleep(0.002)


if how == "term":
    signal.signal(signal.SIGTERM, asked)
if rank == 0:
    with open(folder / "begun", "a") as begun:
        begun.write(f"{number} {size} {step}\n")
while not (folder / "go").exists():
    together()
    time.sleep(0.02)
    step += 1
    if rank == 0:
        with open(folder / "steps", "a") as steps:
            steps.write(f"{step}\n")
    muster.progress(step)
    if how != "term" and muster.should_save():
        (folder / f"told-{number}-{step}-{rank}").touch()
        if how == "word" and rank == 0:
            with muster.saving():
                save(step)

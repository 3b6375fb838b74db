"""Rank 0 saves in its first round, the others wait for the end of the test.

usage: saver.py DIR HOW    HOW: block (inside muster.saving), file (a file open for writing), files (one after another),
folder (files of a checkpoint, none of which is open for long, and pauses between them), folder-block (the same inside
muster.saving), logs (only what is no save), handler (saves when it is asked to end)
A save is over when DIR/finish exists.
"""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

import muster

folder, how = Path(sys.argv[1]), sys.argv[2]
rank, number = int(os.environ["RANK"]), int(os.environ["MUSTER_ROUND"])


def until(name: str) -> None:
    while not (folder / name).exists():
        time.sleep(0.01)


def write(path: str, wait: str = "finish") -> None:
    """A file that is whole only if its writer got to its end."""
    with open(path, "w") as file:
        file.write("begun")
        file.flush()
        (folder / f"saving-{path}").touch()
        until(wait)
        file.write(" and done")


def asked(*_: object) -> None:
    with muster.saving():
        Path("last").write_text("begun and done")
    sys.exit(0)


if rank == 0 and number == 0:
    if how == "block":
        with muster.saving():
            Path("half").write_text("begun")
            (folder / "saving-half").touch()
            until("finish")
            Path("half").write_text("begun and done")
    elif how == "file":
        write("half")
    elif how == "files":
        write("half")
        write("half2", wait="finish2")
    elif how.startswith("folder"):
        os.makedirs("checkpoint")
        with muster.saving() if how == "folder-block" else contextlib.nullcontext():
            for part in range(8):
                Path(f"checkpoint/{part}.pt").write_bytes(bytes(4096))
                if part == 1:
                    (folder / "saving-checkpoint").touch()
                time.sleep(0.15)
    elif how == "handler":
        signal.signal(signal.SIGTERM, asked)
    elif how == "logs":
        os.makedirs(".cache", exist_ok=True)
        kept = [open(name, "w") for name in ("train.log", "events.out.tfevents.1", ".cache/x")]  # noqa: SIM115
        kept.append(open("metrics", "a"))  # noqa: SIM115
(folder / f"runs-{number}-{rank}").touch()
until("go")

"""Stands in for `python -m muster.daemon`: takes the same arguments, and serves one training from a script's plane.

What it should do is told by files in its home: `phase` is the training's phase, `broken` makes it fail. It dies
when somebody waits for a change.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from muster.types.training import Phase
from tests.sdk.scripted import House, Plane, a_training, ended

LIFE_S = 60  # it goes by itself if a test forgets it


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--home", type=Path, required=True)
    parser.add_argument("--ready-fd", type=int, required=True)
    options = parser.parse_args()
    signal.alarm(LIFE_S)
    with open(options.home / "starts", "a") as starts:
        starts.write(f"{os.getpid()} {os.getsid(0)} {os.getcwd()}\n")
    lock = open(options.home / "daemon.lock", "w")  # noqa: SIM115 - held for life
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    if (options.home / "broken").exists():
        sys.exit("the database is from a newer version")
    plane = Plane(token="secret")
    (options.home / "token").write_text("secret\n")
    told = options.home / "phase"
    phase: Phase = "succeeded" if told.exists() and told.read_text() == "succeeded" else "ready"
    plane.put(a_training() if phase == "ready" else ended(a_training(), phase))
    plane.on_poll.append(lambda: os.kill(os.getpid(), signal.SIGKILL))
    house = House(plane, options.home)
    os.write(options.ready_fd, f"{house.url}\n".encode())
    os.close(options.ready_fd)
    signal.pause()


if __name__ == "__main__":
    main()

"""A worker's agent is killed with SIGKILL; a spare takes its rank and the training goes on from its checkpoint.

It runs under your own control plane (`muster ps` shows it), and removes the training at the end.

    .venv/bin/python examples/survive_kill.py
"""

from __future__ import annotations

import argparse
import os
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

import muster
from muster import DistributedTraining, WorldSize

TRAIN = Path(__file__).with_name("train.py")
PATIENCE_S = 120.0


def main(steps: int) -> None:
    with tempfile.TemporaryDirectory(prefix="survive-kill-") as folder, muster.Client() as client:
        training = client.train(
            script=TRAIN,
            args=[f"{folder}/checkpoint.pt", "--steps", str(steps)],
            world_size=WorldSize(min=2, target=2, max=2),
            spares=1,
            max_restarts=0,  # losing a worker costs none
        )
        print(f"submitted {training.name}")
        try:
            survive(client, training)
        finally:
            training.delete(timeout=PATIENCE_S)


def survive(client: muster.Client, training: DistributedTraining) -> None:
    for line in training.logs(follow=True):
        print(line)
        if "step 50:" in line:
            break
    training.refresh()
    victim = holder_of(training, rank=1)
    pid = pid_of(victim, training)
    print(f"kill -9 {pid}: the agent of {victim}, which has rank 1")
    os.kill(pid, signal.SIGKILL)
    until(client, training, lambda: len(training.ranks) == 2 and training.ranks[0].round > 0)
    print(f"{holder_of(training, rank=1)} has rank 1 now; restarts spent: {training.training.status.restarts}")
    training.result(timeout=PATIENCE_S)
    print("\n".join(training.logs(round=1)))
    print("what happened:")
    events = training.events()
    for event in events:
        assert event.at and events[0].at
        print(f"  {(event.at - events[0].at).total_seconds():7.3f} s  {event.reason:<15} {event.message}")
    print(f"{training.name} {training.phase}")


def until(client: muster.Client, training: DistributedTraining, reached: Callable[[], bool]) -> None:
    """The control plane tells of every change; nothing is asked for again and again."""
    for _ in client.watch():
        training.refresh()
        if reached():
            return
        if training.is_terminal:
            raise SystemExit(f"{training.name} has {training.phase} too early: {training.outcome}")


def holder_of(training: DistributedTraining, rank: int) -> str:
    return next(one.worker for one in training.ranks if one.rank == rank)


def pid_of(worker: str, training: DistributedTraining) -> int:
    """The worker's agent, as `pgrep -f` would find it."""
    wanted = {b"--name", worker.encode(), str(training.training.uid).encode()}
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
        except OSError:
            continue  # it has just ended
        if wanted <= set(words):
            return int(entry.name)
    raise SystemExit(f"{worker} is not running")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="more than 50, after which the worker is killed")
    main(parser.parse_args().steps)

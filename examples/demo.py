"""`make demo`: two workers train, a third stands by. One loses its agent, the world grows to three, and all succeed.

Everything is real: the control plane, separate processes, torch, gloo, SIGKILL. The timeline at the end is read from
the training's own journal. A home of its own is used and removed, so nothing of yours is touched and nothing stays.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import muster
from muster import DistributedTraining, WorldSize

PATIENCE_S = 120.0


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="muster-demo-") as folder:
        os.environ["MUSTER_HOME"] = f"{folder}/home"
        try:
            return demo(folder)
        finally:
            stop = [sys.executable, "-m", "muster.cli.main", "server", "stop", "--cancel"]
            subprocess.run(stop, check=False, stdout=subprocess.DEVNULL)


def demo(folder: str) -> int:
    say("submit a training of two workers and a spare")
    training = muster.distributed(
        script=str(Path(__file__).with_name("train.py")),
        args=[f"{folder}/checkpoint.pt", "--steps", "400"],
        name="demo",
        world_size=WorldSize(min=2, target=2, max=3),
        spares=1,
        max_restarts=0,
    )
    printer = threading.Thread(target=print_logs, daemon=True)
    printer.start()
    world = training.wait_until_min_world(timeout=PATIENCE_S)
    say(f"{world.ready} of {world.target} workers train")
    until_step(training, 30)

    victim = next(rank.worker for rank in training.ranks if rank.rank == 1)
    pid = pid_of(victim)
    say(f"kill -9 {pid}   (the agent of {victim}, which has rank 1)")
    os.kill(pid, signal.SIGKILL)
    until_step(training, 60, after_round=0)
    heir = next(rank.worker for rank in training.ranks if rank.rank == 1)
    say(f"healed: {heal_of(training)}; restarts = {training.training.status.restarts}")

    say("scale 2 → 3")
    told = training.scale(target=3)
    say(f"scale answers at once: ready {told.ready}, target {told.target}")
    training.wait_until_target_world(timeout=PATIENCE_S)
    say(next(condition.message for condition in training.conditions if condition.type == "TargetReached"))

    training.result(timeout=PATIENCE_S)
    printer.join(PATIENCE_S)
    codes = {exit.rank: exit.exit_code for exit in training.rank_exits}
    say(f"{training.phase}; exit codes by rank: {codes}")
    print_timeline(training)
    return 0 if heir != victim and codes == {0: 0, 1: 0, 2: 0} else 1


def print_logs() -> None:
    for line in muster.Client().get("demo").logs(follow=True):
        print(line, flush=True)


def until_step(training: DistributedTraining, step: int, after_round: int = -1) -> None:
    """Until every rank of a later round has come that far; the server tells of every change."""
    for change in muster.Client().watch():
        training.refresh()
        ranks = training.ranks
        if ranks and ranks[0].round > after_round and all((rank.step or 0) >= step for rank in ranks):
            return
        if change.training.is_terminal:
            training.result()


def heal_of(training: DistributedTraining) -> str:
    """Wait until the heal is reported; it says when ranks ran and when the next step was made."""
    for _ in muster.Client().watch():
        if heals := [event.message for event in training.events() if event.reason == "Healed"]:
            return heals[0]
    raise SystemExit("demo: no heal was reported")


def pid_of(worker: str) -> int:
    """The worker's agent, as `pgrep -f` would find it. Its guard, which lives on, ends the ranks."""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = entry.read_bytes().split(b"\0")
            if worker.encode() in words and os.environ["MUSTER_HOME"].encode() in b" ".join(words):
                return int(entry.parent.name)
    raise SystemExit(f"demo: {worker} is not running")


def print_timeline(training: DistributedTraining) -> None:
    events = training.events()
    begun = events[0].at
    print("timeline (seconds from the first entry of the journal):")
    for event in events:
        assert begun is not None and event.at is not None
        print(f"  {(event.at - begun).total_seconds():7.3f}  {event.reason:<16} {event.message}")


def say(text: str) -> None:
    print(f"\n>>> {text}\n", flush=True)


if __name__ == "__main__":
    sys.exit(main())

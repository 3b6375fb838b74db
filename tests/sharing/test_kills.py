"""Does the scheduler's state survive the death of its process at any moment? Real processes, real SIGKILL."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from muster.core.sharing.invariants import broken
from muster.sharing import Priority
from muster.sim import virtual
from tests.sharing.scripted import FOUR, Hooks, a_scheduler, generating, held_by, training

ROOT = Path(__file__).parents[2]
FEW, MANY = 3, 60
PROMISES_PER_STEP = 6
BOUND_S = 60.0


def promises_until_killed(journal: Path, seed: int, count: int) -> list[str]:
    """Let a process make that many promises, then kill it wherever it is."""
    command = [sys.executable, "-m", "tests.sharing.busy", str(journal), str(seed)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        watchdog = threading.Timer(BOUND_S, process.kill)
        watchdog.start()
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            heard = [process.stdout.readline() for _ in range(count)]
            process.kill()
            heard += [line for line in process.stdout.readlines() if line.endswith("\n")]
        finally:
            watchdog.cancel()
    assert all(heard)
    return [line.strip() for line in heard]


async def check_promises(journal: Path, heard: list[str]) -> None:
    """What was promised last is so, or the process was already at its next step."""
    last = heard[-1]
    async with a_scheduler(journal=journal) as sched:
        found = sched.snapshot()
        fixed = {lease.priority for lease in sched.shares.leases.values()} - {Priority.GENERATION}
        target = found.open_rollouts.get("p1")
        if last.startswith("open"):
            promised = int(last.removeprefix("open "))
            assert target in (promised, promised + 1, None), f"{last}, and found {found}"
        elif last == "clear":
            assert target is None
        elif last == "hold":
            assert held_by(sched, "p1") == {0: "held", 1: "held"} or found.leases == {}
            assert fixed <= {Priority.ACTOR_TRAINING, Priority.OLD_LOG_PROBS}
        elif last == "free":
            assert not fixed
        assert broken(sched.shares) == []
        hooks = Hooks()
        await sched.register_pipeline("p1", clusters=FOUR, hooks=hooks)
        for place in found.pending:
            if place.cluster == "actor_train":  # its waiter died with the process: take the place again
                assert await sched.request_gpus("p1", place.cluster, place.priority, timeout=30) == [0, 1]
        await sched.notify_release_gpus("p1", "actor_train")
        await sched.await_release_gpus("p1")
        assert sched.snapshot().idle == (0, 1, 2, 3)
        assert await generating(sched, "p1", timeout=30) == [0, 1, 2, 3]
        await sched.await_release_gpus("p1")
        assert await training(sched, "p1", timeout=30) == [0, 1]
        await sched.unregister_pipeline("p1")


def survive(tmp_path: Path, rounds: int, seed: int) -> None:
    dice = random.Random(seed)
    for number in range(rounds):
        heard = promises_until_killed(tmp_path / "j", number, dice.randint(1, 10 * PROMISES_PER_STEP))
        virtual.run(check_promises(tmp_path / "j", heard))


def test_what_was_promised_is_found_after_a_kill(tmp_path: Path) -> None:
    survive(tmp_path, FEW, seed=1)


@pytest.mark.soak
def test_what_was_promised_is_found_after_many_kills(tmp_path: Path) -> None:
    survive(tmp_path, MANY, seed=2)

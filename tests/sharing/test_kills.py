"""Does the scheduler's state survive the death of its process at any moment? Real processes, real SIGKILL."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from muster.sharing import Priority, Scheduler, Snapshot
from muster.sim import virtual
from tests.core.sharing.invariants import broken
from tests.sharing.busy import MAPS
from tests.sharing.scripted import Hooks, a_scheduler, generating, training

ROOT = Path(__file__).parents[2]
FEW, MANY = 3, 60
PROMISES_PER_STEP = 12
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
    """What each was promised last is so, or the process was already at its next step; then everybody goes on."""
    async with a_scheduler(journal=journal) as sched:
        found = sched.snapshot()
        assert broken(sched.shares) == []
        for name in MAPS:
            check_promise(sched, name, next((line for line in reversed(heard) if line.startswith(name)), ""))
        for name, clusters in MAPS.items():
            await sched.register_pipeline(name, clusters=clusters, hooks=Hooks())
        await asyncio.gather(*(go_on(sched, name, found) for name in MAPS))
        assert sched.snapshot().idle == (0, 1, 2, 3)
        for name in MAPS:
            await sched.unregister_pipeline(name)


def check_promise(sched: Scheduler, name: str, last: str) -> None:
    target = sched.snapshot().open_rollouts.get(name)
    fixed = [
        lease.bundle.rank
        for lease in sched.shares.leases.values()
        if lease.bundle.pipeline == name and lease.priority is not Priority.GENERATION
    ]
    waits = any(one.pipeline == name for one in sched.snapshot().pending)
    match last.split()[1:]:
        case ["open", promised]:
            assert target in (int(promised), int(promised) + 1, None), f"{last}, and found {target}"
        case ["clear"]:
            assert target is None and (fixed in ([], [0, 1]))
        case ["hold"]:
            assert target is None
            assert sorted(fixed) == [0, 1] or waits or not fixed
        case ["free"]:
            assert not fixed


async def go_on(sched: Scheduler, name: str, found: Snapshot) -> None:
    """Take a place again whose waiter died with the process; then once around."""
    train = list(MAPS[name]["actor_train"].gpus)
    for place in found.pending:
        if place.pipeline == name and place.cluster == "actor_train":
            assert await sched.request_gpus(name, place.cluster, place.priority, timeout=30) == train
    await sched.notify_release_gpus(name, "actor_train")
    await sched.await_release_gpus(name)
    assert await generating(sched, name, timeout=30)
    await sched.await_release_gpus(name)
    assert await training(sched, name, timeout=30) == train
    await sched.notify_release_gpus(name, "actor_train")


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

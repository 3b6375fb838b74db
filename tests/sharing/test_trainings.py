"""A pipeline that runs as a rank of a training: what it holds ends with its round, and with its training."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from muster import DistributedTraining
from muster.sharing import Priority
from muster.sharing.remote import RemoteScheduler, connect
from tests.fleet import PROGRAMS, eventually
from tests.plane import Plane
from tests.sharing.blocking import pool_of_four
from tests.sharing.scripted import FOUR, Hooks

BOUND_S = 60.0


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("program", ["tenant.py", "tenant_that_blocks.py"])
def test_a_killed_rank_leaves_no_gpu_behind_and_neither_does_a_training_that_has_ended(
    tmp_path: Path, program: str
) -> None:
    plane = Plane(tmp_path)
    pool_of_four(plane)
    try:
        plane.serve()
        words = [plane.url, plane.api_token, str(tmp_path)]
        script = str(PROGRAMS / program)
        training = plane.train("rl", world=(1, 1, 1), script=script, args=words, max_restarts=3)
        asyncio.run(asyncio.wait_for(_through_rounds(plane, training, tmp_path), 4 * BOUND_S))
    finally:
        plane.close()


async def _through_rounds(plane: Plane, training: DistributedTraining, folder: Path) -> None:
    holds = [folder / "holds-0", folder / "holds-1"]
    async with await connect(plane.url, plane.api_token) as rival:
        await rival.register_pipeline("p2", FOUR, Hooks())
        await rival.admit_pipeline("p2")
        await _there(holds[0])
        waiting = asyncio.create_task(rival.request_gpus("p2", "actor_train", Priority.ACTOR_TRAINING))
        while not (await rival.snapshot()).pending:
            await asyncio.sleep(0.02)
        os.kill(int(holds[0].read_text()), signal.SIGKILL)
        assert await asyncio.wait_for(waiting, BOUND_S) == [0, 1], "the dead rank is waited for by nobody"
        await rival.notify_release_gpus("p2", "actor_train")
        await _there(holds[1])  # its successor has what it asked for, too
        await asyncio.to_thread(plane.crash)
        await asyncio.to_thread(plane.serve)
        (folder / "go").touch()
        await asyncio.to_thread(training.wait, BOUND_S)
        await _idle(rival)


async def _there(path: Path) -> None:
    await asyncio.to_thread(eventually, path.exists, f"{path.name} is there", BOUND_S)


async def _idle(rival: RemoteScheduler) -> None:
    async with asyncio.timeout(BOUND_S):
        while (await rival.snapshot()).idle != (0, 1, 2, 3):
            await asyncio.sleep(0.05)

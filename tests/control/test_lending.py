"""A control plane that dies while a GPU changes hands: real processes, and what the ranks themselves say they use."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest

from muster.sharing import ClusterSpec, Priority
from muster.sharing.remote import RemoteScheduler, connect
from tests.fleet import PROGRAMS
from tests.plane import Plane
from tests.sharing.scripted import Hooks

GPUS, LENT = 3, 2
KILLS = 3
BOUND_S = 30.0


@dataclass(frozen=True)
class Line:
    what: str
    at: float
    round: int
    ranks: int
    step: int
    rank: int
    devices: str


def lines(folder: Path) -> list[Line]:
    try:
        rows = [row.split(maxsplit=6) for row in (folder / "steps.log").read_text().splitlines()]
    except FileNotFoundError:
        return []
    return [_line(*row) for row in rows]


def _line(what: str, at: str, number: str, ranks: str, step: str, rank: str, devices: str = "") -> Line:
    return Line(what, float(at), int(number), int(ranks), int(step), int(rank), devices)


@pytest.mark.usefixtures("processes")
def test_a_control_plane_that_dies_in_a_hand_over_leaves_each_gpu_with_one_holder(tmp_path: Path) -> None:
    plane = Plane(tmp_path)
    plane.env["MUSTER_GPUS"] = str(GPUS)
    try:
        plane.serve()
        training = plane.train(
            "fill",
            world=(1, 1, GPUS),
            script=str(PROGRAMS / "filler.py"),
            args=[str(tmp_path), "0.02"],
            resources={"gpus": 1},
            elasticity="fill",
        )
        held = asyncio.run(asyncio.wait_for(_hand_over_and_kill(plane, tmp_path), 4 * BOUND_S))
        (tmp_path / "stop").touch()
        training.wait(BOUND_S)
        story = [
            f"{one.reason}: {one.message}" for one in plane.client.events("fill") if one.reason.startswith("State")
        ]
    finally:
        plane.close()
    told = lines(tmp_path)
    on_it = {line.round for line in told if line.what == "begin" and str(LENT) in line.devices.split(",")}
    shared = [
        line
        for line in told
        if line.what == "step" and line.round in on_it and any(start < line.at < end for start, end in held)
    ]
    assert not shared, "a rank was on the GPU while the pipeline had it"
    assert not _done_again(told), f"steps that were safe were done again: {story}"


@pytest.mark.usefixtures("processes")
def test_what_a_suspended_training_leaves_is_free_for_others(tmp_path: Path) -> None:
    plane = Plane(tmp_path)
    plane.env["MUSTER_GPUS"] = "2"
    try:
        plane.serve()
        training = plane.train("lends", world=(1, 2, 2), resources={"gpus": 1}, elasticity="lend")
        plane.started(0, 2)
        training.suspend()
        asyncio.run(_idle(plane))
    finally:
        plane.close()


async def _idle(plane: Plane) -> None:
    async with await connect(plane.url, plane.api_token) as pool, asyncio.timeout(BOUND_S):
        while (await pool.snapshot()).idle != (0, 1):
            await asyncio.sleep(0.05)


async def _hand_over_and_kill(plane: Plane, folder: Path) -> list[tuple[float, float]]:
    """When the pipeline had the GPU, by its own clock."""
    dice, held, cluster = Random(7), [], ClusterSpec([LENT])
    clusters = {"actor_train": cluster, "actor_infer": cluster}
    async with await connect(plane.url, plane.api_token) as pool:
        await pool.register_pipeline("p1", clusters, Hooks())
        await pool.admit_pipeline("p1")
        for _ in range(KILLS):
            await _trains(folder, GPUS)
            asked = asyncio.create_task(pool.request_gpus("p1", "actor_train", Priority.ACTOR_TRAINING))
            await asyncio.sleep(dice.uniform(0.0, 0.4))  # the random moment is the point of the test
            await _die_and_come_back(plane)
            await asyncio.wait_for(asked, BOUND_S)
            granted = time.time()
            await _trains(folder, GPUS - 1)
            await _check(pool, {LENT})
            held.append((granted, time.time()))
            released = asyncio.create_task(pool.notify_release_gpus("p1", "actor_train"))
            await asyncio.sleep(dice.uniform(0.0, 0.4))
            await _die_and_come_back(plane)
            await asyncio.wait_for(released, BOUND_S)
        await _trains(folder, GPUS)
        await _check(pool, set())
    return held


async def _die_and_come_back(plane: Plane) -> None:
    await asyncio.to_thread(plane.crash)
    await asyncio.to_thread(plane.serve)


async def _check(pool: RemoteScheduler, lent: set[int]) -> None:
    """Each GPU is somebody's, and nobody else's."""
    async with asyncio.timeout(BOUND_S):
        while True:
            seen = await pool.snapshot()
            assert not seen.leases.keys() & seen.workers.keys()
            if seen.leases.keys() == lent and seen.workers.keys() == set(range(GPUS)) - lent:
                return
            await asyncio.sleep(0.05)


async def _trains(folder: Path, ranks: int) -> None:
    """It takes a step with so many ranks, from now on."""
    since = time.time()
    async with asyncio.timeout(BOUND_S):
        while not any(one.what == "step" and one.ranks == ranks and one.at > since for one in lines(folder)):
            await asyncio.sleep(0.02)


def _done_again(told: list[Line]) -> int:
    """Steps that were told to be safe. One whose commit some ranks had not come to is nobody's yet."""
    done = again = 0
    for line in told:
        if line.what == "safe":
            done = max(done, line.step)
        elif line.what == "begin" and line.rank == 0:
            again += max(0, done - line.step)
    return again

"""Watches and long polls on a real control plane: resumed after its death, many at once, compacted."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import httpx2
import pytest

import muster
from tests.fleet import eventually
from tests.plane import Plane, fresh

WATCHERS = 200


def test_a_watch_is_resumed_after_the_control_plane_died(plane: Plane) -> None:
    plane.train("first", world=(1, 1, 1))
    watcher = plane.client.watch(resource_version="0")
    seen = [next(watcher)]
    assert seen[0].type == "ADDED"
    plane.crash()
    plane.serve()
    second = plane.train("second", "exit=0", world=(1, 1, 1))
    second.result(timeout=30)
    versions = [seen[0].training.training.version]
    for change in watcher:
        versions.append(change.training.training.version)
        if change.training.name == "second" and change.training.phase == "succeeded":
            break
    assert versions == sorted(set(versions)), "in order, nothing twice"
    plane.go()


def test_steps_are_shown_after_a_restart_in_which_nothing_else_changes(plane: Plane) -> None:
    """They stood still until something else was to be written of the training."""
    stepper = str(Path(__file__).parents[1] / "programs" / "stepper.py")
    training = plane.train(world=(1, 1, 1), script=stepper)

    def shown() -> int:
        return max((rank.step or 0 for rank in fresh(training).ranks), default=0)

    eventually(lambda: shown() > 5, "steps are shown")
    plane.crash()
    plane.serve()
    before = shown()
    eventually(lambda: shown() > before + 40, "they go on")
    assert fresh(training).training.status.round == 0


@pytest.mark.shared
@pytest.mark.scenario
def test_the_first_step_of_a_rank_is_shown_soon(plane: Plane) -> None:
    """It came with the next look at the training, which may be ten seconds later."""
    stepper = str(Path(__file__).parents[1] / "programs" / "stepper.py")
    training = plane.train(world=(1, 1, 1), script=stepper)
    training.wait_until_target_world(timeout=30)
    begun = time.monotonic()
    eventually(lambda: any(rank.step for rank in fresh(training).ranks), "its step is shown")
    assert time.monotonic() - begun < 5
    training.cancel()
    with pytest.raises(muster.TrainingCancelled):
        training.wait(timeout=30)


@pytest.mark.shared
def test_a_version_that_is_unknown_here_is_gone(plane: Plane) -> None:
    auth = {"Authorization": f"Bearer {plane.api_token}"}
    answer = httpx2.get(f"{plane.url}/v1/watch", params={"resourceVersion": "999999"}, headers=auth, timeout=5)
    assert answer.status_code == 410 and answer.json()["error"]["code"] == "compacted"


@pytest.mark.shared
def test_two_hundred_waits_end_together_and_a_reader_that_stops_disturbs_nobody(plane: Plane) -> None:
    training = plane.train(world=(1, 1, 2))
    training.wait_until_target_world(timeout=30)

    async def crowd() -> float:
        client = muster.Client(url=plane.url, token=plane.api_token)
        _, writer = await asyncio.open_connection("127.0.0.1", int(plane.url.rpartition(":")[2]))
        ask = f"GET /v1/watch?resourceVersion=0 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {plane.api_token}\r\n\r\n"
        writer.write(ask.encode())  # and never reads
        handles = [await client.get_async("demo") for _ in range(WATCHERS)]
        waits = [asyncio.create_task(handle.wait_async(timeout=60)) for handle in handles]
        await asyncio.sleep(0)
        plane.go()
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        first = time.monotonic()
        assert all(world.ready == 0 for world in await asyncio.gather(*waits))
        writer.close()
        await client.close_async()
        return time.monotonic() - first

    assert asyncio.run(crowd()) < 10.0

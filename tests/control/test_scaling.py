"""No wait believes an old status: up, down, from another process, with a slow reconciler, beside another writer."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

import muster
from muster import DistributedTraining, ScaleSuperseded, WorldStatus
from tests.fleet import eventually
from tests.plane import Plane, fresh

DELAY_S = 0.4


def size_in_rounds(training: DistributedTraining) -> int:
    """Workers that run ranks of the round that the status speaks of."""
    training.refresh()
    return len({rank.worker for rank in training.ranks if rank.phase == "running"})


@pytest.mark.scenario
@pytest.mark.usefixtures("processes")
def test_scaling_up_and_down_returns_only_when_the_round_for_it_runs(tmp_path: Path) -> None:
    plane = Plane(tmp_path)
    try:
        plane.serve("--reconcile-delay-s", str(DELAY_S))
        training = plane.train(world=(2, 2, 4))
        assert training.wait_until_min_world(timeout=30).ready >= 2
        assert training.wait_until_target_world(timeout=30).ready == 2
        for target in (3, 2):
            before = training.training.status.round
            told = training.scale(target=target)
            assert told.target == target, "scale answers with what was asked for"
            world = training.wait_until_target_world(timeout=30)
            assert (world.ready, world.target) == (target, target)
            assert training.training.status.round != before
            assert size_in_rounds(training) == target
    finally:
        plane.close()


@pytest.mark.shared
@pytest.mark.scenario
def test_another_process_is_not_told_too_early(plane: Plane) -> None:
    training = plane.train(world=(2, 2, 4))
    training.wait_until_target_world(timeout=30)
    script = (
        "import muster, sys\n"
        f"t = muster.Client(url={plane.url!r}, token={plane.api_token!r}).get('demo')\n"
        "print('entered', flush=True)\n"
        "world = t.wait_until_target_world(timeout=30)\n"
        "print(world.ready, world.target, t.training.status.round, flush=True)\n"
    )
    training.scale(target=3)
    other = plane.start(sys.executable, "-c", script)
    assert other.wait() == 0, other.text
    assert other.text.split()[-3:] == ["3", "3", "1"]


@pytest.mark.shared
@pytest.mark.scenario
def test_the_target_of_another_writer_is_noticed(plane: Plane) -> None:
    mine = plane.train(world=(1, 1, 4))
    mine.wait_until_target_world(timeout=30)
    theirs = plane.client.get("demo")
    mine.scale(target=3)
    theirs.scale(target=2)
    with pytest.raises(ScaleSuperseded) as caught:
        mine.wait_until_target_world(timeout=30)
    assert (caught.value.requested, caught.value.target) == (3, 2)
    assert theirs.wait_until_target_world(timeout=30).ready == 2


@pytest.mark.shared
def test_a_target_that_was_reached_is_nobody_s_to_supersede(plane: Plane) -> None:
    mine = plane.train(world=(1, 2, 4))
    mine.scale(target=3)
    assert mine.wait_until_target_world(timeout=30).ready == 3
    with muster.Client(url=plane.url, token=plane.api_token) as another:
        theirs = another.get("demo")
        theirs.scale(target=2)
        assert mine.wait_until_target_world(timeout=30).target == 2
        theirs.scale(target=1)
        assert mine.wait_until_target_world(timeout=30) == WorldStatus(1, 1, 1, 4, False)
    plane.go()
    assert mine.wait_until_target_world(timeout=30).target == 1


@pytest.mark.shared
def test_two_clients_that_scale_at_once_both_get_an_answer_and_one_target_stands(plane: Plane) -> None:
    training = plane.train(world=(1, 1, 4))

    async def both() -> list[WorldStatus]:
        clients = [muster.Client(url=plane.url, token=plane.api_token) for _ in range(2)]
        handles = [await client.get_async("demo") for client in clients]
        return list(await asyncio.gather(*(handle.scale_async(target=2 + i) for i, handle in enumerate(handles))))

    told = asyncio.run(both())
    assert sorted(world.target for world in told) == [2, 3]
    training.refresh()
    assert training.generation == 3, "each of them is a generation of its own"
    assert training.training.spec.world_size.target in (2, 3)


@pytest.mark.shared
def test_a_target_out_of_bounds_changes_nothing(plane: Plane) -> None:
    training = plane.train(world=(1, 1, 2))
    with pytest.raises(muster.WorldSizeOutOfBounds) as caught:
        training.scale(target=5)
    assert (caught.value.requested, caught.value.min, caught.value.max) == (5, 1, 2)
    training.refresh()
    assert training.generation == 1


@pytest.mark.shared
def test_scaling_down_with_a_spare_ends_one_worker_and_starts_none(plane: Plane) -> None:
    training = plane.train(world=(1, 3, 3), spares=1)
    training.wait_until_target_world(timeout=30)
    eventually(lambda: fresh(training).training.status.spares.ready == 1, "the spare is there")
    before = set(plane.worker_pids())
    training.scale(target=2)
    training.wait_until_target_world(timeout=30)
    eventually(lambda: len(plane.worker_pids()) == 3, "one has left")
    plane.go()
    training.result(timeout=30)
    begun = {str(event.data["worker"]) for event in training.events() if event.reason == "WorkerStarted"}
    assert begun == before, "nobody was started for a smaller world"


@pytest.mark.shared
def test_one_machine_is_one_domain_of_which_whole_segments_train(plane: Plane) -> None:
    training = plane.train(world=(2, 2, 4), segment=2)
    training.wait_until_target_world(timeout=30)
    with pytest.raises(muster.InvalidRequest, match="3 is not a multiple of segment"):
        training.scale(target=3)
    training.scale(target=4)
    assert training.wait_until_target_world(timeout=30).ready == 4
    plane.go()
    training.result(timeout=30)

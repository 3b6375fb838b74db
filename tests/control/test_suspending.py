"""A training that is suspended: nobody runs, nothing is lost, and it goes on when it may."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import replace

import pytest

import muster
from muster.ports import Write
from muster.types.training import QUEUE, Status
from tests.control.test_placed_elsewhere import BOUND_S, Site
from tests.fleet import eventually
from tests.node.test_planned import PLANNED
from tests.plane import Plane, reasons
from tests.training_builders import a_training


def seen(training: muster.DistributedTraining) -> Status:
    training.refresh()
    return training.training.status


def turned(training: muster.DistributedTraining) -> tuple[str, str, str]:
    found = seen(training).condition("Admitted")
    assert found is not None
    return training.phase, found.status, found.reason


@pytest.mark.shared
@pytest.mark.scenario
def test_its_workers_leave_and_come_back_to_the_round_after(plane: Plane) -> None:
    training = plane.train(world=(2, 2, 4), spares=1, below_minimum_timeout_seconds=2)
    training.wait_until_target_world(timeout=30)
    training.suspend()
    training.suspend()
    eventually(lambda: turned(training) == ("pending", "False", "Suspended"), "it is suspended")
    eventually(lambda: not plane.worker_pids(training.training.uid), "its workers have left", 30)
    eventually(lambda: seen(training).world_size.ready == 0, "nobody trains")
    training.resume()
    assert training.wait_until_target_world(timeout=30).ready == 2
    assert turned(training) == ("ready", "True", "Admitted")
    assert training.training.status.round == 1 and training.training.status.restarts == 0
    told = reasons(training)
    assert told.count("Suspended") == 1 and told.count("Admitted") == 2
    plane.go()
    assert training.result(timeout=30).ready == 0


@pytest.mark.shared
@pytest.mark.parametrize("how", ["term", "word"])
def test_no_step_is_lost_because_ranks_are_told_first(plane: Plane, how: str) -> None:
    def made(name: str) -> list[str]:
        path = plane.notes / name
        return path.read_text().splitlines() if path.exists() else []

    training = plane.train(script=PLANNED, args=[str(plane.notes), how], world=(2, 2, 2))
    for number in range(2):
        eventually(lambda number=number: len(made("begun")) > number, f"round {number} begins", 30)  # type: ignore[misc]
        before = len(made("steps"))
        eventually(lambda before=before: len(made("steps")) > before + 2, "steps are made")  # type: ignore[misc]
        training.suspend()
        eventually(lambda: not plane.worker_pids(training.training.uid), "its workers have left", 30)
        training.resume()
    eventually(lambda: len(made("begun")) == 3, "it goes on", 30)
    plane.go()
    training.result(timeout=30)
    assert [step for step, times in Counter(made("steps")).items() if times > 1] == []


@pytest.mark.shared
def test_one_that_begins_suspended_starts_nobody_before_it_is_resumed_and_can_be_cancelled(plane: Plane) -> None:
    training = plane.train(world=(1, 1, 2), suspend=True)
    eventually(lambda: seen(training).conditions, "it was looked at")
    assert turned(training) == ("pending", "False", "Suspended") and not plane.worker_pids(training.training.uid)
    training.cancel()
    with pytest.raises(muster.MusterError):
        training.result(timeout=20)
    assert training.phase == "cancelled" and "WorkerStarted" not in reasons(training)


@pytest.mark.shared
def test_a_queued_one_begins_suspended_and_is_admitted_with_fewer_workers(plane: Plane) -> None:
    training = plane.train(world=(1, 3, 4), labels={QUEUE: "team"})
    assert training.training.spec.suspend
    eventually(lambda: seen(training).conditions, "it was looked at")
    found = training.training.status.condition("Admitted")
    assert found is not None and found.message == "suspended: it waits for the queue 'team' to admit it"
    plane.client.apply({"metadata": {"name": "demo"}, "spec": {"suspend": False, "worldSize": {"target": 2}}})
    assert training.wait_until_min_world(timeout=30).ready
    eventually(lambda: seen(training).world_size.ready == 2, "as many train as were admitted")
    plane.go()
    training.result(timeout=30)


def test_a_queued_one_that_came_around_the_api_is_suspended_before_anybody_starts() -> None:
    async def scenario() -> None:
        site = Site()
        site.loop.start()
        async with asyncio.timeout(BOUND_S):
            made = a_training(world=(1, 2, 3), labels={QUEUE: "team"}, backend="kube")
            await site.store.write(Write(put=made))
            await site.loop.idle()
            stored = site.store.get(made.key)
            assert stored is not None and stored.training.spec.suspend and not site.cluster.started
            assert stored.training.generation == made.generation + 1
            found = stored.training.status.condition("Admitted")
            assert found is not None and (found.status, found.reason) == ("False", "Suspended")
            admitted = replace(stored.training.spec, suspend=False)
            about = replace(stored.training.metadata, generation=stored.training.generation + 1)
            await site.store.write(Write(put=replace(stored.training, spec=admitted, metadata=about)))
            await site.loop.idle()
            assert [name for name, _ in site.cluster.started] == ["demo-0", "demo-1"], "once admitted, it stays so"
        await site.loop.stop()

    asyncio.run(scenario())

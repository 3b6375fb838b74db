"""Waits over real sockets, each both ways: told by the server, never early, never wrong about the end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from muster.errors import (
    Conflict,
    InvalidRequest,
    NotFound,
    ScaleSuperseded,
    TrainingCancelled,
    TrainingFailed,
    UDTerminalState,
    Unauthenticated,
    Unavailable,
    WaitTimeout,
)
from muster.sdk.client import Client
from muster.sdk.training import DistributedTraining
from muster.types.event import Event
from muster.types.training import Phase, RankExit, Training, WorldStatus
from tests.sdk.scripted import Caller, Dropped, House, Plane, a_training, ended, scaled, settled

GENEROUS_S = 10.0  # a bound: nothing in these tests takes that long
SOON_S = 0.2  # a wait that is meant to run out

WAITS = ("wait_until_min_world", "wait_until_target_world", "wait_until_complete", "wait", "result")


@pytest.fixture
def handle(client: Client) -> DistributedTraining:
    return client.get("demo")


def steps(plane: Plane, *changes: Callable[[Training], Training]) -> None:
    """Each long poll that comes sees the next change."""
    for change in changes:
        plane.on_poll.append(lambda change=change: plane.change(change))  # type: ignore[misc]


def the_same(training: Training) -> Training:
    return training


def turned(phase: Phase, *exits: RankExit) -> Callable[[Training], Training]:
    return lambda training: ended(training, phase, *exits)


def refuse() -> None:
    raise Unavailable("the store is busy")


def drop() -> None:
    raise Dropped


# Scaling -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 2)])
def test_a_scale_is_reached_only_once_the_delayed_reconciler_has_turned(
    caller: Caller, plane: Plane, handle: DistributedTraining, before: int, after: int
) -> None:
    plane.put(a_training(size=(2, before, 4), ready=before))
    assert caller.call(handle, "scale", after) == WorldStatus(before, after, 2, 4, False)
    steps(plane, the_same, the_same, lambda one: settled(one, before), settled)
    assert caller.call(handle, "wait_until_target_world", GENEROUS_S) == WorldStatus(after, after, 2, 4)
    assert not plane.on_poll
    assert handle.generation == 2


def test_another_process_s_wait_does_not_take_old_status_for_the_target_either(
    caller: Caller, plane: Plane, handle: DistributedTraining
) -> None:
    plane.change(lambda one: scaled(one, 3))
    steps(plane, the_same, settled)
    assert caller.call(handle, "wait_until_target_world", GENEROUS_S).ready == 3
    assert not plane.on_poll


def test_a_target_that_somebody_else_moved_is_superseded(
    caller: Caller, plane: Plane, handle: DistributedTraining
) -> None:
    caller.call(handle, "scale", 3)
    steps(plane, lambda one: scaled(one, 4))
    with pytest.raises(ScaleSuperseded) as caught:
        caller.call(handle, "wait_until_target_world", GENEROUS_S)
    assert (caught.value.requested, caught.value.target) == (3, 4)
    steps(plane, settled)
    assert caller.call(handle, "wait_until_target_world", GENEROUS_S).ready == 4, "the news is raised once"


@pytest.mark.parametrize("look", ["wait_until_target_world", "wait_until_min_world", "refresh"])
def test_a_target_that_was_reached_is_not_superseded_by_whoever_moves_it_later(
    caller: Caller, plane: Plane, handle: DistributedTraining, look: str
) -> None:
    caller.call(handle, "scale", 3)
    plane.change(settled)
    caller.call(handle, look)
    plane.change(lambda one: scaled(one, 4))
    for target in (4, 2):
        steps(plane, the_same, settled)
        assert caller.call(handle, "wait_until_target_world", GENEROUS_S).ready == target, "the target of now"
        assert not plane.on_poll
        plane.change(lambda one: scaled(one, 2))


def test_a_target_that_was_reached_while_nobody_looked_is_found_in_the_journal(
    caller: Caller, plane: Plane, handle: DistributedTraining
) -> None:
    caller.call(handle, "scale", 3)
    plane.journal.append(Event("TargetReached", data={"generation": handle.generation, "target": 3}, id=2))
    plane.change(lambda one: settled(scaled(one, 4), 3))
    plane.on_events.append(drop)
    steps(plane, the_same, settled)
    assert caller.call(handle, "wait_until_target_world", GENEROUS_S).ready == 4
    assert not plane.on_poll and not plane.on_events


@pytest.mark.parametrize("data", [{}, {"generation": 1, "target": 3}, {"generation": 2, "target": 2}])
def test_a_journal_that_does_not_name_the_target_and_its_generation_proves_nothing(
    caller: Caller, plane: Plane, handle: DistributedTraining, data: dict[str, Any]
) -> None:
    caller.call(handle, "scale", 3)
    plane.journal.append(Event("TargetReached", data=data, id=2))
    plane.change(lambda one: settled(scaled(one, 4)))
    with pytest.raises(ScaleSuperseded):
        caller.call(handle, "wait_until_target_world", GENEROUS_S)


def test_a_handle_that_scales_again_waits_for_its_new_target(
    caller: Caller, plane: Plane, handle: DistributedTraining
) -> None:
    caller.call(handle, "scale", 3)
    caller.call(handle, "scale", 4)
    steps(plane, the_same, settled)
    assert caller.call(handle, "wait_until_target_world", GENEROUS_S).ready == 4


def test_a_wait_beside_which_its_own_handle_scales_does_not_blame_another_writer(
    plane: Plane, handle: DistributedTraining
) -> None:
    moved = threading.Event()

    def hold() -> None:
        assert moved.wait(GENEROUS_S)

    async def story() -> WorldStatus:
        await handle.scale_async(3)
        going = asyncio.get_running_loop()
        plane.on_poll.append(hold)  # the wait hears of the new target before the scale does
        plane.on_write.append(lambda: asyncio.run_coroutine_threadsafe(_settle(), going).result(GENEROUS_S))

        async def _settle() -> None:
            waiting.append(asyncio.ensure_future(handle.wait_until_target_world_async(GENEROUS_S)))
            while not any("resourceVersion" in one.params for one in plane.looks()):
                await asyncio.sleep(0.001)
            plane.change(lambda one: settled(scaled(one, 4)))
            moved.set()
            await asyncio.wait(waiting)

        waiting: list[asyncio.Future[WorldStatus]] = []
        await handle.scale_async(4)
        return waiting[0].result()

    assert asyncio.run(story()).ready == 4


def test_a_scale_that_is_refused_leaves_the_one_before_it_in_force(
    caller: Caller, plane: Plane, handle: DistributedTraining
) -> None:
    def conflict() -> None:
        raise Conflict("somebody wrote first")

    caller.call(handle, "scale", 3)
    plane.on_write.append(conflict)
    with pytest.raises(Conflict):
        caller.call(handle, "scale", 4)
    plane.change(lambda one: scaled(one, 4))
    with pytest.raises(ScaleSuperseded):
        caller.call(handle, "wait_until_target_world", GENEROUS_S)


@pytest.mark.parametrize("phase", ["succeeded", "failed", "cancelled"])
def test_a_training_that_has_ended_is_not_scaled_and_nothing_is_written(
    caller: Caller, plane: Plane, handle: DistributedTraining, phase: Phase
) -> None:
    plane.change(turned(phase))
    with pytest.raises(UDTerminalState) as caught:
        caller.call(handle, "scale", 3)
    assert (caught.value.phase, caught.value.requested_target) == (phase, 3)
    assert plane.writes() == []


# Terminal phases ---------------------------------------------------------------------------------


@pytest.mark.parametrize("method", WAITS)
def test_success_with_nobody_ready_any_more_is_an_answer(
    caller: Caller, plane: Plane, handle: DistributedTraining, method: str
) -> None:
    plane.change(lambda one: settled(one, 1))
    steps(plane, turned("succeeded"))
    assert caller.call(handle, method, GENEROUS_S).ready == 0
    assert handle.phase == "succeeded" and handle.rank_exits == []


@pytest.mark.parametrize(("phase", "kind"), [("failed", TrainingFailed), ("cancelled", TrainingCancelled)])
@pytest.mark.parametrize("method", WAITS)
def test_a_bad_end_is_raised_with_a_clause_for_each_failed_rank(
    caller: Caller, plane: Plane, handle: DistributedTraining, method: str, phase: Phase, kind: type[TrainingFailed]
) -> None:
    plane.change(lambda one: settled(one, 1))
    exits = (RankExit(0, 143, "Stopped"), RankExit(1, 137, "OOMKilled"))
    steps(plane, the_same, turned(phase, *exits))
    with pytest.raises(
        kind, match=r"rank 1: exit_code=137 reason=OOMKilled\nhint: muster logs demo --rank 1$"
    ) as caught:
        caller.call(handle, method, GENEROUS_S)
    assert caught.value.rank_exits == exits


def test_what_had_ended_is_refused_by_complete_and_answered_by_the_idempotent_forms(
    caller: Caller, plane: Plane, handle: DistributedTraining
) -> None:
    plane.change(turned("succeeded"))
    with pytest.raises(UDTerminalState):
        caller.call(handle, "wait_until_complete", GENEROUS_S)
    assert caller.call(handle, "wait", GENEROUS_S) == caller.call(handle, "result", 0)


@pytest.mark.parametrize("method", WAITS)
def test_an_end_that_is_seen_only_by_the_last_look_is_no_timeout(
    caller: Caller, plane: Plane, handle: DistributedTraining, method: str
) -> None:
    plane.change(lambda one: settled(one, 1))
    plane.on_get.extend([lambda: None, lambda: plane.change(turned("failed", RankExit(0, 1, "Exit 1")))])
    with pytest.raises(TrainingFailed, match="reason=Exit 1"):
        caller.call(handle, method, SOON_S)


# Time --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", WAITS)
def test_a_timeout_of_zero_looks_exactly_once(
    caller: Caller, plane: Plane, handle: DistributedTraining, method: str
) -> None:
    plane.change(lambda one: settled(one, 1))
    plane.asked.clear()
    with pytest.raises(WaitTimeout):
        caller.call(handle, method, 0)
    assert len(plane.asked) == 1 and plane.writes() == []


def test_a_timeout_of_zero_takes_what_is_there(caller: Caller, handle: DistributedTraining) -> None:
    assert caller.call(handle, "wait_until_target_world", 0) == WorldStatus(2, 2, 2, 4)


def test_a_timeout_names_the_requested_target_and_is_followed_by_no_further_look(
    caller: Caller, plane: Plane, handle: DistributedTraining
) -> None:
    caller.call(handle, "scale", 3)
    with pytest.raises(WaitTimeout) as caught:
        caller.call(handle, "wait_until_target_world", SOON_S)
    assert (caught.value.ready, caught.value.required_min, caught.value.timeout) == (2, 3, SOON_S)
    assert isinstance(caught.value, TimeoutError)


def test_a_wait_asks_the_server_to_hold_its_answer_and_does_not_ask_again_meanwhile(
    caller: Caller, plane: Plane, handle: DistributedTraining
) -> None:
    plane.asked.clear()
    with pytest.raises(WaitTimeout):
        caller.call(handle, "wait", SOON_S)
    held = [one for one in plane.looks() if "timeoutSeconds" in one.params]
    assert 0 < float(held[0].params["timeoutSeconds"]) <= SOON_S
    assert held[0].params["resourceVersion"] == handle.training.metadata.resource_version
    assert len(plane.looks()) <= len(held) + 2  # one before, and the last one
    assert len(held) <= 2  # a timer that fires a moment early costs one more


def test_one_look_is_held_for_thirty_seconds_at_most(caller: Caller, plane: Plane, handle: DistributedTraining) -> None:
    steps(plane, turned("succeeded"))
    caller.call(handle, "wait")
    assert float(plane.looks()[-1].params["timeoutSeconds"]) == 30.0


@pytest.mark.parametrize("timeout", [-1, float("nan"), "5", True])
def test_a_timeout_that_is_none_is_refused(caller: Caller, handle: DistributedTraining, timeout: Any) -> None:
    with pytest.raises(InvalidRequest, match="timeout"):
        caller.call(handle, "wait", timeout)


# Losing the server -------------------------------------------------------------------------------


@pytest.mark.parametrize("trouble", [drop, refuse])
def test_a_connection_lost_in_the_middle_of_a_wait_is_only_not_yet(
    caller: Caller, plane: Plane, handle: DistributedTraining, trouble: Callable[[], None]
) -> None:
    plane.on_poll.extend([trouble, trouble])
    steps(plane, turned("succeeded"))
    assert caller.call(handle, "wait", GENEROUS_S).ready == 0
    assert not plane.on_poll


def test_a_server_that_comes_back_on_another_port_is_found_again(
    caller: Caller, plane: Plane, house: House, handle: DistributedTraining
) -> None:
    before = house.url

    def move() -> None:
        house.move()
        raise Dropped

    caller.call(handle, "scale", 3)
    plane.on_poll.append(move)
    steps(plane, settled)
    assert caller.call(handle, "wait_until_target_world", GENEROUS_S).ready == 3
    assert house.url != before


@pytest.mark.parametrize("timeout", [0, SOON_S])
def test_a_server_that_stays_away_is_a_timeout_which_says_so(
    caller: Caller, plane: Plane, house: House, timeout: float
) -> None:
    with Client(house.url) as client:
        handle = client.get("demo")
        house.die()
        with pytest.raises(WaitTimeout, match="does not answer"):
            caller.call(handle, "wait_until_target_world", timeout)


def test_a_control_plane_that_cannot_be_started_again_is_not_waited_for_for_ever(
    caller: Caller, house: House, handle: DistributedTraining
) -> None:
    house.die()
    with pytest.raises(Unavailable, match="did not start"):
        caller.call(handle, "wait")


# Identity ----------------------------------------------------------------------------------------


def test_a_training_that_is_deleted_ends_the_wait(caller: Caller, plane: Plane, handle: DistributedTraining) -> None:
    plane.on_poll.append(plane.remove)
    with pytest.raises(NotFound):
        caller.call(handle, "wait", GENEROUS_S)


def test_another_training_of_the_same_name_is_not_taken_for_this_one(
    caller: Caller, plane: Plane, handle: DistributedTraining
) -> None:
    other = a_training()
    plane.trainings["demo"] = Training.from_wire(
        {**other.to_wire(), "metadata": {**other.to_wire()["metadata"], "uid": "another"}}
    )
    with pytest.raises(NotFound, match="another one has its name"):
        caller.call(handle, "wait", GENEROUS_S)


def test_a_token_that_is_not_known_is_an_error_and_not_waited_for(
    caller: Caller, plane: Plane, handle: DistributedTraining
) -> None:
    plane.token = "another"
    with pytest.raises(Unauthenticated):
        caller.call(handle, "wait", GENEROUS_S)

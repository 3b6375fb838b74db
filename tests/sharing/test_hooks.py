"""What becomes of everybody when a pipeline's hooks are slow, fail, hang or answer late?"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from muster.errors import PipelineQuarantined
from muster.sharing import ClusterSpec, Priority, ProgressReport, Scheduler
from muster.sim import virtual
from tests.sharing.scripted import (
    FOUR,
    OTHER,
    TIMEOUT_S,
    Hooks,
    a_scheduler,
    generating,
    held_by,
    joined,
    training,
    turns,
)


def now() -> float:
    return asyncio.get_running_loop().time()


async def quarantined(sched: Scheduler, hooks: Hooks) -> None:
    """p1 holds everything and cannot give it back; p2 waits for GPUs 2 and 3."""
    await joined(sched, "p1", hooks=hooks)
    await joined(sched, "p2", OTHER)
    await generating(sched, "p1")
    waiting = asyncio.create_task(training(sched, "p2", timeout=100))
    while not sched.snapshot().quarantined:
        await asyncio.sleep(1)
    assert not waiting.done()
    waiting.cancel()
    await turns()


@pytest.mark.parametrize("step", [3.0, "raise", "hang", "cancel"])
def test_a_call_is_made_again_once(step: object) -> None:
    async def story() -> None:
        async with a_scheduler() as sched:
            hooks = await joined(sched, "p1", hooks=Hooks(expand=[step]))
            assert await generating(sched, "p1") == [0, 1, 2, 3]
            assert len(hooks.of("expand")) == (1 if step == 3.0 else 2)
            assert hooks.cancelled == (step in ("hang", "cancel"))
            assert now() == {3.0: 3.0, "hang": TIMEOUT_S}.get(step, 0.0)

    virtual.run(story())


@pytest.mark.parametrize("script", [["raise", "raise"], ["hang", "hang"], ["raise", "hang"], ["deaf"]])
def test_a_pipeline_whose_hooks_fail_twice_is_quarantined_and_nobody_else(script: Sequence[str]) -> None:
    async def story() -> None:
        async with a_scheduler() as sched:
            await quarantined(sched, Hooks(shrink=script))
            assert held_by(sched, "p1") == {0: "held", 1: "held", 2: "draining", 3: "draining"}
            with pytest.raises(PipelineQuarantined, match="shrink"):
                await generating(sched, "p1")
            with pytest.raises(PipelineQuarantined):
                await sched.await_release_gpus("p1")
            with pytest.raises(PipelineQuarantined):
                await sched.notify_release_gpus("p1", "actor_infer")
            assert any(event.kind == "quarantined" and event.pipeline == "p1" for event in await sched.events())
            waiting = asyncio.create_task(training(sched, "p2"))
            await turns()
            assert "shrink" in sched.snapshot().pending[0].reason, "others are told whom they wait for"
            await joined(sched, "p3", {"actor_infer": ClusterSpec([0, 1, 2, 3])})
            await sched.unregister_pipeline("p1")
            assert await waiting == [2, 3]
            assert await generating(sched, "p3") == [0, 1]

    virtual.run(story())


def test_who_waits_for_a_failing_expand_is_told() -> None:
    async def story() -> None:
        async with a_scheduler() as sched:
            await joined(sched, "p1", hooks=Hooks(expand=["raise", "raise"]))
            with pytest.raises(PipelineQuarantined, match="the engine is gone"):
                await generating(sched, "p1")
            assert sched.snapshot().pending == ()
            assert sched.snapshot().open_rollouts == {"p1": 100}

    virtual.run(story())


def test_a_quarantined_pipeline_can_release_a_fixed_lease() -> None:
    async def story() -> None:
        async with a_scheduler() as sched:
            await joined(sched, "p1")
            await training(sched, "p1")
            await sched.quarantine_pipeline("p1", "it fell silent")
            assert (await sched.notify_release_gpus("p1", "actor_train")).gpus == (0, 1)
            with pytest.raises(PipelineQuarantined, match="silent"):
                await training(sched, "p1")

    virtual.run(story())


def test_new_hooks_end_a_quarantine_once_they_have_shrunk_everything() -> None:
    async def story() -> None:
        async with a_scheduler() as sched:
            await quarantined(sched, Hooks(shrink=["raise", "raise"]))
            bad = Hooks(shrink=["raise", "hang"])
            with pytest.raises(PipelineQuarantined, match="within 10 s"):
                await sched.register_pipeline("p1", clusters=FOUR, hooks=bad)
            assert "p1" in sched.snapshot().quarantined
            good = Hooks(shrink=[1.0])
            await sched.register_pipeline("p1", clusters=FOUR, hooks=good)
            assert good.of("shrink") == [[0, 1, 2, 3]]
            assert sched.snapshot().quarantined == {}
            assert await generating(sched, "p1") == [0, 1, 2, 3]

    virtual.run(story())


def test_gpus_are_given_on_only_when_they_are_really_vacated() -> None:
    class Engine(Hooks):
        asked: list[list[int]]

        async def vacated(self, gpus: list[int]) -> bool:
            self.asked = [*getattr(self, "asked", []), gpus]
            return now() >= 4.0

    async def story() -> None:
        async with a_scheduler(vacated_poll_s=0.5) as sched:
            hooks = Engine()
            await joined(sched, "p1", hooks=hooks)
            await joined(sched, "p2", OTHER)
            await generating(sched, "p1")
            assert await training(sched, "p2") == [2, 3]
            assert now() == pytest.approx(4.0)
            assert hooks.asked == [[2, 3]] * 9
            assert held_by(sched, "p1") == {0: "held", 1: "held"}

    virtual.run(story())


def test_awaiting_release_in_the_middle_of_an_expand_lets_it_end_and_drains_it() -> None:
    async def story() -> None:
        async with a_scheduler() as sched:
            hooks = await joined(sched, "p1", hooks=Hooks(expand=[5.0], shrink=[2.0]))
            waiting = asyncio.create_task(generating(sched, "p1"))
            await turns()
            leaving = asyncio.create_task(sched.await_release_gpus("p1"))
            await turns()
            assert held_by(sched, "p1") == dict.fromkeys(range(4), "draining")
            await leaving
            assert now() == 7.0
            assert hooks.calls == [("expand", [0, 1, 2, 3]), ("shrink", [0, 1, 2, 3])]
            assert waiting.done() and waiting.exception() is not None
            assert (hooks.awake, sched.snapshot().leases) == ({}, {})

    virtual.run(story())


def test_a_shrink_and_expands_of_one_pipeline_run_side_by_side() -> None:
    async def story() -> None:
        async with a_scheduler() as sched:
            hooks = await joined(sched, "p1", hooks=Hooks(expand=[6.0, 6.0], shrink=[2.0]))
            await joined(sched, "p2", OTHER)
            await training(sched, "p2")
            asking = asyncio.create_task(generating(sched, "p1"))
            await asyncio.sleep(1)
            await sched.notify_release_gpus("p2", "actor_train")
            assert await asking == [0, 1]
            assert now() == 6.0
            training_again = asyncio.create_task(sched.request_gpus("p1", "actor_train", Priority.ACTOR_TRAINING))
            await asyncio.sleep(0.5)
            assert hooks.calls == [("expand", [0, 1]), ("expand", [2, 3]), ("shrink", [0, 1])]
            assert hooks.running == {0, 1, 2, 3}
            await asyncio.sleep(1)
            assert held_by(sched, "p1")[2] == "held" and now() == 7.5
            assert await training_again == [0, 1]
            assert now() == 8.0

    virtual.run(story())


def test_awaiting_release_takes_back_expands_that_were_not_yet_called_for() -> None:
    async def story() -> None:
        async with a_scheduler() as sched:
            slow = await joined(sched, "p2", OTHER, Hooks(shrink=[5.0]))
            assert await generating(sched, "p2") == [0, 1, 2, 3]
            hooks = await joined(sched, "p1")
            asking = asyncio.create_task(generating(sched, "p1"))
            await turns()
            assert slow.of("shrink") == [[0, 1]] and not hooks.calls
            await sched.await_release_gpus("p1", "actor_infer")
            assert asking.exception() is not None
            await asyncio.sleep(6)
            assert not hooks.calls and held_by(sched, "p2") == dict.fromkeys(range(4), "held")

    virtual.run(story())


def test_a_release_frees_held_bundles_at_once_and_drains_what_is_being_granted() -> None:
    async def story() -> None:
        async with a_scheduler() as sched:
            hooks = await joined(sched, "p1", hooks=Hooks(expand=[0.0, 5.0]))
            await joined(sched, "p2", OTHER)
            await training(sched, "p2")
            await generating(sched, "p1")
            await sched.notify_release_gpus("p2", "actor_train")
            await turns()
            assert held_by(sched, "p1") == {0: "held", 1: "held", 2: "granting", 3: "granting"}
            releasing = asyncio.create_task(sched.notify_release_gpus("p1", "actor_infer"))
            await turns()
            assert held_by(sched, "p1") == {2: "draining", 3: "draining"}
            assert (await releasing).gpus == (0, 1)
            assert now() == 5.0
            assert hooks.of("shrink") == [[2, 3]]
            assert sched.snapshot().idle == (0, 1, 2, 3)

    virtual.run(story())


def test_a_failure_of_a_call_whose_purpose_is_over_quarantines_nobody() -> None:
    async def story() -> None:
        async with a_scheduler() as sched:
            hooks = await joined(sched, "p1", hooks=Hooks(expand=["hang"]))
            waiting = asyncio.create_task(generating(sched, "p1"))
            await turns()
            await sched.lose_node(0)
            await turns()
            assert (hooks.cancelled, hooks.running) == (1, set()), "there is nothing left to wait for"
            await asyncio.sleep(3 * TIMEOUT_S)
            assert sched.shares.pipelines[next(iter(sched.shares.pipelines))].quarantined == ""
            await sched.restore_node(0)
            assert await waiting == [0, 1, 2, 3]

    virtual.run(story())


@pytest.mark.parametrize("script", [["hang"], ["raise", "hang"]])
def test_an_expand_that_fails_while_its_release_is_awaited_is_only_drained(script: list[str]) -> None:
    async def story() -> None:
        async with a_scheduler() as sched:
            hooks = await joined(sched, "p1", hooks=Hooks(expand=script))
            asking = asyncio.create_task(generating(sched, "p1"))
            await asyncio.sleep(1)
            await sched.await_release_gpus("p1")
            assert [kind for kind, _ in hooks.calls] == ["expand"] * len(script) + ["shrink"]
            assert (sched.snapshot().leases, sched.snapshot().quarantined) == ({}, {})
            assert asking.exception() is not None

    virtual.run(story())


def test_a_quarantine_ends_calls_in_flight_and_registering_anew_ends_fixed_leases_too() -> None:
    async def story() -> None:
        async with a_scheduler() as sched:
            clusters = {"actor_train": ClusterSpec([0]), "actor_infer": ClusterSpec([1, 2, 3])}
            hooks = await joined(sched, "p1", clusters, Hooks(expand=["hang"]))
            await training(sched, "p1")
            asking = asyncio.create_task(generating(sched, "p1"))
            await turns()
            await sched.quarantine_pipeline("p1", "its actor died")
            await turns()
            assert (hooks.cancelled, hooks.running) == (1, set())
            with pytest.raises(PipelineQuarantined, match="its actor died"):
                await asking
            assert set(held_by(sched, "p1")) == {0, 1, 2, 3}, "frozen"
            await sched.clear_progress("p1")
            await sched.register_pipeline("p1", clusters=clusters, hooks=Hooks())
            assert sched.snapshot().idle == (0, 1, 2, 3)

    virtual.run(story())


def test_measured_calls_and_progress_are_averaged() -> None:
    async def story() -> None:
        async with a_scheduler() as sched:
            await joined(sched, "p1", hooks=Hooks(expand=[4.0, 8.0], shrink=[1.0, 3.0]))
            for step in range(2):
                await generating(sched, "p1", 8)
                await sched.report_progress(ProgressReport("p1", 0, 8))
                await asyncio.sleep(1)
                await sched.report_progress(ProgressReport("p1", 4, 8))
                await asyncio.sleep(1)
                await sched.report_progress(ProgressReport("p1", 6, 8))
                (rollout,) = sched.shares.rollouts.values()
                assert rollout.rate == 0.75, f"per bundle and second: 1, then half of that, in step {step}"
                await sched.await_release_gpus("p1")
            (pipeline,) = sched.shares.pipelines.values()
            assert (pipeline.expand_s, pipeline.shrink_s) == (6.0, 2.0)

    virtual.run(story())


def test_hooks_of_different_pipelines_run_at_the_same_time() -> None:
    async def story() -> None:
        async with a_scheduler() as sched:
            left, right = {"actor_infer": ClusterSpec([0, 1])}, {"actor_infer": ClusterSpec([2, 3])}
            whole = {"actor_train": ClusterSpec([0, 1, 2, 3]), "actor_infer": ClusterSpec([0])}
            await joined(sched, "p1", left, Hooks(shrink=[5.0]))
            await joined(sched, "p2", right, Hooks(shrink=[5.0]))
            await joined(sched, "p3", whole)
            await generating(sched, "p1")
            await generating(sched, "p2")
            assert await sched.request_gpus("p3", "actor_train", Priority.ACTOR_TRAINING) == [0, 1, 2, 3]
            assert now() == 5.0

    virtual.run(story())

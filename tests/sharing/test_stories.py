"""What pipelines are promised, told as stories on the whole scheduler: shares, turns, restraint, ends."""

from __future__ import annotations

import asyncio
import pickle
import random
from itertools import pairwise

import pytest

from muster.errors import GrantTimeout, InvalidRequest, MusterError, RequestRefused
from muster.sharing import ClusterSpec, PipelineClient, Pool, Priority, ProgressReport, Scheduler
from muster.sim import virtual
from tests.sharing.scripted import FOUR, OTHER, Hooks, a_scheduler, generating, held_by, joined, training, turns

ALL_FOUR = {"actor_infer": ClusterSpec([0, 1, 2, 3])}
ROLLOUTS = 50
STEP_S = 1.0


def now() -> float:
    return asyncio.get_running_loop().time()


async def until(look: object, bound_s: float = 60.0) -> None:
    """On virtual time, so looking often costs nothing."""
    assert callable(look)
    async with asyncio.timeout(bound_s):
        while not look():
            await asyncio.sleep(0.1)


# Shares


@pytest.mark.parametrize("first", ["p1", "p2"])
def test_both_have_their_share_one_cycle_after_both_have_spoken_fifty_rollouts_in_a_row(first: str) -> None:
    """Both are suspended, either speaks first, any time apart; nobody has reported anything yet."""
    second = {"p1": "p2", "p2": "p1"}[first]
    dice = random.Random(1)

    async def story() -> None:
        async with a_scheduler() as sched:
            for name, clusters in (("p1", FOUR), ("p2", OTHER)):
                await joined(sched, name, clusters, Hooks(shrink=[STEP_S] * 500, expand=[STEP_S] * 500))
            clients = {name: PipelineClient(sched, name) for name in ("p1", "p2")}
            for rollout in range(ROLLOUTS):
                assert sched.snapshot().leases == {}, "both are suspended"
                speaking = [asyncio.create_task(clients[first].signal_rollout_demand(rollout, 8))]
                await asyncio.sleep(dice.choice([0.0, 0.5, 1.0, 1.5, 10.0]))
                speaking.append(asyncio.create_task(clients[second].signal_rollout_demand(rollout, 8)))
                await asyncio.gather(*speaking)
                assert sched.snapshot().open_rollouts == {"p1": 8, "p2": 8}, "demand outlives the grant"
                await asyncio.sleep(4 * STEP_S)
                assert {name: len(held_by(sched, name)) for name in clients} == {"p1": 2, "p2": 2}, f"in {rollout}"
                assert set(sched.snapshot().leases) == {0, 1, 2, 3}
                for name in clients:
                    await sched.await_release_gpus(name)

    virtual.run(story())


def test_demand_before_the_first_report_counts_as_much_as_after() -> None:
    async def story() -> None:
        async with a_scheduler() as sched:
            await joined(sched, "p1")
            await joined(sched, "p2", OTHER)
            await generating(sched, "p1", 30)
            await generating(sched, "p2", 10)
            await asyncio.sleep(1)
            assert [len(held_by(sched, name)) for name in ("p1", "p2")] == [3, 1]
            before = held_by(sched, "p1")
            await sched.report_progress(ProgressReport("p1", 0, 30))
            await asyncio.sleep(1)
            assert held_by(sched, "p1") == before

    virtual.run(story())


def test_five_pipelines_on_four_bundles_are_each_served_within_a_bounded_time() -> None:
    async def story() -> None:
        async with a_scheduler(min_turn_s=2) as sched:
            names = [f"p{number}" for number in range(5)]
            served: dict[str, list[float]] = {name: [0.0] for name in names}
            for name in names:
                await joined(sched, name, ALL_FOUR, Hooks(shrink=[0.1] * 500, expand=[0.2] * 500))
            asking = [asyncio.create_task(generating(sched, name, 1000)) for name in names]
            while now() < 60:
                await asyncio.sleep(0.1)
                for name in names:
                    if held_by(sched, name):
                        served[name].append(now())
            await asyncio.gather(*asking)
            longest = {name: max(b - a for a, b in pairwise(times)) for name, times in served.items()}
            assert all(gap < 6 for gap in longest.values()), longest

    virtual.run(story())


@pytest.mark.parametrize(("small", "bound_s"), [(Priority.ACTOR_TRAINING, 2.0), (Priority.INITIALIZATION, 32.0)])
def test_a_training_of_two_gpus_is_served_against_a_stream_of_one_gpu_ones(small: Priority, bound_s: float) -> None:
    """Against its equals at once, against those that come before it after `reserve_after_s`."""

    async def story() -> None:
        async with a_scheduler() as sched:
            await joined(sched, "big", {"actor_train": ClusterSpec([0, 1]), "actor_infer": ClusterSpec([2])})
            for number in range(4):
                one = {"critic": ClusterSpec([number % 2]), "actor_infer": ClusterSpec([3])}
                await joined(sched, f"s{number}", one)

            async def stream(name: str) -> None:
                while True:
                    await sched.request_gpus(name, "critic", small)
                    await asyncio.sleep(1.0)
                    await sched.notify_release_gpus(name, "critic")

            streams = [asyncio.create_task(stream(f"s{number}")) for number in range(4)]
            await asyncio.sleep(0.5)
            began = now()
            assert await training(sched, "big", timeout=60) == [0, 1]
            assert now() - began <= bound_s
            for task in streams:
                task.cancel()
            await asyncio.wait(streams)

    virtual.run(story())


def test_a_holder_without_demand_yields_everything_and_no_gpu_stays_idle() -> None:
    async def story() -> None:
        async with a_scheduler() as sched:
            await joined(sched, "wide", ALL_FOUR)
            await joined(sched, "narrow", {"actor_infer": ClusterSpec([3])})
            await generating(sched, "wide")
            await sched.clear_progress("wide")
            await asyncio.sleep(1)
            assert len(held_by(sched, "wide")) == 4, "nobody wants it"
            await generating(sched, "narrow")
            assert held_by(sched, "narrow") == {3: "held"}
            await joined(sched, "other", ALL_FOUR)
            await generating(sched, "other")
            await asyncio.sleep(1)
            assert (held_by(sched, "wide"), set(held_by(sched, "other"))) == ({}, {0, 1, 2})

    virtual.run(story())


# Restraint


def test_a_request_that_cannot_be_granted_moves_nothing_however_often_it_is_looked_at() -> None:
    async def story() -> None:
        async with a_scheduler() as sched:
            both = {"actor_train": ClusterSpec([1, 2]), "actor_infer": ClusterSpec([1, 2])}
            await joined(sched, "p2", {"actor_train": ClusterSpec([2]), "actor_infer": ClusterSpec([2])})
            await joined(sched, "p3", both)
            hooks = await joined(sched, "p1")
            await training(sched, "p2")
            await generating(sched, "p1", 1000)
            asking = asyncio.create_task(training(sched, "p3"))
            before = list(hooks.calls)
            for done in range(100):
                await sched.report_progress(ProgressReport("p1", done, 1000))
                await asyncio.sleep(1)
            assert hooks.calls == before and not asking.done()
            assert "p2/actor_train" in sched.snapshot().pending[0].reason
            await sched.notify_release_gpus("p2", "actor_train")
            assert await asking == [1, 2]
            assert set(held_by(sched, "p1")) == {0, 3}, "only what it needed"

    virtual.run(story())


# Ends


@pytest.mark.parametrize("moment", ["expanding", "shrinking"])
def test_unregistering_in_the_middle_of_a_resize_frees_everything(moment: str) -> None:
    async def story() -> None:
        async with a_scheduler() as sched:
            hooks = await joined(sched, "p1", hooks=Hooks(expand=[5.0], shrink=["hang"]))
            await joined(sched, "p2", OTHER)
            own = asyncio.create_task(generating(sched, "p1"))
            await turns()
            if moment == "shrinking":
                await own
            other = asyncio.create_task(training(sched, "p2"))
            await turns()
            assert hooks.running
            await sched.unregister_pipeline("p1")
            assert await other == [2, 3]
            assert sched.snapshot().idle == (0, 1)
            await turns()
            assert (hooks.cancelled, hooks.running) == (1, set())
            if moment == "expanding":
                with pytest.raises(RequestRefused, match="unregistered"):
                    await own
            await joined(sched, "p1")
            assert await generating(sched, "p1") == [0, 1]

    virtual.run(story())


@pytest.mark.parametrize("call", ["notify_release_gpus", "await_release_gpus"])
def test_a_release_in_the_middle_of_a_shrink_returns_when_its_bundles_are_down(call: str) -> None:
    async def story() -> None:
        async with a_scheduler() as sched:
            hooks = await joined(sched, "p1", hooks=Hooks(shrink=[5.0]))
            await joined(sched, "p2", OTHER)
            await generating(sched, "p1")
            taking = asyncio.create_task(training(sched, "p2"))
            await asyncio.sleep(1)
            assert held_by(sched, "p1") == {0: "held", 1: "held", 2: "draining", 3: "draining"}
            await getattr(sched, call)("p1", "actor_infer")
            assert now() == 5.0 and held_by(sched, "p1") == {}
            assert hooks.of("shrink")[0] == [2, 3]
            assert await taking == [2, 3]

    virtual.run(story())


@pytest.mark.parametrize("end", ["cancel", "timeout"])
def test_a_swap_that_ends_while_what_it_released_is_still_vacated_holds_nothing(end: str) -> None:
    """The grant comes at once; the bundle that was being woken takes its time to be put down again."""

    async def story() -> None:
        async with a_scheduler() as sched:
            clusters = {"actor_train": ClusterSpec([0]), "actor_infer": ClusterSpec([1, 2, 3])}
            hooks = await joined(sched, "p1", clusters, Hooks(expand=[5.0], shrink=[2.0]))
            asking = asyncio.create_task(generating(sched, "p1"))
            await turns()
            swapping = asyncio.create_task(
                sched.notify_release_then_request_gpus(
                    "p1",
                    "actor_infer",
                    "actor_train",
                    Priority.ACTOR_TRAINING,
                    timeout=1.0 if end == "timeout" else None,
                )
            )
            await turns()
            assert held_by(sched, "p1")[0] == "held"
            if end == "cancel":
                swapping.cancel()
            with pytest.raises((GrantTimeout, asyncio.CancelledError)):
                await swapping
            assert 0 in sched.snapshot().idle and now() <= 1.0
            await asyncio.sleep(10)
            assert (sched.snapshot().leases, hooks.awake) == ({}, {})
            assert asking.exception() is not None

    virtual.run(story())


def test_a_swap_returns_when_what_it_released_is_down() -> None:
    async def story() -> None:
        async with a_scheduler() as sched:
            clusters = {"actor_train": ClusterSpec([0]), "actor_infer": ClusterSpec([1, 2, 3])}
            hooks = await joined(sched, "p1", clusters, Hooks(expand=[5.0], shrink=[2.0]))
            asking = asyncio.create_task(generating(sched, "p1"))
            await turns()
            gpus = await sched.notify_release_then_request_gpus(
                "p1", "actor_infer", "actor_train", Priority.ACTOR_TRAINING
            )
            assert (gpus, now(), hooks.awake) == ([0], 7.0, {})
            assert asking.exception() is not None

    virtual.run(story())


@pytest.mark.parametrize("timeout", [0, -1, 0.0])
def test_with_no_time_only_what_is_there_is_had(timeout: float) -> None:
    async def story() -> None:
        async with a_scheduler() as sched:
            await joined(sched, "p1")
            await joined(sched, "p2", FOUR)
            assert await training(sched, "p1", timeout=timeout) == [0, 1]
            with pytest.raises(GrantTimeout, match="p1/actor_train"):
                await training(sched, "p2", timeout=timeout)
            assert sched.snapshot().pending == ()

    virtual.run(story())


@pytest.mark.parametrize("timeout", ["soon", float("nan"), True])
def test_a_timeout_that_is_none_is_refused_before_anything_has_changed(timeout: object) -> None:
    async def story() -> None:
        async with a_scheduler() as sched:
            await joined(sched, "p1")
            await training(sched, "p1")
            before = sched.shares
            for call in (
                generating(sched, "p1", timeout=timeout),
                sched.await_release_gpus("p1", timeout=timeout),  # type: ignore[arg-type]
                sched.notify_release_then_request_gpus("p1", "actor_train", "actor_infer", 6, 1, timeout),  # type: ignore[arg-type]
            ):
                with pytest.raises(InvalidRequest, match="timeout"):
                    await call
            assert sched.shares is before

    virtual.run(story())


# What is told


def test_rollouts_and_streams_may_be_numbers() -> None:
    async def story() -> None:
        async with a_scheduler() as sched:
            await joined(sched, "p1")
            client = PipelineClient(sched, "p1")
            await client.signal_rollout_demand(7, 8)
            await sched.report_progress(ProgressReport("p1", 1, 8, 0, 6))  # type: ignore[arg-type]
            assert sched.snapshot().open_rollouts == {"p1": 8}
            assert remaining(sched) == 8, "of an older rollout: shown, not counted"
            await sched.report_progress(ProgressReport("p1", 1, 5, 0, 7))  # type: ignore[arg-type]
            await sched.report_progress(ProgressReport("p1", 1, 3, 1, 7))  # type: ignore[arg-type]
            assert remaining(sched) == 6
            await generating(sched, "p1", 8)
            await sched.report_progress(ProgressReport("p1", 5, 5, 0, 5))  # type: ignore[arg-type]
            assert remaining(sched) == 8, "two rollouts late is late as well"

    virtual.run(story())


def remaining(sched: Scheduler) -> int:
    (rollout,) = sched.shares.rollouts.values()
    return rollout.remaining


def test_a_snapshot_is_a_value_that_does_not_change_and_can_be_sent() -> None:
    async def story() -> None:
        async with a_scheduler() as sched:
            await joined(sched, "p1")
            await generating(sched, "p1")
            found = sched.snapshot()
            again = pickle.loads(pickle.dumps(found))
            assert again == found == sched.snapshot()
            for one in (found, again):
                with pytest.raises(TypeError):
                    one.leases.pop(0)  # type: ignore[union-attr]
                with pytest.raises(TypeError):
                    one.open_rollouts["p2"] = 3  # type: ignore[index]
                with pytest.raises(AttributeError):
                    one.idle = ()  # type: ignore[misc]
            await sched.await_release_gpus("p1")
            assert set(found.leases) == {0, 1, 2, 3}

    virtual.run(story())


def test_a_pool_and_its_callers_survive_a_cancel_at_every_step() -> None:
    """Each operation is cancelled after each possible number of turns; nothing is lost or stuck."""

    async def story(kind: int, after: int) -> bool:
        async with a_scheduler(Pool(4, 4)) as sched:
            await joined(sched, "p1")
            await joined(sched, "p2", OTHER)
            await generating(sched, "p1")
            await training(sched, "p2")
            operations = (
                lambda: training(sched, "p1"),
                lambda: sched.notify_release_then_request_gpus("p2", "actor_train", "actor_infer", 6, 5),  # type: ignore[arg-type]
                lambda: sched.await_release_gpus("p1"),
                lambda: sched.notify_release_gpus("p1", "actor_infer"),
                lambda: sched.register_pipeline("p3", ALL_FOUR, Hooks()),
                lambda: sched.unregister_pipeline("p1"),
            )
            task = asyncio.create_task(operations[kind]())
            await turns(after)
            ended = task.done()
            task.cancel()
            await asyncio.wait({task})
            await asyncio.sleep(1)
            assert sched.snapshot().pending == ()
            trained = {one.pipeline for one in sched.snapshot().leases.values() if one.cluster == "actor_train"}
            assert not (kind == 0 and task.cancelled() and "p1" in trained), "nobody knows that it holds this"
            for name in ("p1", "p2"):
                for cluster in ("actor_train", "actor_infer"):
                    try:
                        await sched.notify_release_gpus(name, cluster)
                    except MusterError as gone:
                        assert "not registered" in gone.message
            await asyncio.sleep(1)
            assert sched.snapshot().idle == (0, 1, 2, 3)
            return ended

    for kind in range(6):
        for after in range(50):
            if virtual.run(story(kind, after)):
                break
        else:
            raise AssertionError(f"operation {kind} never ended")


@pytest.mark.parametrize(
    "maps",
    [
        {"a": ([0, 1], 1), "b": ([0, 1], 1), "c": ([0, 1], 2)},
        {"a": ([0, 1, 2, 3], 4), "b": ([0, 1, 2, 3], 1)},
        {"a": ([0, 1, 2, 3], 2), "b": ([0, 1, 2, 3], 2), "c": ([0, 1, 2, 3], 4)},
    ],
)
def test_bundles_of_different_sizes_take_turns_too(maps: dict[str, tuple[list[int], int]]) -> None:
    async def story() -> None:
        async with a_scheduler(min_turn_s=2) as sched:
            served: dict[str, list[float]] = {name: [0.0] for name in maps}
            for name, (gpus, size) in maps.items():
                hooks = Hooks(shrink=[0.1] * 500, expand=[0.2] * 500)
                await joined(sched, name, {"actor_infer": ClusterSpec(gpus, size)}, hooks)
            asking = [asyncio.create_task(generating(sched, name, 1000)) for name in maps]
            while now() < 60:
                await asyncio.sleep(0.1)
                for name in maps:
                    if held_by(sched, name):
                        served[name].append(now())
            await asyncio.gather(*asking)
            longest = {name: max(b - a for a, b in pairwise(times)) for name, times in served.items()}
            assert all(gap < 6 for gap in longest.values()), longest

    virtual.run(story())

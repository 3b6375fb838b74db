"""What every scheduler does, wherever it runs: told to one in this process, over HTTP and on Ray."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import pytest

from muster.errors import AlreadyExists, InvalidRequest, MusterError, NotFound, PipelineKilled, PipelineQuarantined
from muster.sharing import (
    ClusterSpec,
    GrantTimeout,
    PipelineClient,
    Pool,
    Priority,
    ProgressReport,
    RequestRefused,
    SharingEvent,
)
from muster.sharing.api import SchedulerApi

POOL = Pool(gpus=4, gpus_per_node=2)
INFER, TRAIN = "actor_infer", "actor_train"
ALL = [0, 1, 2, 3]
BOUND_S = 20.0


class Stage(Protocol):
    """A scheduler of which nobody has anything."""

    scheduler: SchedulerApi
    before: int  # how many events it had when the story began

    async def hooks(self) -> Any:
        """Hooks of another pipeline."""

    async def asked(self, hooks: Any) -> list[str]:
        """What was asked of them: `shrink [0, 1]`."""


Story = Callable[[Stage], Awaitable[None]]


def maps(*train: int) -> dict[str, ClusterSpec]:
    return {TRAIN: ClusterSpec(list(train) or [0, 1]), INFER: ClusterSpec(ALL)}


async def joined(stage: Stage, name: str, *train: int) -> Any:
    hooks = await stage.hooks()
    await stage.scheduler.register_pipeline(name, maps(*train), hooks)
    await stage.scheduler.admit_pipeline(name)
    return hooks


async def generating(stage: Stage, name: str, estimate: int = 100) -> list[int]:
    return await stage.scheduler.request_gpus(name, INFER, Priority.GENERATION, estimate, timeout=BOUND_S)


async def training(stage: Stage, name: str, timeout: float = BOUND_S) -> list[int]:
    return await stage.scheduler.request_gpus(name, TRAIN, Priority.ACTOR_TRAINING, timeout=timeout)


async def events(stage: Stage) -> list[SharingEvent]:
    return (await stage.scheduler.events())[stage.before :]


async def waits(stage: Stage, name: str) -> None:
    """Until that pipeline is in the queue."""
    async with asyncio.timeout(BOUND_S):
        while not any(one.pipeline == name for one in (await stage.scheduler.snapshot()).pending):
            await asyncio.sleep(0.01)


# Stories -----------------------------------------------------------------------------------------


async def a_pipeline_generates_trains_and_gives_everything_back(stage: Stage) -> None:
    sched = stage.scheduler
    hooks = await joined(stage, "p1")
    assert set(await generating(stage, "p1", 8)) <= set(ALL)
    assert not await sched.report_progress(ProgressReport("p1", completed=2, target=8))
    assert (await sched.snapshot()).open_rollouts == {"p1": 8}
    await sched.clear_progress("p1")
    released = await sched.await_release_gpus("p1", timeout=BOUND_S)
    assert "vacated" in released.text or "nothing" in released.text
    assert await training(stage, "p1") == [0, 1]
    holder = (await sched.snapshot()).leases[0]
    assert (holder.pipeline, holder.cluster, holder.rank, holder.state) == ("p1", TRAIN, 0, "held")
    assert (await sched.notify_release_gpus("p1", TRAIN)).gpus == (0, 1)
    found = await sched.snapshot()
    assert found.idle == (0, 1, 2, 3) and not found.leases and not found.pending and not found.open_rollouts
    assert any(one.startswith("expand") for one in await stage.asked(hooks))
    assert any(one.startswith("shrink") for one in await stage.asked(hooks))


async def a_client_speaks_for_a_rollout_loop(stage: Stage) -> None:
    await joined(stage, "p1")
    client = PipelineClient(stage.scheduler, "p1")
    with pytest.raises(RequestRefused, match="begin_progress_batch of p1"):
        await client.begin_progress_batch(8)
    assert await client.signal_rollout_demand(1, 8, timeout=BOUND_S)
    await client.begin_progress_batch(8)
    await client.bump_completed(4)
    reports = await stage.scheduler.reports()
    assert reports["p1"] == ProgressReport("p1", 4, 8, None, "1")
    await client.end_progress_batch()
    assert not (await stage.scheduler.snapshot()).open_rollouts


async def a_demand_outlives_the_wait_that_its_caller_gave_up(stage: Stage) -> None:
    await joined(stage, "p1", *ALL)
    await joined(stage, "p2", 0, 1)
    assert await training(stage, "p1") == ALL
    client = PipelineClient(stage.scheduler, "p2")
    with pytest.raises(GrantTimeout):
        await client.signal_rollout_demand(1, 8, timeout=0.2)
    found = await stage.scheduler.snapshot()
    assert found.open_rollouts == {"p2": 8} and not found.pending
    await client.begin_progress_batch(8)
    await client.bump_completed(4)
    await stage.scheduler.notify_release_gpus("p1", TRAIN)
    async with asyncio.timeout(BOUND_S):
        while not (await stage.scheduler.snapshot()).leases:
            await asyncio.sleep(0.01)
    await client.end_progress_batch()
    assert not (await stage.scheduler.snapshot()).open_rollouts


async def hooks_are_required_and_have_to_work(stage: Stage) -> None:
    for hooks in (None, object()):
        with pytest.raises(InvalidRequest, match="hooks"):
            await stage.scheduler.register_pipeline("p1", maps(), hooks)
    assert (await stage.scheduler.snapshot()).idle == (0, 1, 2, 3)


async def maps_that_cannot_be_are_refused_and_nothing_is_stored(stage: Stage) -> None:
    hooks = await stage.hooks()
    with pytest.raises(InvalidRequest) as bad:
        await stage.scheduler.register_pipeline("p1", {TRAIN: ClusterSpec([9])}, hooks)
    assert {problem.field for problem in bad.value.problems} == {"clusters", "clusters.actor_train"}
    await stage.scheduler.register_pipeline("p1", maps(), hooks)  # as if nothing had been


async def registering_again_keeps_what_is_held_and_other_values_are_refused(stage: Stage) -> None:
    hooks = await joined(stage, "p1")
    assert await training(stage, "p1") == [0, 1]
    await stage.scheduler.register_pipeline("p1", maps(), hooks)
    assert (await stage.scheduler.snapshot()).leases[1].pipeline == "p1"
    with pytest.raises(AlreadyExists):
        await stage.scheduler.register_pipeline("p1", maps(), hooks, weight=2.0)
    assert await training(stage, "p1") == [0, 1]  # an answer that got lost is given again


async def who_is_not_admitted_gets_nothing(stage: Stage) -> None:
    await stage.scheduler.register_pipeline("p1", maps(), await stage.hooks())
    with pytest.raises(RequestRefused, match="admitted"):
        await training(stage, "p1")
    await stage.scheduler.admit_pipeline("p1")
    await stage.scheduler.admit_pipeline("p1")
    assert await training(stage, "p1") == [0, 1]


async def a_pipeline_that_nobody_knows_is_not_found(stage: Stage) -> None:
    for call in (
        stage.scheduler.request_gpus("ghost", TRAIN, Priority.ACTOR_TRAINING),
        stage.scheduler.notify_release_gpus("ghost", TRAIN),
        stage.scheduler.quarantine_pipeline("ghost", "it haunts"),
        stage.scheduler.report_progress(ProgressReport("ghost", 1, 2)),
    ):
        with pytest.raises(NotFound, match="ghost"):
            await call
    await stage.scheduler.unregister_pipeline("ghost")


async def what_makes_no_sense_is_refused_before_anything_changes(stage: Stage) -> None:
    await joined(stage, "p1")
    wrong: Any = 9
    with pytest.raises(InvalidRequest, match="priority"):
        await stage.scheduler.request_gpus("p1", TRAIN, wrong)
    with pytest.raises(RequestRefused, match="neither an estimate"):
        await stage.scheduler.request_gpus("p1", INFER, Priority.GENERATION)
    with pytest.raises(InvalidRequest):
        await stage.scheduler.report_progress(ProgressReport("p1", -1, 8))
    with pytest.raises(RequestRefused, match="for actor_infer"):
        await stage.scheduler.await_release_gpus("p1", TRAIN)
    with pytest.raises(InvalidRequest, match="no node 7"):
        await stage.scheduler.lose_node(7)
    assert not (await stage.scheduler.snapshot()).pending


async def a_request_that_is_not_granted_in_time_says_why_and_is_withdrawn(stage: Stage) -> None:
    await joined(stage, "p1")
    await joined(stage, "p2")
    await training(stage, "p1")
    with pytest.raises(GrantTimeout, match=r"p2/actor_train was not granted within 0\.3 s: .*p1"):
        await training(stage, "p2", timeout=0.3)
    assert not (await stage.scheduler.snapshot()).pending


async def a_waiter_is_answered_when_the_holder_releases(stage: Stage) -> None:
    await joined(stage, "p1")
    await joined(stage, "p2")
    await training(stage, "p1")
    waiting = asyncio.ensure_future(training(stage, "p2"))
    await waits(stage, "p2")
    [place] = (await stage.scheduler.snapshot()).pending
    assert (place.cluster, place.priority) == (TRAIN, Priority.ACTOR_TRAINING) and "p1" in place.reason
    await stage.scheduler.notify_release_gpus("p1", TRAIN)
    assert await waiting == [0, 1]


async def release_and_request_are_one_step(stage: Stage) -> None:
    sched = stage.scheduler
    await joined(stage, "p1")
    assert await sched.request_gpus("p1", TRAIN, Priority.OLD_LOG_PROBS, timeout=BOUND_S) == [0, 1]
    again = await sched.notify_release_then_request_gpus("p1", TRAIN, TRAIN, Priority.ACTOR_TRAINING, timeout=BOUND_S)
    assert again == [0, 1]
    with pytest.raises(RequestRefused):
        await sched.notify_release_then_request_gpus("p1", TRAIN, INFER, Priority.GENERATION)
    assert (await sched.snapshot()).leases[0].pipeline == "p1"  # an error leaves the first lease untouched


async def releasing_what_is_not_held_says_so(stage: Stage) -> None:
    await joined(stage, "p1")
    released = await stage.scheduler.notify_release_gpus("p1", TRAIN)
    assert released.gpus == () and "nothing was freed" in released.text
    assert (await stage.scheduler.await_release_gpus("p1")).text == "nothing was held"


async def a_report_for_a_rollout_that_is_not_open_is_shown_and_not_counted(stage: Stage) -> None:
    await joined(stage, "p1")
    assert "not open" in (await stage.scheduler.report_progress(ProgressReport("p1", 3, 9)) or "")
    assert (await stage.scheduler.reports()) == {"p1": ProgressReport("p1", 3, 9)}
    assert not (await stage.scheduler.snapshot()).open_rollouts


async def unregistering_frees_everything_and_tells_who_waits(stage: Stage) -> None:
    await joined(stage, "p1")
    await joined(stage, "p2")
    await training(stage, "p1")
    waiting = asyncio.ensure_future(training(stage, "p2"))
    await waits(stage, "p2")
    await stage.scheduler.unregister_pipeline("p2", "its owner went home")
    with pytest.raises(MusterError):
        await waiting
    await stage.scheduler.unregister_pipeline("p1")
    assert (await stage.scheduler.snapshot()).idle == (0, 1, 2, 3)
    told = [one.text for one in await events(stage) if one.kind == "unregistered"]
    assert told == ["its owner went home", ""]


async def a_killed_pipeline_gives_back_what_it_generates_on_and_is_served_no_more(stage: Stage) -> None:
    # Under names of its own: on Ray the same processes play in other stories, and do not come back under these.
    hooks = await joined(stage, "k1")
    await joined(stage, "k2", 2, 3)
    await generating(stage, "k1")
    await training(stage, "k2")
    waiting = asyncio.ensure_future(training(stage, "k1", BOUND_S))
    assert await waiting == [0, 1]
    held = [gpu for gpu, one in (await stage.scheduler.snapshot()).leases.items() if one.pipeline == "k1"]
    assert held == [0, 1]
    released = await stage.scheduler.kill_pipeline("k1", "its owner has left")
    assert released.gpus == () and "keeps GPU 0, 1 until its process is gone" in released.text
    assert "its owner has left" in (await stage.scheduler.snapshot()).quarantined["k1"]
    with pytest.raises(PipelineKilled, match="its owner has left"):
        await generating(stage, "k1")
    with pytest.raises(PipelineKilled):
        await stage.scheduler.register_pipeline("k1", maps(), hooks)
    await stage.scheduler.notify_release_gpus("k1", TRAIN)  # its owner may still say that they are free
    assert (await stage.scheduler.snapshot()).idle == (0, 1)
    with pytest.raises(PipelineKilled):
        await training(stage, "k1")
    forced = await stage.scheduler.kill_pipeline("k2", force=True)
    assert forced.gpus == (2, 3) and not (await stage.scheduler.snapshot()).leases
    told = [(one.pipeline, one.text) for one in await events(stage) if one.kind == "killed"]
    assert [name for name, _ in told] == ["k1", "k2"] and "its owner has left" in told[0][1]
    with pytest.raises(NotFound):
        await stage.scheduler.kill_pipeline("k3")


async def a_quarantined_pipeline_is_frozen_until_new_hooks_have_shrunk_everything(stage: Stage) -> None:
    await joined(stage, "p1")
    await generating(stage, "p1")
    await stage.scheduler.quarantine_pipeline("p1", "its machine burns")
    assert (await stage.scheduler.snapshot()).quarantined == {"p1": "its machine burns"}
    with pytest.raises(PipelineQuarantined, match="burns"):
        await training(stage, "p1")
    hooks = await stage.hooks()
    await stage.scheduler.register_pipeline("p1", maps(), hooks)
    assert "shrink [0, 1, 2, 3]" in await stage.asked(hooks)
    assert not (await stage.scheduler.snapshot()).quarantined
    await stage.scheduler.admit_pipeline("p1")
    assert await generating(stage, "p1")


async def a_lost_nodes_gpus_are_out_of_use_until_it_is_back(stage: Stage) -> None:
    await joined(stage, "p1", 2, 3)
    assert await training(stage, "p1") == [2, 3]
    await stage.scheduler.lose_node(1, "its rack is dark")
    assert 2 not in (await stage.scheduler.snapshot()).leases
    await stage.scheduler.restore_node(1)
    assert await training(stage, "p1") == [2, 3]
    told = [(one.kind, one.text) for one in await events(stage) if one.kind.startswith("node")]
    assert told[:2] == [("node-lost", "node 1: its rack is dark"), ("node-back", "node 1")]


async def events_come_in_order_and_a_snapshot_does_not_change(stage: Stage) -> None:
    before = await stage.scheduler.snapshot()
    await joined(stage, "p1")
    await training(stage, "p1")
    changed: Any = before.leases
    with pytest.raises(TypeError, match="does not change"):
        changed[0] = None
    assert not before.leases and (await stage.scheduler.snapshot()).leases
    told = await events(stage)
    kinds = [one.kind for one in told if one.kind in ("registered", "admitted", "requested", "granted")]
    assert kinds == ["registered", "admitted", "requested", "granted"]
    assert [one.at for one in told] == sorted(one.at for one in told)
    assert told[-1].gpus == (0, 1) and told[-1].pipeline == "p1" and told[-1].cluster == TRAIN


STORIES: tuple[Story, ...] = (
    a_pipeline_generates_trains_and_gives_everything_back,
    a_client_speaks_for_a_rollout_loop,
    a_demand_outlives_the_wait_that_its_caller_gave_up,
    hooks_are_required_and_have_to_work,
    maps_that_cannot_be_are_refused_and_nothing_is_stored,
    registering_again_keeps_what_is_held_and_other_values_are_refused,
    who_is_not_admitted_gets_nothing,
    a_pipeline_that_nobody_knows_is_not_found,
    what_makes_no_sense_is_refused_before_anything_changes,
    a_request_that_is_not_granted_in_time_says_why_and_is_withdrawn,
    a_waiter_is_answered_when_the_holder_releases,
    release_and_request_are_one_step,
    releasing_what_is_not_held_says_so,
    a_report_for_a_rollout_that_is_not_open_is_shown_and_not_counted,
    unregistering_frees_everything_and_tells_who_waits,
    a_killed_pipeline_gives_back_what_it_generates_on_and_is_served_no_more,
    a_quarantined_pipeline_is_frozen_until_new_hooks_have_shrunk_everything,
    a_lost_nodes_gpus_are_out_of_use_until_it_is_back,
    events_come_in_order_and_a_snapshot_does_not_change,
)

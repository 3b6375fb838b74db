"""What do pipelines get when they ask, and what when they ask wrongly?"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from muster.core.sharing.planner import plan
from muster.core.sharing.plans import SharePlan
from muster.errors import (
    AlreadyExists,
    GrantTimeout,
    InvalidRequest,
    MusterError,
    NotFound,
    RequestRefused,
    SchedulerStopped,
    WouldDeadlock,
)
from muster.sharing import ClusterSpec, Pool, Priority, ProgressReport, Scheduler, SharingEvent, planning
from muster.sim import virtual
from muster.types.sharing import Shares, Tenant
from tests.core.sharing.pools import a_crew
from tests.sharing.scripted import (
    FOUR,
    OTHER,
    Hooks,
    PlainHooks,
    a_scheduler,
    generating,
    held_by,
    joined,
    plain_vacated,
    training,
    turns,
)


def test_the_example_of_the_specification() -> None:
    async def story() -> None:
        async with a_scheduler() as sched:
            hooks = await joined(sched, "p1")
            assert await generating(sched, "p1", 8, timeout=30) == [0, 1, 2, 3]
            await sched.report_progress(ProgressReport("p1", completed=2, target=8))
            assert sched.snapshot().open_rollouts == {"p1": 8}
            await sched.await_release_gpus("p1", "actor_infer")
            assert sched.snapshot().idle == (0, 1, 2, 3)
            assert hooks.awake == {}
            await sched.notify_release_then_request_gpus(
                "p1", release="actor_infer", request="actor_train", priority=Priority.ACTOR_TRAINING
            )
            assert held_by(sched, "p1") == {0: "held", 1: "held"}
            await sched.notify_release_gpus("p1", "actor_train")
            await sched.clear_progress("p1")
            assert sched.snapshot().leases == {}

    virtual.run(story())


def test_a_training_takes_only_its_own_gpus_from_a_rollout_and_is_given_them_when_they_are_vacated() -> None:
    async def story() -> None:
        async with a_scheduler() as sched:
            hooks = await joined(sched, "p1", hooks=Hooks(shrink=[2.0]))
            await joined(sched, "p2", OTHER)
            await generating(sched, "p1")
            began = asyncio.get_running_loop().time()
            assert await training(sched, "p2") == [2, 3]
            assert asyncio.get_running_loop().time() - began == 2.0
            assert hooks.calls == [("expand", [0, 1, 2, 3]), ("shrink", [2, 3])]

    virtual.run(story())


def test_a_second_generation_request_returns_what_is_held_and_starts_a_new_step() -> None:
    async def story() -> None:
        async with a_scheduler() as sched:
            await joined(sched, "p1")
            await generating(sched, "p1", 8)
            await sched.report_progress(ProgressReport("p1", completed=8, target=8))
            assert await generating(sched, "p1", 20) == [0, 1, 2, 3]
            assert sched.snapshot().open_rollouts == {"p1": 20}
            assert await sched.request_gpus("p1", "actor_infer", Priority.GENERATION) == [0, 1, 2, 3]
            assert sched.shares.rollouts[next(iter(sched.shares.rollouts))].remaining == 20

    virtual.run(story())


REFUSED: list[tuple[str, type[MusterError], Callable[[Scheduler], Any]]] = [
    ("an unknown pipeline", NotFound, lambda s: training(s, "nobody")),
    ("an unknown cluster", RequestRefused, lambda s: s.request_gpus("p1", "critic", Priority.CRITIC_TRAINING)),
    ("generation elsewhere", RequestRefused, lambda s: s.request_gpus("p1", "actor_train", Priority.GENERATION)),
    ("generation of nothing", RequestRefused, lambda s: s.request_gpus("p1", "actor_infer", Priority.GENERATION)),
    ("an estimate of nothing", InvalidRequest, lambda s: generating(s, "p1", 0)),
    ("an estimate for training", RequestRefused, lambda s: training(s, "p1", step_target_estimate=3)),
    ("no priority", InvalidRequest, lambda s: s.request_gpus("p1", "actor_train", 9)),  # type: ignore[arg-type]
    ("not admitted", RequestRefused, lambda s: training(s, "p2")),
    ("a release of training by waiting", RequestRefused, lambda s: s.await_release_gpus("p1", "actor_train")),
    ("a release by nobody", NotFound, lambda s: s.await_release_gpus("nobody", "actor_infer")),
    ("progress of nobody", NotFound, lambda s: s.report_progress(ProgressReport("nobody", 1, 2))),
    ("negative progress", InvalidRequest, lambda s: s.report_progress(ProgressReport("p1", -1, 2))),
    ("a target of a half", InvalidRequest, lambda s: s.report_progress(ProgressReport("p1", 1, 2.5))),  # type: ignore[arg-type]
    ("admission of nobody", NotFound, lambda s: s.admit_pipeline("nobody")),
    ("no hooks", InvalidRequest, lambda s: s.register_pipeline("p3", clusters=FOUR, hooks=None)),
    ("hooks without expand", InvalidRequest, lambda s: s.register_pipeline("p3", clusters=FOUR, hooks=object())),  # type: ignore[arg-type]
    ("plain hooks", InvalidRequest, lambda s: s.register_pipeline("p3", clusters=FOUR, hooks=PlainHooks())),
    ("a plain vacated", InvalidRequest, lambda s: s.register_pipeline("p3", clusters=FOUR, hooks=plain_vacated())),
    ("a class as hooks", InvalidRequest, lambda s: s.register_pipeline("p3", clusters=FOUR, hooks=Hooks)),  # type: ignore[arg-type]
    ("a bad map", InvalidRequest, lambda s: s.register_pipeline("p3", clusters={}, hooks=Hooks())),
    ("a tenant that is none", InvalidRequest, lambda s: s.register_pipeline("p3", FOUR, Hooks(), tenant="me")),  # type: ignore[arg-type]
    ("a nameless tenant", InvalidRequest, lambda s: s.register_pipeline("p3", FOUR, Hooks(), tenant=Tenant(""))),
    ("other clusters", AlreadyExists, lambda s: s.register_pipeline("p1", clusters=OTHER, hooks=Hooks())),
    ("another weight", AlreadyExists, lambda s: s.register_pipeline("p1", clusters=FOUR, hooks=Hooks(), weight=2.0)),
]


@pytest.mark.parametrize(("kind", "call"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_a_wrong_call_is_refused_at_once_and_changes_nothing(
    kind: type[MusterError], call: Callable[[Scheduler], Any]
) -> None:
    async def story() -> None:
        async with a_scheduler() as sched:
            await joined(sched, "p1")
            await sched.register_pipeline("p2", clusters=OTHER, hooks=Hooks())
            before = sched.shares
            with pytest.raises(kind):
                await call(sched)
            assert sched.shares is before

    virtual.run(story())


def test_a_cluster_is_not_held_at_two_priorities_and_not_asked_for_twice() -> None:
    async def story() -> None:
        async with a_scheduler() as sched:
            await joined(sched, "p1")
            await joined(sched, "p2", FOUR)
            assert await training(sched, "p1") == [0, 1]
            assert await training(sched, "p1") == [0, 1], "the answer may have got lost: it is given again"
            with pytest.raises(RequestRefused, match="ACTOR_TRAINING"):
                await sched.request_gpus("p1", "actor_train", Priority.OLD_LOG_PROBS)
            first = asyncio.create_task(training(sched, "p2"))
            await turns()
            with pytest.raises(RequestRefused, match="pending"):
                await training(sched, "p2")
            await sched.notify_release_gpus("p1", "actor_train")
            assert await first == [0, 1]

    virtual.run(story())


def test_the_same_cluster_at_another_priority_is_had_by_release_then_request() -> None:
    async def story() -> None:
        async with a_scheduler() as sched:
            await joined(sched, "p1")
            await sched.request_gpus("p1", "actor_train", Priority.OLD_LOG_PROBS)
            gpus = await sched.notify_release_then_request_gpus(
                "p1", "actor_train", "actor_train", Priority.ACTOR_TRAINING
            )
            assert gpus == [0, 1]
            assert {one.priority for one in sched.shares.leases.values()} == {Priority.ACTOR_TRAINING}

    virtual.run(story())


def test_an_error_in_release_then_request_leaves_the_first_lease_untouched() -> None:
    async def story() -> None:
        async with a_scheduler() as sched:
            await joined(sched, "p1")
            await training(sched, "p1")
            before = sched.shares
            with pytest.raises(RequestRefused):
                await sched.notify_release_then_request_gpus("p1", "actor_train", "critic", Priority.CRITIC_TRAINING)
            with pytest.raises(RequestRefused, match="neither"):
                await sched.notify_release_then_request_gpus("p1", "actor_train", "actor_infer", Priority.GENERATION)
            assert sched.shares is before

    virtual.run(story())


def test_a_cycle_of_hold_and_wait_is_refused_by_name() -> None:
    async def story() -> None:
        async with a_scheduler() as sched:
            first = {"actor_train": ClusterSpec([0]), "critic": ClusterSpec([1]), "actor_infer": ClusterSpec([3])}
            second = {"actor_train": ClusterSpec([1]), "critic": ClusterSpec([0]), "actor_infer": ClusterSpec([3])}
            await joined(sched, "p1", first)
            await joined(sched, "p2", second)
            await training(sched, "p1")
            await training(sched, "p2")
            waiting = asyncio.create_task(sched.request_gpus("p1", "critic", Priority.CRITIC_TRAINING))
            await turns()
            with pytest.raises(WouldDeadlock, match="p2 waits for GPU 0, held by p1/actor_train; p1 waits for GPU 1"):
                await sched.request_gpus("p2", "critic", Priority.CRITIC_TRAINING)
            await sched.notify_release_gpus("p2", "actor_train")
            assert await waiting == [1]

    virtual.run(story())


def test_a_grant_that_closes_a_cycle_ends_the_wait_that_would_last_for_ever() -> None:
    async def story() -> None:
        async with a_scheduler() as sched:
            for name, train, critic in (("p1", 0, 1), ("p2", 1, 0)):
                own = {"actor_train": ClusterSpec([train]), "critic": ClusterSpec([critic])}
                await joined(sched, name, {**own, "actor_infer": ClusterSpec([2])})
            await joined(sched, "p3", FOUR)
            await training(sched, "p3")
            waits = {
                (name, cluster): asyncio.create_task(sched.request_gpus(name, cluster, priority))
                for name in ("p1", "p2")
                for cluster, priority in (
                    ("actor_train", Priority.ACTOR_TRAINING),
                    ("critic", Priority.CRITIC_TRAINING),
                )
            }
            await turns()
            await sched.notify_release_gpus("p3", "actor_train")
            await turns()
            assert waits["p1", "actor_train"].result() == [0] and waits["p2", "actor_train"].result() == [1]
            refused = [key for key, task in waits.items() if task.done() and task.exception()]
            assert len(refused) == 1
            with pytest.raises(WouldDeadlock, match=r"p1.*p2|p2.*p1"):
                await waits[refused[0]]
            await sched.notify_release_gpus(refused[0][0], "actor_train")
            (last,) = [task for task in waits.values() if not task.done()]
            assert len(await last) == 1

    virtual.run(story())


def test_a_cluster_that_is_still_drained_can_be_asked_for_at_another_priority() -> None:
    async def story() -> None:
        async with a_scheduler() as sched:
            await joined(sched, "p1", hooks=Hooks(shrink=[5.0]))
            await generating(sched, "p1")
            leaving = asyncio.create_task(sched.await_release_gpus("p1"))
            await turns()
            began = asyncio.get_running_loop().time()
            assert await sched.request_gpus("p1", "actor_infer", Priority.INITIALIZATION) == [0, 1, 2, 3]
            assert asyncio.get_running_loop().time() - began == 5.0
            await leaving

    virtual.run(story())


def test_a_request_that_times_out_is_withdrawn_and_closes_only_the_rollout_that_it_opened() -> None:
    async def story() -> None:
        async with a_scheduler() as sched:
            await joined(sched, "p1", {"actor_train": ClusterSpec([0, 1, 2, 3]), "actor_infer": ClusterSpec([0])})
            await joined(sched, "p2", OTHER)
            await training(sched, "p1")
            with pytest.raises(GrantTimeout, match="p1/actor_train") as caught:
                await training(sched, "p2", timeout=5)
            assert isinstance(caught.value, TimeoutError)
            with pytest.raises(GrantTimeout):
                await generating(sched, "p2", timeout=5)
            assert sched.snapshot().pending == ()
            assert sched.snapshot().open_rollouts == {}
            again = asyncio.create_task(generating(sched, "p2"))
            await turns()
            await sched.report_progress(ProgressReport("p2", 1, 100))
            again.cancel()
            await turns()
            assert sched.snapshot().pending == ()
            assert sched.snapshot().open_rollouts == {"p2": 100}, "something was reported: it is real demand"

    virtual.run(story())


def test_a_grant_that_nobody_hears_is_given_back() -> None:
    async def story() -> None:
        async with a_scheduler() as sched:
            await joined(sched, "p1")
            asking = asyncio.create_task(training(sched, "p1"))
            while not held_by(sched, "p1"):
                await asyncio.sleep(0)
            assert asking.cancel(), "granted, and cancelled before it could run"
            with pytest.raises(asyncio.CancelledError):
                await asking
            assert sched.snapshot().leases == {}

    virtual.run(story())


def test_closing_a_rollout_tells_whoever_waits_for_it() -> None:
    async def story() -> None:
        async with a_scheduler() as sched:
            await joined(sched, "p1", {"actor_train": ClusterSpec([0, 1, 2, 3]), "actor_infer": ClusterSpec([0])})
            await joined(sched, "p2")
            await training(sched, "p1")
            closings: list[Callable[[], Any]] = [
                lambda: sched.clear_progress("p2"),
                lambda: sched.await_release_gpus("p2", "actor_infer"),
                lambda: sched.notify_release_gpus("p2", "actor_infer"),
                lambda: sched.report_progress(ProgressReport("p2", 9, 9)),
                lambda: sched.unregister_pipeline("p2"),
            ]
            for close in closings:
                waiting = asyncio.create_task(generating(sched, "p2"))
                await turns()
                await close()
                with pytest.raises(RequestRefused):
                    await waiting
                assert sched.snapshot().pending == ()

    virtual.run(story())


def test_a_pending_request_shows_why_it_waits() -> None:
    async def story() -> None:
        async with a_scheduler() as sched:
            await joined(sched, "p1")
            await joined(sched, "p2", FOUR)
            await training(sched, "p1")
            waiting = asyncio.create_task(training(sched, "p2"))
            await turns()
            (pending,) = sched.snapshot().pending
            assert (pending.pipeline, pending.cluster, pending.priority) == (
                "p2",
                "actor_train",
                Priority.ACTOR_TRAINING,
            )
            assert "p1/actor_train" in pending.reason
            waiting.cancel()

    virtual.run(story())


def test_a_report_for_an_older_rollout_or_a_closed_one_is_kept_and_not_counted() -> None:
    async def story() -> None:
        async with a_scheduler() as sched:
            await joined(sched, "p1")
            early = ProgressReport("p1", 1, 8)
            await sched.report_progress(early)
            assert (sched.snapshot().open_rollouts, await sched.reports()) == ({}, {"p1": early})
            await generating(sched, "p1", 8, rollout_id="r1")
            await sched.report_progress(ProgressReport("p1", 5, 8, rollout_id="r1"))
            await generating(sched, "p1", 9)
            late = ProgressReport("p1", 8, 8, rollout_id="r1")
            await sched.report_progress(late)
            assert sched.snapshot().open_rollouts == {"p1": 9}
            assert await sched.reports() == {"p1": late}
            await sched.report_progress(ProgressReport("p1", 30, 10, "a", rollout_id="r2"))
            await sched.report_progress(ProgressReport("p1", 3, 10, "b", rollout_id="r2"))
            (rollout,) = sched.shares.rollouts.values()
            assert (rollout.target, rollout.remaining) == (20, 7), "clamped, and added up over streams"

    virtual.run(story())


def test_a_release_of_nothing_says_so() -> None:
    async def story() -> None:
        async with a_scheduler() as sched:
            await joined(sched, "p1")
            released = await sched.notify_release_gpus("p1", "actor_train")
            assert released.gpus == ()
            assert "nothing" in released.text

    virtual.run(story())


def test_unregistering_frees_its_gpus_and_disturbs_no_one_else() -> None:
    async def story() -> None:
        async with a_scheduler() as sched:
            await joined(sched, "p1", hooks=Hooks(expand=["hang"]))
            await joined(sched, "p2", OTHER)
            waiting = asyncio.create_task(generating(sched, "p1"))
            await turns()
            await sched.unregister_pipeline("p1")
            await sched.unregister_pipeline("p1")
            with pytest.raises(RequestRefused, match="unregistered"):
                await waiting
            assert await generating(sched, "p2") == [0, 1, 2, 3]

    virtual.run(story())


def test_registering_again_attaches_the_new_hooks_and_keeps_what_is_held() -> None:
    async def story() -> None:
        async with a_scheduler() as sched:
            await joined(sched, "p1")
            await generating(sched, "p1")
            before = sched.shares
            new = Hooks()
            await sched.register_pipeline("p1", clusters=FOUR, hooks=new)
            assert sched.shares is before
            await sched.await_release_gpus("p1")
            assert new.calls == [("shrink", [0, 1, 2, 3])]

    virtual.run(story())


def test_a_stopped_scheduler_refuses_and_changes_nothing() -> None:
    async def story() -> None:
        async with a_scheduler() as sched:
            hooks = await joined(sched, "p1", hooks=Hooks(shrink=["hang"]))
            await joined(sched, "p2", OTHER)
            await generating(sched, "p1")
            waiting = asyncio.create_task(training(sched, "p2"))
            leaving = asyncio.create_task(sched.await_release_gpus("p1"))
            await turns()
            before = sched.snapshot()
            await sched.stop()
            for task in (waiting, leaving):
                with pytest.raises(SchedulerStopped):
                    await task
            assert sched.snapshot() == before
            assert (hooks.cancelled, hooks.running) == (1, set())
            with pytest.raises(SchedulerStopped):
                await training(sched, "p2")

    virtual.run(story())


def test_a_pass_that_fails_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "AGAIN_S", 0.001)
    failures = [RuntimeError("a fault of the planner")] * 2

    def faulty(shares: Shares, now: float) -> SharePlan:
        if failures:
            raise failures.pop()
        return plan(shares, now)

    async def story() -> None:
        told: list[str] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(str(context["exception"])))
        async with a_scheduler(planner=faulty) as sched:
            await joined(sched, "p1")
            assert await training(sched, "p1", timeout=30) == [0, 1]
        assert told == ["a fault of the planner"] * 2

    asyncio.run(story())


def test_every_decision_is_told_with_its_reason() -> None:
    async def story() -> None:
        heard: list[SharingEvent] = []
        async with a_scheduler(on_event=heard.append) as sched:
            await joined(sched, "p1")
            await joined(sched, "p2", OTHER)
            await generating(sched, "p1")
            await training(sched, "p2")
            await turns()
            assert heard == await sched.events()
        shrinking = next(event for event in heard if event.kind == "shrinking")
        assert (shrinking.pipeline, shrinking.ranks, shrinking.gpus) == ("p1", (2, 3), (2, 3))
        assert "p2/actor_train" in shrinking.text

    virtual.run(story())


def test_a_lost_node_takes_its_bundles_with_it_and_comes_back_empty() -> None:
    async def story() -> None:
        async with a_scheduler(Pool(gpus=4, gpus_per_node=2)) as sched:
            hooks = await joined(sched, "p1", {"actor_infer": ClusterSpec([0, 1, 2, 3])})
            await generating(sched, "p1")
            await sched.lose_node(1)
            assert held_by(sched, "p1") == {0: "held", 1: "held"}
            assert sched.snapshot().quarantined == {"gpu 2": "node-lost", "gpu 3": "node-lost"}
            await sched.restore_node(1)
            await turns()
            assert held_by(sched, "p1") == dict.fromkeys(range(4), "held")
            assert hooks.of("shrink") == []

    virtual.run(story())


def test_a_stage_gets_a_gpu_at_once_on_which_a_training_was_to_start_a_worker() -> None:
    async def story() -> None:
        async with a_scheduler() as sched:
            await joined(sched, "p1")
            sched.trainings.declare(a_crew("filler", 1, 1, 4, "fill"))
            await asyncio.sleep(2.0)
            assert sched.trainings.held("filler") == [1, 2, 4, 8], "nothing of it runs there yet"
            assert await training(sched, "p1", timeout=1.0) == [0, 1]

    virtual.run(story())

"""Does a pipeline's client say what it must, when it must, and no more often?"""

from __future__ import annotations

import asyncio
import functools
import logging
from dataclasses import dataclass, field
from types import SimpleNamespace
from unittest.mock import AsyncMock, Mock

import pytest

from muster.errors import GrantTimeout, InvalidRequest, RequestRefused, SchedulerStopped
from muster.sharing import ClusterSpec, PipelineClient, Priority, ProgressReport
from muster.sharing.hooks import problems
from muster.sim import virtual
from tests.sharing.scripted import Hooks, a_scheduler, generating, joined, training


@dataclass
class Listener:
    """Writes down what a client says."""

    said: list[object] = field(default_factory=list)

    async def request_gpus(
        self,
        pipeline: str,
        cluster: str,
        priority: Priority,
        step_target_estimate: int | None = None,
        timeout: float | None = None,
        *,
        rollout_id: str | None = None,
    ) -> list[int]:
        self.said.append((pipeline, cluster, priority, step_target_estimate, timeout, rollout_id))
        return [0]

    async def report_progress(self, report: ProgressReport) -> None:
        self.said.append((report.stream, report.completed, report.target, report.rollout_id))

    async def clear_progress(self, pipeline: str) -> None:
        self.said.append("cleared")


def test_progress_is_reported_at_each_step_of_two_percent() -> None:
    async def story() -> None:
        listener = Listener()
        client = PipelineClient(listener, "p1")
        assert await client.signal_rollout_demand("r1", 200) == [0]
        assert listener.said.pop() == ("p1", "actor_infer", Priority.GENERATION, 200, None, "r1")
        await client.begin_progress_batch(200)
        for _ in range(200):
            await client.bump_completed()
        await client.end_progress_batch()
        assert listener.said == [
            (None, 0, 200, "r1"),
            *((None, done, 200, "r1") for done in range(4, 201, 4)),
            (None, 200, 200, "r1"),
            "cleared",
        ]

    virtual.run(story())


def test_only_the_last_streams_end_clears_progress() -> None:
    async def story() -> None:
        listener = Listener()
        client = PipelineClient(listener, "p1")
        for stream in ("a", "b"):
            await client.begin_progress_batch(2, stream)
        await client.bump_completed(5, "a")
        await client.end_progress_batch("a")
        assert "cleared" not in listener.said
        await client.end_progress_batch("b")
        assert listener.said == [
            ("a", 0, 2, None),
            ("b", 0, 2, None),
            ("a", 2, 2, None),
            ("a", 2, 2, None),
            ("b", 0, 2, None),
            "cleared",
        ]

    virtual.run(story())


def test_a_new_rollout_forgets_streams_that_never_ended() -> None:
    async def story() -> None:
        listener = Listener()
        client = PipelineClient(listener, "p1")
        await client.begin_progress_batch(2, "lost")
        await client.signal_rollout_demand(2, 8)
        await client.begin_progress_batch(8)
        await client.end_progress_batch()
        assert listener.said[-1] == "cleared"

    virtual.run(story())


def test_what_was_not_begun_cannot_go_on() -> None:
    async def story() -> None:
        client = PipelineClient(Listener(), "p1")
        with pytest.raises(RequestRefused):
            await client.bump_completed()
        with pytest.raises(RequestRefused):
            await client.end_progress_batch("a")
        with pytest.raises(InvalidRequest):
            await client.begin_progress_batch(-1)
        await client.begin_progress_batch(8)
        for wrong in (-1, 0.5, True):
            with pytest.raises(InvalidRequest, match="whole numbers"):
                await client.bump_completed(wrong)  # type: ignore[arg-type]

    virtual.run(story())


def test_a_client_without_a_scheduler_is_an_error_at_once() -> None:
    with pytest.raises(InvalidRequest, match="no scheduler"):
        PipelineClient(None, "p1")  # type: ignore[arg-type]


NOWHERE_ELSE = {"actor_train": ClusterSpec([0, 1, 2, 3]), "actor_infer": ClusterSpec([0])}


def test_demand_waits_for_as_long_as_it_takes_and_says_every_30_seconds_for_whom(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "muster.pool")

    async def story() -> None:
        async with a_scheduler() as sched:
            await joined(sched, "p1", NOWHERE_ELSE)
            await joined(sched, "p2", {"actor_infer": ClusterSpec([0, 1, 2, 3])})
            await training(sched, "p1")
            client = PipelineClient(sched, "p2")
            asking = asyncio.create_task(client.signal_rollout_demand(3, 8))
            await asyncio.sleep(3590)
            assert not asking.done()
            await sched.notify_release_gpus("p1", "actor_train")
            assert await asking == [0, 1, 2, 3]
            await client.begin_progress_batch(8)

    virtual.run(story())
    waits = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert len(waits) == 3600 / 30 - 1
    assert waits[0].startswith("p2: waited 30 s for actor_infer: ")
    assert all("p1/actor_train holds GPU 0, 1, 2, 3" in one for one in waits)


def test_a_timeout_of_the_callers_choice_leaves_the_rollout_open() -> None:
    async def story() -> None:
        async with a_scheduler() as sched:
            await joined(sched, "p1", NOWHERE_ELSE)
            await joined(sched, "p2", {"actor_infer": ClusterSpec([0, 1, 2, 3])})
            await training(sched, "p1")
            client = PipelineClient(sched, "p2")
            with pytest.raises(GrantTimeout, match="p1"):
                await client.signal_rollout_demand(3, 8, timeout=5)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(5):
                    await client.signal_rollout_demand(4, 8)
            assert sched.snapshot().open_rollouts == {"p2": 8} and not sched.snapshot().pending
            await client.begin_progress_batch(8)
            await client.bump_completed(2)
            await sched.notify_release_gpus("p1", "actor_train")
            await asyncio.sleep(1)
            assert len(sched.snapshot().leases) == 4, "what was declared is met without another request"
            await client.end_progress_batch()
            assert not sched.snapshot().open_rollouts

    virtual.run(story())


def test_a_request_without_a_rollouts_name_still_closes_what_only_it_had_opened() -> None:
    async def story() -> None:
        async with a_scheduler() as sched:
            await joined(sched, "p1", NOWHERE_ELSE)
            await joined(sched, "p2", {"actor_infer": ClusterSpec([0, 1, 2, 3])})
            await training(sched, "p1")
            with pytest.raises(GrantTimeout):
                await sched.request_gpus("p2", "actor_infer", Priority.GENERATION, 8, timeout=5)
            assert not sched.snapshot().open_rollouts

    virtual.run(story())


def test_the_log_of_a_rollout_has_a_line_per_rollout_and_grant_and_warns_of_lost_and_refused_progress(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "muster.pool")

    async def story() -> None:
        async with a_scheduler() as sched:
            await joined(sched, "p1")
            client = PipelineClient(sched, "p1")
            await client.signal_rollout_demand("r7", 8)
            await client.begin_progress_batch(8)
            await client.bump_completed(8)
            await client.end_progress_batch()
            await training(sched, "p1")
            with pytest.raises(RequestRefused):
                await client.begin_progress_batch(8)
            await sched.stop()
            with pytest.raises(SchedulerStopped):
                await client.begin_progress_batch(8)

    virtual.run(story())
    assert [(one.levelname, one.getMessage()) for one in caplog.records] == [
        ("INFO", "p1: rollout r7 begins: 8 trajectories to generate"),
        ("INFO", "p1: granted GPU 0, 1, 2, 3 for actor_infer"),
        ("INFO", "p1: granted GPU 0, 1 for actor_train"),
        ("WARNING", "p1: progress 0 of 8 was refused: its rollout is not open"),
        ("WARNING", "p1: progress 0 of 8 was lost: the scheduler does not run: call start"),
    ]


def test_a_release_that_waits_for_the_pipelines_own_hooks_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def story() -> None:
        async with a_scheduler(hook_timeout_s=100) as sched:
            await joined(sched, "p1", hooks=Hooks(shrink=[70]))
            await generating(sched, "p1")
            await asyncio.sleep(1)
            await sched.await_release_gpus("p1")

    virtual.run(story())
    assert [one.getMessage() for one in caplog.records if one.name == "muster.pool"] == [
        f"p1: waited {waited_s} s for the release of actor_infer: its hooks have not freed GPU 0, 1, 2, 3"
        for waited_s in (30, 60)
    ]


def test_a_rollout_is_logged_once_and_only_if_it_begins(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "muster.pool")

    def logged_rollouts() -> list[str]:
        return [one.getMessage() for one in caplog.records if "begins" in one.getMessage()]

    async def story() -> None:
        async with a_scheduler() as sched:
            await joined(sched, "p1", NOWHERE_ELSE)
            await joined(sched, "p2", {"actor_infer": ClusterSpec([0, 1, 2, 3])})
            await training(sched, "p1")
            client = PipelineClient(sched, "p1")
            with pytest.raises(RequestRefused):
                await client.begin_progress_batch(8)
            assert logged_rollouts() == []
            waiting = PipelineClient(sched, "p2")
            for _ in range(2):
                with pytest.raises(GrantTimeout):
                    await waiting.signal_rollout_demand("r1", 8, timeout=1)
            await waiting.begin_progress_batch(8)
            assert logged_rollouts() == ["p2: rollout r1 begins: 8 trajectories to generate"]
            await sched.notify_release_gpus("p1", "actor_train")
            await waiting.signal_rollout_demand("r1", 8)
            assert len(logged_rollouts()) == 1
            await waiting.signal_rollout_demand("r2", 8)
            assert len(logged_rollouts()) == 2

    virtual.run(story())


def test_a_batch_without_an_open_rollout_is_an_error_that_names_the_call() -> None:
    async def story() -> None:
        async with a_scheduler() as sched:
            await joined(sched, "p1")
            client = PipelineClient(sched, "p1")
            with pytest.raises(RequestRefused, match="begin_progress_batch of p1: its rollout is not open"):
                await client.begin_progress_batch(8)
            with pytest.raises(RequestRefused, match="bump_completed: p1 has no batch"):
                await client.bump_completed()
            await client.signal_rollout_demand(1, 8)
            await client.begin_progress_batch(8)
            await client.bump_completed()
            assert sched.snapshot().open_rollouts == {"p1": 8}

    virtual.run(story())


def test_a_rollout_that_is_closed_in_the_middle_of_a_batch_is_noticed_by_the_next_step_and_from_then_on() -> None:
    async def story() -> None:
        async with a_scheduler() as sched:
            await joined(sched, "p1")
            client = PipelineClient(sched, "p1")
            await client.signal_rollout_demand(1, 200)
            await client.begin_progress_batch(200)
            await sched.clear_progress("p1")
            await client.bump_completed(3)  # less than a step: the scheduler is not asked
            for _ in range(2):
                with pytest.raises(RequestRefused, match="bump_completed of p1: its rollout is not open"):
                    await client.bump_completed()
            await client.end_progress_batch()
            await client.signal_rollout_demand(2, 8)
            await client.begin_progress_batch(8)

    virtual.run(story())


def test_a_batch_of_a_rollout_that_another_has_replaced_is_refused_with_both_names() -> None:
    async def story() -> None:
        async with a_scheduler() as sched:
            await joined(sched, "p1")
            old, new = PipelineClient(sched, "p1"), PipelineClient(sched, "p1")
            await old.signal_rollout_demand("r1", 8)
            await new.signal_rollout_demand("r2", 8)
            with pytest.raises(RequestRefused, match="r1 is not the open rollout, r2 is"):
                await old.begin_progress_batch(8)
            await new.begin_progress_batch(8)

    virtual.run(story())


class Callable:
    """An object that is called like an async function."""

    async def __call__(self, ranks: object) -> None: ...


def test_whatever_gives_something_to_await_is_a_hook() -> None:
    async def shrink(kind: str, ranks: object) -> None: ...

    made = SimpleNamespace(shrink=functools.partial(shrink, "now"), expand=Callable(), vacated=AsyncMock())
    assert problems(made) == ()
    made.vacated = Mock()
    [problem] = problems(made)
    assert problem.message == "vacated must be an async function: a plain one cannot be awaited"

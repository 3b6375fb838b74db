"""What does a scheduler know after a restart, and how do pipelines and waiters find their places again?"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from muster.errors import InvalidRequest, JournalUnusable, PipelineQuarantined
from muster.sharing import ClusterSpec, Priority, ProgressReport, Scheduler, Tenant, execution, journal, planning
from muster.sim import virtual
from tests.sharing.scripted import (
    FOUR,
    OTHER,
    Hooks,
    a_scheduler,
    generating,
    held_by,
    joined,
    restart_the_machine,
    training,
    turns,
)


def test_leases_demand_and_queue_are_equal_after_a_restart(tmp_path: Path) -> None:
    async def story() -> None:
        async with a_scheduler(journal=tmp_path / "j") as sched:
            await joined(sched, "p1", hooks=Hooks(shrink=["hang"]))
            await joined(sched, "p2", OTHER, Hooks(expand=["hang"]))
            await joined(sched, "p3", {"critic": ClusterSpec([0, 1]), "actor_infer": ClusterSpec([0, 1])})
            await generating(sched, "p1", 50)
            await sched.report_progress(ProgressReport("p1", 5, 30, "a", "r7"))
            for task in (training(sched, "p2"), sched.request_gpus("p3", "critic", Priority.CRITIC_TRAINING)):
                asyncio.ensure_future(task).add_done_callback(lambda done: done.exception())
            await sched.quarantine_pipeline("p3", "silent")
            await turns()
            assert set(held_by(sched, "p1").values()) == {"held", "draining"}
            before = sched.snapshot()
            assert before.pending and before.open_rollouts and before.quarantined
            await sched.stop()
        async with a_scheduler(journal=tmp_path / "j") as again:
            assert again.snapshot() == before
            await turns()
            assert again.snapshot() == before, "nothing moves before somebody attaches"

    virtual.run(story())


def test_granting_and_draining_bundles_are_resolved_by_a_shrink_on_attaching(tmp_path: Path) -> None:
    async def story() -> None:
        async with a_scheduler(journal=tmp_path / "j") as sched:
            await joined(sched, "p1", hooks=Hooks(expand=[0.0, "hang"]))
            await joined(sched, "p2", OTHER)
            await training(sched, "p2")
            await generating(sched, "p1")
            await sched.notify_release_gpus("p2", "actor_train")
            await turns()
            assert held_by(sched, "p1") == {0: "held", 1: "held", 2: "granting", 3: "granting"}
        async with a_scheduler(journal=tmp_path / "j") as again:
            hooks = Hooks(shrink=[1.0])
            await again.register_pipeline("p1", clusters=FOUR, hooks=hooks)
            await asyncio.sleep(2)
            assert hooks.calls == [("shrink", [2, 3]), ("expand", [2, 3])], "its demand is still there"
            assert held_by(again, "p1") == dict.fromkeys(range(4), "held")

    virtual.run(story())


def test_a_release_before_attaching_does_not_believe_that_an_expand_was_never_called(tmp_path: Path) -> None:
    async def story() -> None:
        async with a_scheduler(journal=tmp_path / "j") as sched:
            await joined(sched, "p1", hooks=Hooks(expand=["hang"]))
            asyncio.ensure_future(generating(sched, "p1")).add_done_callback(lambda done: done.exception())
            await turns()
            assert held_by(sched, "p1") == dict.fromkeys(range(4), "granting")
        async with a_scheduler(journal=tmp_path / "j") as again:
            releasing = asyncio.create_task(again.notify_release_gpus("p1", "actor_infer"))
            await turns()
            assert held_by(again, "p1") == dict.fromkeys(range(4), "draining")
            hooks = Hooks()
            await again.register_pipeline("p1", clusters=FOUR, hooks=hooks)
            await releasing
            assert hooks.calls == [("shrink", [0, 1, 2, 3])]

    virtual.run(story())


def test_a_waiter_takes_its_place_again_before_those_who_came_later(tmp_path: Path) -> None:
    async def story() -> None:
        async with a_scheduler(journal=tmp_path / "j") as sched:
            for name in ("p1", "p2", "p3"):
                await joined(sched, name, FOUR)
            await training(sched, "p1")
            for name in ("p2", "p3"):
                asyncio.ensure_future(training(sched, name)).add_done_callback(lambda done: done.exception())
                await turns()
        async with a_scheduler(journal=tmp_path / "j") as again:
            for name in ("p1", "p2", "p3"):
                await again.register_pipeline(name, clusters=FOUR, hooks=Hooks())
            third = asyncio.create_task(training(again, "p3"))
            await again.notify_release_gpus("p1", "actor_train")
            await asyncio.sleep(30)
            assert not third.done(), "the place of p2 is kept"
            assert await training(again, "p2") == [0, 1]
            await again.notify_release_gpus("p2", "actor_train")
            assert await third == [0, 1]

    virtual.run(story())


def test_a_place_that_nobody_takes_again_is_given_up(tmp_path: Path) -> None:
    async def story() -> None:
        async with a_scheduler(journal=tmp_path / "j") as sched:
            for name in ("p1", "p2", "p3"):
                await joined(sched, name, FOUR)
            await training(sched, "p1")
            asyncio.ensure_future(training(sched, "p2")).add_done_callback(lambda done: done.exception())
            await turns()
        async with a_scheduler(journal=tmp_path / "j", reattach_timeout_s=60) as again:
            for name in ("p1", "p2", "p3"):
                await again.register_pipeline(name, clusters=FOUR, hooks=Hooks())
            await again.notify_release_gpus("p1", "actor_train")
            began = asyncio.get_running_loop().time()
            assert await training(again, "p3") == [0, 1]
            assert asyncio.get_running_loop().time() - began == 60.0

    virtual.run(story())


def test_who_does_not_attach_in_time_is_quarantined(tmp_path: Path) -> None:
    async def story() -> None:
        async with a_scheduler(journal=tmp_path / "j") as sched:
            await joined(sched, "p1")
            await generating(sched, "p1")
            await joined(sched, "p2", OTHER)
        async with a_scheduler(journal=tmp_path / "j", reattach_timeout_s=20) as again:
            await again.register_pipeline("p2", clusters=OTHER, hooks=Hooks())
            waiting = asyncio.create_task(training(again, "p2"))
            own = asyncio.create_task(again.request_gpus("p1", "actor_train", Priority.ACTOR_TRAINING))
            await asyncio.sleep(19)
            assert "detached" in {one.pipeline: one.reason for one in again.snapshot().pending}["p2"]
            assert again.snapshot().quarantined == {}
            await asyncio.sleep(2)
            assert "did not attach" in again.snapshot().quarantined["p1"]
            with pytest.raises(PipelineQuarantined):
                await own
            await again.unregister_pipeline("p1")
            assert await waiting == [2, 3]

    virtual.run(story())


def test_times_are_carried_over_to_the_new_clock(tmp_path: Path) -> None:
    async def first() -> None:
        await asyncio.sleep(1000)
        async with a_scheduler(journal=tmp_path / "j") as sched:
            await joined(sched, "p1")
            await generating(sched, "p1")
            await asyncio.sleep(7)
            await sched.report_progress(ProgressReport("p1", 1, 100))

    async def second() -> None:
        async with a_scheduler(journal=tmp_path / "j") as sched:
            (rollout,) = sched.shares.rollouts.values()
            assert rollout.reported_at == pytest.approx(0.0)
            assert {lease.held_since for lease in sched.shares.leases.values()} == {-7.0}

    virtual.run(first())
    virtual.run(second())


def test_the_same_scheduler_can_be_started_again_without_a_journal() -> None:
    async def story() -> None:
        async with a_scheduler() as sched:
            await joined(sched, "p1")
            await generating(sched, "p1")
            before = sched.snapshot()
            await sched.stop()
            await sched.start()
            assert sched.snapshot() == before
            hooks = Hooks()
            await sched.register_pipeline("p1", clusters=FOUR, hooks=hooks)
            await sched.await_release_gpus("p1")
            assert hooks.calls == [("shrink", [0, 1, 2, 3])]

    virtual.run(story())


def test_after_a_crash_of_the_machine_a_pipeline_counts_once_it_has_shrunk_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last decisions may be lost: a rank that the journal calls free may be awake."""

    async def story() -> None:
        async with a_scheduler(journal=tmp_path / "j") as sched:
            await joined(sched, "p1")
            await joined(sched, "p2", OTHER)
            await training(sched, "p2")
            await generating(sched, "p1")
        restart_the_machine(tmp_path, monkeypatch)
        async with a_scheduler(journal=tmp_path / "j") as again:
            assert held_by(again, "p1") == {0: "held", 1: "held"}
        async with a_scheduler(journal=tmp_path / "j") as again:  # a second restart does not make it sure
            hooks = Hooks(shrink=[1.0])
            attaching = asyncio.create_task(again.register_pipeline("p1", clusters=FOUR, hooks=hooks))
            await turns()
            assert hooks.calls == [("shrink", [0, 1, 2, 3])]
            assert held_by(again, "p1") == {0: "held", 1: "held"}, "nothing moves before that"
            await attaching
            await asyncio.sleep(1)
            assert hooks.calls[1:] == [("expand", [0, 1])], "its demand is still there"
            await again.register_pipeline("p2", clusters=OTHER, hooks=Hooks())
            assert held_by(again, "p2") == {2: "held", 3: "held"}, "what is fixed was never awake"
            await again.register_pipeline("p1", clusters=FOUR, hooks=(same := Hooks()))
            assert same.calls == []

    virtual.run(story())


def test_who_cannot_shrink_after_a_crash_of_the_machine_is_quarantined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def story() -> None:
        async with a_scheduler(journal=tmp_path / "j") as sched:
            await joined(sched, "p1")
        restart_the_machine(tmp_path, monkeypatch)
        async with a_scheduler(journal=tmp_path / "j") as again:
            with pytest.raises(PipelineQuarantined, match="the engine is gone"):
                await again.register_pipeline("p1", clusters=FOUR, hooks=Hooks(shrink=["raise", "raise"]))
            assert "the engine is gone" in again.snapshot().quarantined["p1"]

    virtual.run(story())


def test_while_the_disk_is_full_nothing_is_decided_and_afterwards_everything_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: int, data: bytes) -> None:
        raise OSError(28, "no space left")

    for module in (planning, execution):
        monkeypatch.setattr(module, "AGAIN_S", 0.01)

    async def story() -> None:
        async with a_scheduler(journal=tmp_path / "j") as sched:
            hooks = await joined(sched, "p1", hooks=Hooks(expand=[0.01]))
            asking = asyncio.create_task(generating(sched, "p1"))
            await turns()
            monkeypatch.setattr(journal, "_write", full)
            with pytest.raises(JournalUnusable, match="no space left"):
                await training(sched, "p1")
            while len(hooks.calls) < 3:  # its reply could not be written: it is called again
                await asyncio.sleep(0.001)
            assert held_by(sched, "p1") == dict.fromkeys(range(4), "granting")
            monkeypatch.setattr(journal, "_write", really)
            assert await asking == [0, 1, 2, 3]
            monkeypatch.setattr(journal, "_write", full)
            with pytest.raises(JournalUnusable):
                await sched.stop()
            monkeypatch.setattr(journal, "_write", really)
        async with a_scheduler(journal=tmp_path / "j") as again:
            assert held_by(again, "p1") == dict.fromkeys(range(4), "held"), "and the file is not locked"

    really = journal._write
    asyncio.run(asyncio.wait_for(story(), 30))


def test_a_place_whose_caller_is_away_is_kept_and_moves_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        one = {"actor_train": ClusterSpec([3]), "actor_infer": ClusterSpec([3])}
        async with a_scheduler(journal=tmp_path / "j") as sched:
            await joined(sched, "p1")
            await joined(sched, "p2", OTHER)
            await joined(sched, "p3", one)
            await training(sched, "p3")
            await generating(sched, "p1")
            asyncio.ensure_future(training(sched, "p2")).add_done_callback(lambda done: done.exception())
            await turns()
        async with a_scheduler(journal=tmp_path / "j") as again:
            hooks = Hooks()
            await again.register_pipeline("p1", clusters=FOUR, hooks=hooks)
            await again.register_pipeline("p3", clusters=one, hooks=Hooks())
            await again.notify_release_gpus("p3", "actor_train")
            await asyncio.sleep(5)
            assert "detached" in again.snapshot().pending[0].reason
            await again.register_pipeline("p2", clusters=OTHER, hooks=Hooks())
            await asyncio.sleep(5)
            assert "asked again" in again.snapshot().pending[0].reason
            assert hooks.calls == [("expand", [3])], "nothing is taken away for it, and generation uses what is free"
            assert await training(again, "p2") == [2, 3]

    virtual.run(story())


# What was taken must be readable ------------------------------------------------------------------

HALF = "/data/\udcff"  # half of a character, as file names may have
TOO_MANY = 1 << 53


def with_infer(**spec: Any) -> dict[str, ClusterSpec]:
    return {**FOUR, "actor_infer": ClusterSpec([0, 1, 2, 3], **spec)}


REFUSED: dict[str, Callable[[Scheduler], Awaitable[object]]] = {
    "slots": lambda sched: sched.register_pipeline("p1", with_infer(slots_per_bundle=TOO_MANY), Hooks()),
    "slots of reward": lambda sched: sched.register_pipeline(
        "p1", {**FOUR, "reward": ClusterSpec((), 1, cast(int, 1.5))}, Hooks()
    ),
    "size of reward": lambda sched: sched.register_pipeline("p1", {**FOUR, "reward": ClusterSpec((), 0)}, Hooks()),
    "weight": lambda sched: sched.register_pipeline("p1", FOUR, Hooks(), 10**400),
    "name of a process": lambda sched: sched.register_pipeline("p1", FOUR, Hooks(), tenant=Tenant(HALF)),
    "round": lambda sched: sched.register_pipeline("p1", FOUR, Hooks(), tenant=Tenant("a", "t", TOO_MANY)),
    "no round": lambda sched: sched.register_pipeline("p1", FOUR, Hooks(), tenant=Tenant("a", "t", True)),
    "estimate": lambda sched: generating(sched, "there", TOO_MANY),
    "name of a rollout": lambda sched: generating(sched, "there", rollout_id=HALF),
    "target": lambda sched: sched.report_progress(ProgressReport("there", 0, TOO_MANY)),
    "name of a stream": lambda sched: sched.report_progress(ProgressReport("there", 0, 5, HALF)),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_could_not_be_read_again_is_refused(tmp_path: Path, what: str) -> None:
    async def story() -> None:
        async with a_scheduler(journal=tmp_path / "j") as sched:
            await joined(sched, "there")
            with pytest.raises(InvalidRequest):
                await REFUSED[what](sched)
        async with a_scheduler(journal=tmp_path / "j") as again:
            assert sorted(again.shares.pipelines) == ["there"]

    virtual.run(story())


def test_reasons_that_others_give_are_kept_as_far_as_they_can_be_written(tmp_path: Path) -> None:
    class Bad(Hooks):
        async def expand(self, ranks: Mapping[int, Sequence[int]]) -> None:
            raise OSError(f"cannot open {HALF}")

    async def story() -> None:
        async with a_scheduler(journal=tmp_path / "j") as sched:
            await joined(sched, "p1", hooks=Bad())
            with pytest.raises(PipelineQuarantined):
                await generating(sched, "p1")
            await joined(sched, "p2")
            await sched.quarantine_pipeline("p2", HALF)
            await joined(sched, "p3")
            await sched.quarantine_pipeline("p3", "")
            await sched.lose_node(0, HALF)
            before = sched.snapshot()
            assert before.quarantined["p2"] == "/data/?" and before.quarantined["p3"] == "no reason was given"
        async with a_scheduler(journal=tmp_path / "j") as again:
            assert again.snapshot() == before

    virtual.run(story())

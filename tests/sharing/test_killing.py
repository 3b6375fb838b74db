"""Is a pipeline that somebody ends really over, and is no GPU given away that it may still use?"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from muster.errors import PipelineKilled, RequestRefused
from muster.sharing import Pool, Priority, Tenant
from muster.sharing.service import PoolService
from muster.sim import virtual
from muster.types.sharing import PipelineId
from tests.sharing.blocking import control_plane
from tests.sharing.room import ALL, INFER, TRAIN, Engine, Room, clusters, in_room
from tests.sharing.scripted import FOUR, OTHER, Hooks, a_scheduler, generating, held_by, joined, training, turns


def test_hooks_that_hang_keep_their_gpus_quarantined_until_force() -> None:
    async def story() -> None:
        async with a_scheduler() as sched:
            hooks = await joined(sched, "p1", hooks=Hooks(shrink=["hang"]))
            await joined(sched, "p2")
            await generating(sched, "p1")
            released = await sched.kill_pipeline("p1", "enough")
            assert hooks.of("shrink") == [[0, 1, 2, 3]], "it was asked once"
            assert released.gpus == () and "keeps GPU 0, 1, 2, 3" in released.text
            waiting = asyncio.create_task(training(sched, "p2"))
            await turns()
            assert not waiting.done() and "killed: enough" in sched.snapshot().pending[0].reason
            assert [one.kind for one in await sched.events()].count("hook-failed") == 1
            assert (await sched.kill_pipeline("p1", force=True)).gpus == (0, 1, 2, 3)
            assert await waiting == [0, 1]

    virtual.run(story())


def test_a_waiter_of_a_killed_pipeline_fails_and_an_expand_in_flight_ends_first() -> None:
    async def story() -> None:
        async with a_scheduler() as sched:
            hooks = await joined(sched, "p1", hooks=Hooks(expand=["hang"]))
            await joined(sched, "p2", OTHER)
            await training(sched, "p2")
            waiting = asyncio.create_task(generating(sched, "p1"))
            await asyncio.sleep(0.1)
            assert hooks.running
            released = await sched.kill_pipeline("p1", "enough")
            with pytest.raises(PipelineKilled, match="p1 was killed: enough"):
                await waiting
            assert hooks.cancelled == 1 and hooks.of("shrink") == [[0, 1]]
            assert released.gpus == (0, 1) and not held_by(sched, "p1")
            assert "p1" not in sched.shares.pipelines
            with pytest.raises(PipelineKilled):
                await generating(sched, "p1")

    virtual.run(story())


def test_one_that_holds_nothing_is_gone_at_once_and_only_its_process_may_not_come_back(tmp_path: Path) -> None:
    async def story() -> None:
        async with a_scheduler(journal=tmp_path / "journal") as sched:
            await sched.register_pipeline("p1", FOUR, Hooks(), tenant=Tenant("one"))
            assert "is gone" in (await sched.kill_pipeline("p1", "enough")).text
        async with a_scheduler(journal=tmp_path / "journal") as sched:  # it is remembered
            with pytest.raises(PipelineKilled):
                await sched.register_pipeline("p1", FOUR, Hooks(), tenant=Tenant("one"))
            await sched.register_pipeline("p1", FOUR, Hooks(), tenant=Tenant("two"))
            assert PipelineId("p1") in sched.shares.pipelines

    virtual.run(story())


def test_a_killed_process_is_told_keeps_its_fixed_gpus_while_it_is_heard_and_a_newcomer_waits(tmp_path: Path) -> None:
    async def test(room: Room) -> None:
        engine = Engine()
        old = await room.pipeline("p1", engine, 0, 1, tenant=Tenant("old"))
        await old.request_gpus("p1", TRAIN, Priority.ACTOR_TRAINING)
        await old.request_gpus("p1", INFER, Priority.GENERATION, 8)
        assert engine.awake == {2, 3}
        released = await (await room.handle()).kill_pipeline("p1", "enough")
        assert released.gpus == (2, 3) and not engine.awake
        killed = next(one for one in room.pool.events() if one.kind == "killed")
        assert killed.text == "by root: enough"
        with pytest.raises(PipelineKilled, match="by root: enough"):
            await old.request_gpus("p1", INFER, Priority.GENERATION, 8)
        with pytest.raises(PipelineKilled):
            await old.register_pipeline("p1", clusters(), engine)
        new = await room.handle(Tenant("new"))
        coming = asyncio.create_task(new.register_pipeline("p1", clusters(), Engine()))
        await asyncio.sleep(3 * room.pool.tenants._ttl_s)  # silence is what is waited for, and it is not silent
        assert not coming.done()
        assert {gpu for gpu, one in room.pool.scheduler.snapshot().leases.items() if one.pipeline == "p1"} == {0, 1}
        await old.stop()
        await coming
        await new.admit_pipeline("p1")
        assert await new.request_gpus("p1", INFER, Priority.GENERATION, 8) == ALL
        with pytest.raises(PipelineKilled):
            await (await room.handle(Tenant("old"))).register_pipeline("p1", clusters(), engine)

    in_room(tmp_path, test, pipeline_ttl_s=0.4)


def test_a_killed_one_whose_owner_leaves_is_gone(tmp_path: Path) -> None:
    async def test(room: Room) -> None:
        old = await room.pipeline("p1", Engine())
        await old.request_gpus("p1", TRAIN, Priority.ACTOR_TRAINING)
        await (await room.handle()).kill_pipeline("p1")
        await old.unregister_pipeline("p1")
        assert room.pool.scheduler.snapshot().idle == (0, 1, 2, 3)
        with pytest.raises((PipelineKilled, RequestRefused)):
            await old.request_gpus("p1", TRAIN, Priority.ACTOR_TRAINING)

    in_room(tmp_path, test)


def test_what_was_killed_stays_so_over_a_restart_and_is_free_once_its_process_is_silent(tmp_path: Path) -> None:
    async def story() -> None:
        before = PoolService("default", Pool(4, 4), tmp_path / "journal")
        await before.start()
        await before.scheduler.register_pipeline("p1", FOUR, Hooks(), tenant=Tenant("old"))
        await before.scheduler.admit_pipeline("p1")
        await training(before.scheduler, "p1")
        await before.scheduler.kill_pipeline("p1", "enough")
        await before.stop()
        after = PoolService("default", Pool(4, 4), tmp_path / "journal", pipeline_ttl_s=0.2)
        await after.start()
        try:
            assert after.scheduler.snapshot().quarantined == {"p1": "killed: enough"}
            assert after.scheduler.snapshot().idle == (2, 3)
            async with asyncio.timeout(10):
                while after.scheduler.shares.pipelines:
                    await asyncio.sleep(0.02)
            assert after.scheduler.snapshot().idle == (0, 1, 2, 3)
        finally:
            await after.stop()

    asyncio.run(story())


@pytest.mark.usefixtures("processes")
def test_the_command_line_ends_a_pipeline_and_says_what_it_keeps(tmp_path: Path) -> None:
    with control_plane(tmp_path) as house:
        with pytest.raises(PipelineKilled, match="enough"), house.pipeline("p1").training():
            killed = house.plane.muster("share", "kill", "p1", "--why", "enough", MUSTER_HOME=str(house.plane.home))
            assert killed.wait() == 0 and "p1 is ended, and keeps GPU 0 until its process is gone" in killed.text
            shown = house.plane.muster("share", "status", MUSTER_HOME=str(house.plane.home))
            assert shown.wait() == 0 and "killed: by" in shown.text and "enough" in shown.text
            force = house.plane.muster(
                "share", "kill", "p1", "--force", "-o", "json", MUSTER_HOME=str(house.plane.home)
            )
            assert force.wait() == 0 and json.loads(force.text)["gpus"] == [0]
        again = house.plane.muster("share", "kill", "p1", MUSTER_HOME=str(house.plane.home))
        assert again.wait() != 0 and "was killed" in again.text

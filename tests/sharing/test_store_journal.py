"""Is what a pool knows kept in the control plane's store, and is what an earlier version kept in a file taken over?"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Self

import pytest

from muster import errors
from muster.core.keeping import POOL as KIND
from muster.errors import JournalUnusable
from muster.ports import Stored, Write
from muster.sharing import Pool, Priority, Scheduler, Tenant, pool_state
from muster.sharing.journal import FileJournal
from muster.sharing.store_journal import MIGRATED, StoreJournal
from muster.store.sqlite import SqliteStore
from muster.types.sharing import PipelineId, Shares
from tests.sharing.scripted import FOUR, OTHER, Hooks, generating, joined, training, turns
from tests.sharing.test_journal import OLD_JOURNAL, POOL

BOUND_S = 20.0


def on_a_store(tmp_path: Path, story: Callable[[SqliteStore], Awaitable[None]]) -> None:
    async def run() -> None:
        store = SqliteStore.open(tmp_path / "muster.db", synchronous="NORMAL")
        try:
            async with asyncio.timeout(BOUND_S):
                await story(store)
        finally:
            await store.close()

    asyncio.run(run())


def a_scheduler(store: SqliteStore, *, boot: str = "", old: Path | None = None) -> Scheduler:
    return Scheduler(POOL, StoreJournal(store, "default", boot=boot, file_of_0_1=old))


def test_what_a_pool_knows_is_in_the_store_and_outlives_the_process(tmp_path: Path) -> None:
    kept = {}

    async def before(store: SqliteStore) -> None:
        scheduler = a_scheduler(store)
        await scheduler.start()
        await joined(scheduler, "p1", hooks=Hooks(shrink=["hang"]))
        await joined(scheduler, "p2", OTHER)
        await generating(scheduler, "p1", 50)
        asyncio.ensure_future(training(scheduler, "p2")).add_done_callback(lambda done: done.exception())
        await turns()
        await scheduler.stop()
        kept["before"] = scheduler.snapshot()

    async def after(store: SqliteStore) -> None:
        scheduler = a_scheduler(store)
        await scheduler.start()
        assert scheduler.snapshot() == kept["before"]
        assert scheduler.snapshot().pending and scheduler.snapshot().open_rollouts == {"p1": 50}
        await scheduler.stop()

    on_a_store(tmp_path, before)
    on_a_store(tmp_path, after)


def test_pools_of_one_store_do_not_meet(tmp_path: Path) -> None:
    async def story(store: SqliteStore) -> None:
        for name in ("default", "other"):
            scheduler = Scheduler(POOL, StoreJournal(store, name))
            await scheduler.start()
            assert not scheduler.shares.pipelines
            await joined(scheduler, f"only-{name}")
            await scheduler.stop()

    on_a_store(tmp_path, story)


class Slow(SqliteStore):
    """A store that is away until `back` is set."""

    back: asyncio.Event

    @classmethod
    def there(cls, folder: Path) -> Self:
        store = cls.open(folder / "muster.db", synchronous="NORMAL")
        store.back = asyncio.Event()
        store.back.set()
        return store

    async def write(self, write: Write) -> Stored | None:
        if any(one.kind == KIND for one in write.records):
            await self.back.wait()
        return await super().write(write)


def test_nobody_is_answered_and_no_hook_is_called_before_it_is_written(tmp_path: Path) -> None:
    async def story() -> None:
        store = Slow.there(tmp_path)
        scheduler = a_scheduler(store)
        await scheduler.start()
        hooks = await joined(scheduler, "p1")
        store.back.clear()
        asked = [
            asyncio.ensure_future(generating(scheduler, "p1")),
            asyncio.ensure_future(training(scheduler, "p1")),
        ]
        await turns(200)
        assert scheduler.snapshot().leases  # decided,
        assert not hooks.calls and not any(one.done() for one in asked)  # and kept to itself
        store.back.set()
        async with asyncio.timeout(BOUND_S):
            assert await asked[1] == [0, 1] and await asked[0]
        assert hooks.of("expand")
        await scheduler.stop()
        await store.close()

    asyncio.run(story())


def test_a_request_that_is_cancelled_before_its_grant_is_written_holds_nothing(tmp_path: Path) -> None:
    async def story() -> None:
        store = Slow.there(tmp_path)
        scheduler = a_scheduler(store)
        await scheduler.start()
        await joined(scheduler, "p1")
        store.back.clear()
        asking = asyncio.ensure_future(training(scheduler, "p1"))
        await turns(50)
        assert scheduler.snapshot().leases
        asking.cancel()
        await turns(50)
        assert asking.cancelled() and not scheduler.snapshot().leases
        store.back.set()
        await scheduler.stop()
        await store.close()

    asyncio.run(story())


def test_a_store_that_takes_nothing_any_more_ends_every_change(tmp_path: Path) -> None:
    class Fenced(SqliteStore):
        fenced = False

        async def write(self, write: Write) -> Stored | None:
            if self.fenced:
                raise errors.Unavailable("another control plane acts", retryable=False)
            return await super().write(write)

    async def story() -> None:
        store = Fenced.open(tmp_path / "muster.db", synchronous="NORMAL")
        scheduler = a_scheduler(store)
        await scheduler.start()
        await joined(scheduler, "p1")
        store.fenced = True
        with pytest.raises(JournalUnusable, match="another control plane acts"):
            await scheduler.request_gpus("p1", "actor_train", Priority.ACTOR_TRAINING)
        before = scheduler.shares
        with pytest.raises(JournalUnusable, match="another control plane acts"):
            await scheduler.unregister_pipeline("p1")
        assert scheduler.shares is before
        with pytest.raises(JournalUnusable):
            await scheduler.stop()
        await store.close()

    asyncio.run(story())


class Failing(SqliteStore):
    """A store whose next write of a pool fails like that."""

    error: Exception | None = None

    async def write(self, write: Write) -> Stored | None:
        if self.error is not None and any(one.kind == KIND for one in write.records):
            raise self.error
        return await super().write(write)


@pytest.mark.parametrize("how", ["raises", "cancelled"])
def test_a_writer_that_ends_otherwise_leaves_nobody_waiting_and_is_written_past_by_nobody(
    tmp_path: Path, how: str
) -> None:
    async def story() -> None:
        store = Failing.open(tmp_path / "muster.db", synchronous="NORMAL")
        scheduler = a_scheduler(store)
        await scheduler.start()
        store.error = RuntimeError("something else") if how == "raises" else errors.Unavailable("it is full")
        asking = asyncio.ensure_future(joined(scheduler, "p1"))
        await turns()
        writers = [one for one in asyncio.all_tasks() if one.get_name().startswith("journal of")]
        for writer in writers:
            if how == "cancelled":
                writer.cancel()
        async with asyncio.timeout(BOUND_S):
            with pytest.raises(JournalUnusable):
                await asking
        store.error = None
        with pytest.raises(JournalUnusable):
            await joined(scheduler, "p2", OTHER)
        assert not any("p2" in key for key in store.records(KIND))
        await asyncio.gather(*writers, return_exceptions=True)
        await store.close()

    asyncio.run(story())


def test_a_stop_ends_though_the_store_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pool_state, "LAST_WRITE_S", 0.05)

    async def story() -> None:
        store = Failing.open(tmp_path / "muster.db", synchronous="NORMAL")
        scheduler = a_scheduler(store)
        await scheduler.start()
        await joined(scheduler, "p1")
        store.error = errors.Unavailable("it is full")
        async with asyncio.timeout(BOUND_S):
            await scheduler.stop()
        await store.close()

    asyncio.run(story())
    assert "the store takes nothing" in caplog.text


def test_new_hooks_are_not_tried_before_it_is_written_that_the_process_before_is_over(tmp_path: Path) -> None:
    async def story() -> None:
        store = Slow.there(tmp_path)
        first = a_scheduler(store)
        await first.start()
        await first.register_pipeline("p1", FOUR, Hooks(), tenant=Tenant("one"))
        await first.stop()
        second, hooks = a_scheduler(store), Hooks()
        await second.start()
        store.back.clear()
        coming = asyncio.ensure_future(second.register_pipeline("p1", FOUR, hooks, tenant=Tenant("two")))
        await turns(100)
        assert not hooks.calls and not coming.done()
        store.back.set()
        async with asyncio.timeout(BOUND_S):
            await coming
        assert hooks.of("shrink") == [[0, 1, 2, 3]]
        await second.stop()
        await store.close()

    asyncio.run(story())


def test_who_is_told_that_time_is_over_is_out_of_the_queue_for_good(tmp_path: Path) -> None:
    async def story(store: SqliteStore) -> None:
        scheduler = a_scheduler(store)
        await scheduler.start()
        await joined(scheduler, "p1")
        await joined(scheduler, "p2")
        await training(scheduler, "p1")
        with pytest.raises(errors.GrantTimeout):
            await training(scheduler, "p2", timeout=0.05)
        assert not any(key.startswith("default/request/") for key in store.records(KIND))
        await scheduler.stop()

    on_a_store(tmp_path, story)


def test_after_a_crash_of_the_machine_pipelines_are_unsure(tmp_path: Path) -> None:
    async def story(store: SqliteStore) -> None:
        for boot, unsure in (("first", False), ("first", False), ("second", True)):
            scheduler = a_scheduler(store, boot=boot)
            await scheduler.start()
            assert any(one.unsure for one in scheduler.shares.pipelines.values()) is unsure
            await scheduler.register_pipeline("p1", FOUR, Hooks())
            await scheduler.stop()

    on_a_store(tmp_path, story)


# Files of 0.1 ------------------------------------------------------------------------------------


def test_a_file_of_0_1_is_taken_over_and_put_away_afterwards(tmp_path: Path) -> None:
    old = tmp_path / "journal"
    old.write_text(OLD_JOURNAL)
    put_away = tmp_path / f"journal{MIGRATED}"

    async def story(store: SqliteStore) -> None:
        scheduler = a_scheduler(store, old=old)
        await scheduler.start()
        there = scheduler.shares
        assert sorted(there.pipelines) == ["p1"] and len(there.leases) == 2
        assert not old.exists() and put_away.read_text() == OLD_JOURNAL
        await scheduler.stop()
        again = a_scheduler(store, old=old)
        await again.start()
        assert again.snapshot().leases[0].pipeline == "p1"
        await again.stop()

    on_a_store(tmp_path, story)


def test_a_file_of_0_1_stays_until_the_store_has_it(tmp_path: Path) -> None:
    old = tmp_path / "journal"
    old.write_text(OLD_JOURNAL)

    async def story() -> None:
        store = Slow.open(tmp_path / "muster.db", synchronous="NORMAL")
        store.back = asyncio.Event()
        starting = asyncio.ensure_future(a_scheduler(store, old=old).start())
        await turns(50)
        assert old.read_text() == OLD_JOURNAL and not starting.done()
        starting.cancel()
        await store.close()

    asyncio.run(story())


def test_a_file_of_0_1_that_is_written_after_a_step_back_counts_again(tmp_path: Path) -> None:
    old = tmp_path / "journal"

    async def story(store: SqliteStore) -> None:
        first = a_scheduler(store, old=old)
        await first.start()
        await joined(first, "p2", OTHER)
        await first.stop()
        old.write_text(OLD_JOURNAL)
        second = a_scheduler(store, old=old)
        await second.start()
        assert sorted(second.shares.pipelines) == ["p1"]
        await second.stop()
        assert not any("p2" in key for key in store.records(KIND))

    on_a_store(tmp_path, story)


def test_a_damaged_file_of_0_1_is_left_alone(tmp_path: Path) -> None:
    old = tmp_path / "journal"
    old.write_text("a diary\n")

    async def story(store: SqliteStore) -> None:
        with pytest.raises(JournalUnusable, match="not a journal"):
            await a_scheduler(store, old=old).start()
        assert old.read_text() == "a diary\n" and not store.records(KIND)

    on_a_store(tmp_path, story)


def test_records_of_another_pool_are_refused_unless_nobody_has_anything_of_it(tmp_path: Path) -> None:
    async def story(store: SqliteStore) -> None:
        scheduler = a_scheduler(store)
        await scheduler.start()
        await joined(scheduler, "p1")
        await scheduler.stop()
        with pytest.raises(JournalUnusable, match="is about Pool") as refused:
            await Scheduler(Pool(2, 2), StoreJournal(store, "default")).start()
        assert "end p1 first" in refused.value.hint
        larger = Scheduler(Pool(8, 8), StoreJournal(store, "default"))
        await larger.start()  # GPUs that came to it are nobody's
        assert sorted(larger.shares.pipelines) == ["p1"] and larger.shares.pool.gpus == 8
        await larger.unregister_pipeline("p1")
        await larger.stop()
        smaller = Scheduler(Pool(2, 2), StoreJournal(store, "default"))
        await smaller.start()
        assert smaller.snapshot().idle == (0, 1)
        await smaller.stop()

    on_a_store(tmp_path, story)


def test_a_file_of_a_scheduler_of_its_own_goes_on_from_the_first_version(tmp_path: Path) -> None:
    (tmp_path / "j").write_text(OLD_JOURNAL)

    async def story() -> None:
        scheduler = Scheduler(POOL, tmp_path / "j")
        await scheduler.start()
        assert PipelineId("p1") in scheduler.shares.pipelines
        await scheduler.stop()
        journal = FileJournal(tmp_path / "j")
        assert len(journal.open(Shares(POOL)).shares.leases) == 2
        journal.close()

    asyncio.run(story())

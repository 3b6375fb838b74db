"""What every store promises to those who wait for changes."""

from __future__ import annotations

import asyncio

import pytest

from muster import errors
from muster.ports import Filter, Store, StoreChange, Write
from muster.types.event import Event
from tests.contract.stores import ALL, Run, fill, settle, take, version_of
from tests.training_builders import a_training, key_of

# Watching ----------------------------------------------------------------------------------------


def test_a_watch_tells_every_change_after_its_version_in_order(run: Run) -> None:
    async def story(store: Store) -> None:
        await store.write(Write(put=a_training("before")))
        changes = store.changes(store.version, ALL)
        made = await store.write(Write(put=a_training("a", labels={"n": "1"})))
        assert made is not None
        edit = a_training("a", spares=1, status=made.training.status)
        first, second = made.version, version_of(await store.write(Write(put=edit)))
        await store.write(Write(delete=key_of("a")))
        last = version_of(await store.write(Write(put=a_training("a", spares=2))))
        told = await take(changes, 4)
        assert [change.type for change in told] == ["ADDED", "MODIFIED", "DELETED", "ADDED"]
        versions = [change.version for change in told]
        assert versions == sorted(set(versions)) and versions == [first, second, versions[2], last]
        assert told[2].stored.training.spec.spares == 1, "a deletion shows the object as it was last"

    run(story)


def test_a_watch_waits_for_what_has_not_happened_yet(run: Run) -> None:
    async def story(store: Store) -> None:
        first = asyncio.create_task(take(store.changes(store.version, ALL), 2))
        await settle()
        assert not first.done()
        await fill(store, "ab")
        assert [change.stored.key.name for change in await first] == ["a", "b"]

    run(story)


def test_a_watch_can_be_resumed_from_any_version_that_it_told(run: Run) -> None:
    async def story(store: Store) -> None:
        start = store.version
        versions = await fill(store, "abcdef")
        told = await take(store.changes(start, ALL), 6)
        assert [change.version for change in told] == versions
        for index, change in enumerate(told[:-1]):
            rest = await take(store.changes(change.version, ALL), 5 - index)
            assert [one.version for one in rest] == versions[index + 1 :]

    run(story)


def test_a_watch_tells_only_what_its_filter_takes(run: Run) -> None:
    async def story(store: Store) -> None:
        changes = store.changes(store.version, Filter(namespace="n2", labels={"team": "x"}))
        await fill(store, "ab")
        await fill(store, "c", "n2")
        last = await store.write(Write(put=a_training("d", namespace="n2", labels={"team": "x"})))
        (told,) = await take(changes, 1)
        assert (told.stored.key.name, told.version) == ("d", version_of(last))

    run(story)


def test_history_that_is_gone_is_said_to_be(run: Run) -> None:
    async def story(store: Store) -> None:
        versions = await fill(store, "abcdefghijkl")
        with pytest.raises(errors.Compacted, match=f"version {versions[0]} is too long ago") as raised:
            await anext(store.changes(versions[0], ALL))
        assert "list again" in raised.value.hint
        assert [change.version for change in await take(store.changes(versions[1], ALL), 10)] == versions[2:]

    run(story, keep_changes=10)


def test_a_version_from_the_future_cannot_be_watched(run: Run) -> None:
    async def story(store: Store) -> None:
        await fill(store, "a")
        with pytest.raises(errors.Compacted, match="in the future"):
            await anext(store.changes(store.version + 1000, ALL))

    run(story)


def test_a_slow_watcher_misses_nothing_that_is_still_kept(run: Run) -> None:
    async def story(store: Store) -> None:
        changes = store.changes(store.version, ALL)
        await fill(store, "a")
        await take(changes, 1)
        writes = [Write(put=a_training(f"t{n}"), lazy=True) for n in range(1300)]
        written = [version_of(one) for one in await asyncio.gather(*map(store.write, writes))]
        assert [change.version for change in await take(changes, 1300)] == sorted(written)
        await fill(store, "z")
        assert (await anext(changes)).stored.key.name == "z"

    run(story)


def test_a_watcher_that_is_too_slow_is_told_so(run: Run) -> None:
    async def story(store: Store) -> None:
        changes = store.changes(store.version, ALL)
        await fill(store, "a")
        await take(changes, 1)
        await fill(store, "bcdefghijklm")
        with pytest.raises(errors.Compacted):
            await anext(changes)

    run(story, keep_changes=10)


def test_watchers_do_not_disturb_each_other(run: Run) -> None:
    async def story(store: Store) -> None:
        watches = [asyncio.create_task(take(store.changes(store.version, ALL), 3)) for _ in range(20)]
        await settle()
        for leaving in watches[::2]:
            leaving.cancel()
        versions = await fill(store, "abc")
        for staying in watches[1::2]:
            assert [change.version for change in await staying] == versions

    run(story)


def test_subscribers_hear_every_change_in_order_before_its_writer_goes_on(run: Run) -> None:
    async def story(store: Store) -> None:
        heard: list[int] = []

        def hear(change: StoreChange) -> None:
            now = store.get(change.stored.key)
            assert now is not None and now.version >= change.version
            heard.append(change.version)

        store.subscribe(hear)
        written = await store.write(Write(put=a_training()))
        assert heard == [version_of(written)]
        others = await asyncio.gather(*(store.write(Write(put=a_training(f"t{n}"))) for n in range(9)))
        await store.write(Write(events=[Event("Noted")]))
        assert heard == [version_of(written), *sorted(map(version_of, others))]

    run(story)


def test_a_subscriber_that_fails_stops_neither_writers_nor_other_subscribers(run: Run) -> None:
    async def story(store: Store) -> None:
        reported: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, about: reported.append(about["exception"]))
        heard: list[int] = []

        def fail(change: StoreChange) -> None:
            raise LookupError(f"at {change.version}")

        store.subscribe(fail)
        store.subscribe(lambda change: heard.append(change.version))
        versions = await fill(store, "ab")
        assert heard == versions and [str(error) for error in reported] == [f"at {number}" for number in versions]

    run(story)


def test_lazy_writes_keep_their_place_among_the_others(run: Run) -> None:
    async def story(store: Store) -> None:
        changes = store.changes(store.version, ALL)
        writes = [Write(put=a_training(f"t{n}"), lazy=n % 3 > 0, events=[Event(f"t{n}")]) for n in range(30)]
        written = await asyncio.gather(*map(store.write, writes))
        names = [one.key.name for one in sorted(filter(None, written), key=version_of)]
        assert [change.stored.key.name for change in await take(changes, 30)] == names
        assert sorted(event.reason for event in await store.events()) == sorted(names) and len(set(names)) == 30

    run(story)


# Waiting for one object --------------------------------------------------------------------------


def test_what_is_newer_already_or_missing_is_answered_at_once(run: Run) -> None:
    async def story(store: Store) -> None:
        await fill(store, "a")
        assert await store.newer(key_of("a"), 0, None) is store.get(key_of("a"))
        assert await store.newer(key_of("missing"), 0, None) is None

    run(story)


def test_waiters_are_woken_by_a_change_of_their_object_and_by_no_other(run: Run) -> None:
    async def story(store: Store) -> None:
        first, _ = await fill(store, "ab")
        waits = [asyncio.create_task(store.newer(key_of("a"), first, None)) for _ in range(50)]
        await settle()
        await fill(store, "bc")
        await settle()
        assert not any(wait.done() for wait in waits)
        waits[0].cancel()
        before = store.get(key_of("a"))
        assert before is not None
        written = await store.write(Write(put=a_training("a", spares=1, status=before.training.status)))
        assert all(found is written for found in await asyncio.gather(*waits[1:]))

    run(story)


def test_a_waiter_is_woken_by_the_deletion_of_its_object(run: Run) -> None:
    async def story(store: Store) -> None:
        (first,) = await fill(store, "a")
        wait = asyncio.create_task(store.newer(key_of("a"), first, None))
        await settle()
        await store.write(Write(delete=key_of("a")))
        assert await wait is None

    run(story)


@pytest.mark.parametrize("timeout_s", [0, -1, 0.01])
def test_a_wait_that_times_out_answers_with_the_object_as_it_is(run: Run, timeout_s: float) -> None:
    async def story(store: Store) -> None:
        (first,) = await fill(store, "a")
        found = await store.newer(key_of("a"), first + 1000, timeout_s)
        assert found is not None and found.version == first

    run(story)


def test_closing_lets_everyone_go_and_takes_no_more_writes(run: Run) -> None:
    async def story(store: Store) -> None:
        start = store.version
        (first,) = await fill(store, "a")

        async def watch() -> list[StoreChange]:
            return [change async for change in store.changes(start, ALL)]

        watching = asyncio.create_task(watch())
        waiting = asyncio.create_task(store.newer(key_of("a"), first, None))
        await settle()
        await store.close()
        assert [change.version for change in await watching] == [first]
        assert await waiting is store.get(key_of("a"))
        with pytest.raises(errors.Unavailable, match="closed"):
            await store.write(Write(put=a_training()))

    run(story)

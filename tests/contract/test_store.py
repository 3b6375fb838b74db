"""What every store promises about objects, journal, records and pages."""

from __future__ import annotations

import asyncio
import contextlib
import math
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from muster import errors
from muster.ports import Filter, Record, Store, Write
from muster.types.event import Event
from tests.contract.stores import ALL, Run, fill, settle, version_of
from tests.training_builders import BIRTH, a_rank_exit, a_status, a_training, key_of

# Objects -----------------------------------------------------------------------------------------


def test_what_is_put_is_read_back_with_its_version(run: Run) -> None:
    async def story(store: Store) -> None:
        training = a_training(env={"A": "é\U0001f600"}, labels={"team": "x"})
        written = await store.write(Write(put=training, expect=0))
        assert written is not None and written is store.get(training.key)
        assert 0 < written.version == written.training.version <= store.version
        read, asked = written.training, training
        assert (read.spec, read.metadata.labels, read.requested_uid) == (asked.spec, asked.metadata.labels, asked.uid)
        assert read.metadata.creation_timestamp is not None and read.generation == 1
        assert (written.uid, written.phase, dict(written.labels)) == (read.uid, "pending", {"team": "x"})
        assert store.get(key_of("other")) is None

    run(story)


def test_creating_what_exists_is_refused_by_name(run: Run) -> None:
    async def story(store: Store) -> None:
        await store.write(Write(put=a_training("demo"), expect=0))
        with pytest.raises(errors.AlreadyExists, match="default/demo"):
            await store.write(Write(put=a_training("demo"), expect=0))
        await store.write(Write(put=a_training("demo", namespace="other"), expect=0))

    run(story)


def test_a_stale_version_is_a_conflict_that_names_both_versions(run: Run) -> None:
    async def story(store: Store) -> None:
        first = version_of(await store.write(Write(put=a_training(), expect=0)))
        second = version_of(await store.write(Write(put=a_training(spares=1), expect=first)))
        for stale in (Write(put=a_training(spares=2), expect=first), Write(delete=key_of(), expect=first)):
            with pytest.raises(errors.Conflict, match=f"version {second}, not {first}"):
                await store.write(stale)
        found = store.get(key_of())
        assert found is not None and found.training.spec.spares == 1

    run(story)


def test_what_is_not_there_can_neither_be_updated_nor_deleted(run: Run) -> None:
    async def story(store: Store) -> None:
        before = store.version
        for missing in (Write(put=a_training(), expect=3), Write(delete=key_of()), Write(delete=key_of(), expect=3)):
            with pytest.raises(errors.NotFound, match="default/demo"):
                await store.write(missing)
        assert store.page(ALL).items == () and store.version - before < 3, "others may have moved it, we have not"

    run(story)


def test_a_put_without_expectation_overwrites(run: Run) -> None:
    async def story(store: Store) -> None:
        first = await store.write(Write(put=a_training(spares=1)))
        written = await store.write(Write(put=a_training(spares=2)))
        assert written is not None and written.version > version_of(first) and written.training.spec.spares == 2

    run(story)


def test_of_many_writers_with_the_same_version_exactly_one_wins(run: Run) -> None:
    async def story(store: Store) -> None:
        made = version_of(await store.write(Write(put=a_training(spares=99), expect=0)))
        tries = [store.write(Write(put=a_training(spares=n), expect=made)) for n in range(20)]
        ends = await asyncio.gather(*tries, return_exceptions=True)
        won = [end for end in ends if not isinstance(end, BaseException)]
        assert len(won) == 1 and won[0] is store.get(key_of())
        assert sum(isinstance(end, errors.Conflict) for end in ends) == 19

    run(story)


def test_writers_that_read_again_after_a_conflict_all_get_their_turn(run: Run) -> None:
    async def story(store: Store) -> None:
        await store.write(Write(put=a_training(), expect=0))

        async def add_one() -> None:
            for _ in range(100):
                found = store.get(key_of())
                assert found is not None
                more = a_training(spares=found.training.spec.spares + 1)
                try:
                    await store.write(Write(put=more, expect=found.version))
                    return
                except errors.Conflict:
                    continue
            raise AssertionError("it never came to its turn")

        await asyncio.gather(*(add_one() for _ in range(10)))
        found = store.get(key_of())
        assert found is not None and found.training.spec.spares == 10

    run(story)


def test_of_many_creators_at_once_exactly_one_wins(run: Run) -> None:
    async def story(store: Store) -> None:
        tries = [store.write(Write(put=a_training(), expect=0, events=[Event(f"by-{n}")])) for n in range(10)]
        ends = await asyncio.gather(*tries, return_exceptions=True)
        assert sum(isinstance(end, errors.AlreadyExists) for end in ends) == 9
        assert len(await store.events()) == 1

    run(story)


@pytest.mark.ledger  # a version that is not given yet can be foretold only where we give it
def test_a_writer_can_build_on_its_own_write_that_others_do_not_see_yet(run: Run) -> None:
    async def story(store: Store) -> None:
        created = asyncio.create_task(store.write(Write(put=a_training(), expect=0)))
        await asyncio.sleep(0)
        updated = asyncio.create_task(store.write(Write(put=a_training(spares=1), expect=1)))
        deleted = asyncio.create_task(store.write(Write(delete=key_of(), expect=2)))
        again = asyncio.create_task(store.write(Write(put=a_training(spares=3), expect=0)))
        results = await asyncio.gather(created, updated, deleted, again)
        assert [one.version if one else None for one in results] == [1, 2, None, 4]
        found = store.get(key_of())
        assert found is not None and found.training.spec.spares == 3

    run(story)


def test_a_refused_write_leaves_neither_event_nor_record_nor_version(run: Run) -> None:
    async def story(store: Store) -> None:
        made = version_of(await store.write(Write(put=a_training(), expect=0)))
        with pytest.raises(errors.Conflict):
            await store.write(
                Write(
                    put=a_training(), expect=made + 7, events=[Event("Lost")], records=[Record("runs", "a", {"n": 1})]
                )
            )
        with pytest.raises(errors.InvalidRequest):
            await store.write(Write(put=a_training(), records=[Record("runs", "a", {"n": math.nan})]))
        with pytest.raises(errors.InvalidRequest):
            await store.write(Write(put=a_training(), records=[Record("runs", "\ud800", {})]))
        with pytest.raises(errors.InvalidRequest):
            await store.write(Write(put=a_training(), delete=key_of()))
        assert store.records("runs") == {} and await store.events() == []
        assert await store.write(Write(put=a_training(), expect=made)) is not None

    run(story)


def test_absent_and_empty_rank_exits_both_survive(run: Run) -> None:
    async def story(store: Store) -> None:
        ends = {"running": None, "never-began": (), "done": (a_rank_exit(0, 137, signal="SIGKILL"),)}
        for name, rank_exits in ends.items():
            await store.write(Write(put=a_training(name, status=a_status(rank_exits=rank_exits))))
        for name, rank_exits in ends.items():
            found = store.get(key_of(name))
            assert found is not None and found.training.status.rank_exits == rank_exits

    run(story)


def test_text_that_no_encoding_can_hold_does_not_make_an_object_unreadable(run: Run) -> None:
    async def story(store: Store) -> None:
        torn = a_rank_exit(0, 1, stderr_tail=("bad \udcff byte",))
        written = await store.write(Write(put=a_training(status=a_status(rank_exits=(torn,)))))
        assert written is not None
        exits = written.training.status.rank_exits
        assert exits is not None and exits[0].stderr_tail == ("bad ? byte",)

    run(story)


# Journal and records -----------------------------------------------------------------------------


def test_events_get_ids_in_order_and_what_they_lack_from_their_object(run: Run) -> None:
    async def story(store: Store) -> None:
        earlier = datetime(2025, 5, 1, 8, 30, 0, 250_000, tzinfo=UTC)
        both = [Event("Created", actor="ann", data={"n": [1]}), Event("Began", at=earlier)]
        written = await store.write(Write(put=a_training(), events=both))
        assert written is not None
        first, second = await store.events()
        assert (first.id, second.id) == (1, 2)
        assert (first.namespace, first.training, first.uid) == ("default", "demo", written.uid)
        assert (first.at, second.at) == (BIRTH, earlier)
        assert (first.reason, first.actor, first.data) == ("Created", "ann", {"n": [1]})

    run(story)


def test_who_waits_for_more_events_gets_them_when_they_are_written(run: Run) -> None:
    async def story(store: Store) -> None:
        await store.write(Write(events=[Event("First", training="a")]))
        assert [event.reason for event in await store.more_events(store.last_event - 1)] == ["First"]
        waiting = asyncio.ensure_future(store.more_events(store.last_event))
        await settle()
        await store.write(Write(records=[Record("runs", "a", {"n": 1})]))
        await settle()
        assert not waiting.done(), "nothing was written into the journal"
        await store.write(Write(events=[Event("Second", training="a"), Event("Third", training="b")]))
        found = await waiting
        assert [event.reason for event in found] == ["Second", "Third"] and found[-1].id == store.last_event
        left = asyncio.ensure_future(store.more_events(store.last_event))
        await settle()
        await store.close()
        assert await left == []

    run(story)


def test_who_follows_the_journal_hears_each_entry_once_also_those_that_came_with_an_object(run: Run) -> None:
    async def story(store: Store) -> None:
        async def follow() -> list[str]:
            heard, seen = list[Event](), 0
            while len(heard) < 6:
                heard += await store.more_events(seen)
                assert heard[-1].id > seen, "as long as the store is open there is something"
                seen = heard[-1].id
            return [event.reason for event in heard]

        following = asyncio.ensure_future(follow())
        for number in range(3):
            await store.write(Write(put=a_training(), events=[Event(f"Put{number}")]))
            await store.write(Write(events=[Event(f"Said{number}", training="demo")]))
        assert await following == ["Put0", "Said0", "Put1", "Said1", "Put2", "Said2"]

    run(story)


def test_events_are_found_by_object_and_after_an_id_and_outlive_their_object(run: Run) -> None:
    async def story(store: Store) -> None:
        first = await store.write(Write(put=a_training("a", uid="u1"), events=[Event("A1")]))
        assert first is not None
        await store.write(Write(put=a_training("b", namespace="n2", uid="u2"), events=[Event("B1")]))
        await store.write(Write(delete=key_of("a"), events=[Event("A2")]))
        await store.write(Write(put=a_training("a", uid="u3"), expect=0, events=[Event("A3")]))

        async def reasons(after: int = 0, **which: Any) -> list[str]:
            return [event.reason for event in await store.events(after=after, **which)]

        assert await reasons() == ["A1", "B1", "A2", "A3"]
        assert await reasons(namespace="default", training="a") == ["A1", "A2", "A3"]
        assert await reasons(uid=first.uid) == ["A1", "A2"]
        assert await reasons(namespace="n2") == ["B1"]
        assert await reasons(after=2) == ["A2", "A3"]
        assert await reasons(after=4) == []

    run(story)


def test_the_newest_events_are_found_and_those_before_them(run: Run) -> None:
    async def story(store: Store) -> None:
        for number in range(1, 6):
            one = await store.write(Write(put=a_training("a", uid="u1"), events=[Event(f"A{number}")]))
            assert one is not None
            uid = one.uid
            await store.write(Write(put=a_training("b", uid="u2"), events=[Event(f"B{number}")]))

        async def reasons(**which: Any) -> list[str]:
            return [event.reason for event in await store.events(**which)]

        assert await reasons(uid=uid, most=2) == ["A4", "A5"]
        assert await reasons(uid=uid, most=2, before=7) == ["A2", "A3"]
        assert await reasons(uid=uid, most=9, after=3, before=9) == ["A3", "A4"]
        assert await reasons(before=3) == ["A1", "B1"]
        assert await reasons(most=3) == ["B4", "A5", "B5"]
        assert await reasons(most=0) == []

    run(story)


def test_events_of_one_object_stand_in_the_order_of_its_versions(run: Run) -> None:
    async def story(store: Store) -> None:
        await store.write(Write(put=a_training(), expect=0))
        versions: dict[str, int] = {}

        async def edit(who: str) -> None:
            while who not in versions:
                found = store.get(key_of())
                assert found is not None
                more = replace(found.training, spec=replace(found.training.spec, args=(who,)))
                with contextlib.suppress(errors.Conflict):
                    written = await store.write(Write(put=more, expect=found.version, events=[Event(who)]))
                    versions[who] = version_of(written)

        await asyncio.gather(*(edit(f"w{n}") for n in range(8)))
        events = await store.events()
        assert [event.reason for event in events] == sorted(versions, key=lambda who: versions[who])

    run(story)


@pytest.mark.ledger  # elsewhere the answers to writes of different objects may come in another order
def test_events_of_concurrent_writes_stand_in_the_order_of_their_versions(run: Run) -> None:
    async def story(store: Store) -> None:
        writes = [Write(put=a_training(f"t{n}"), events=[Event("Created")]) for n in range(40)]
        written = await asyncio.gather(*map(store.write, writes))
        by_version = [one.key.name for one in sorted(filter(None, written), key=lambda one: one.version)]
        events = await store.events()
        assert [event.training for event in events] == by_version
        assert [event.id for event in events] == list(range(1, 41))

    run(story)


def test_a_write_of_events_and_records_alone_moves_no_version(run: Run) -> None:
    async def story(store: Store) -> None:
        event = Event("Noted", namespace="n", training="t", uid="u")
        assert await store.write(Write(events=[event], records=[Record("runs", "a", {"n": 1})])) is None
        assert store.page(ALL).items == ()
        (found,) = await store.events(namespace="n", training="t", uid="u")
        assert (found.reason, found.at) == ("Noted", BIRTH)

    run(story)


def test_records_are_kept_replaced_and_removed_by_kind_and_key(run: Run) -> None:
    async def story(store: Store) -> None:
        value = {"n": 1, "deep": {"list": [1, None, "é"]}}
        await store.write(Write(records=[Record("runs", "a", value), Record("runs", "b", {}), Record("keys", "a", {})]))
        value["n"] = 99
        assert store.record("runs", "a") == {"n": 1, "deep": {"list": [1, None, "é"]}}
        before = store.records("runs")
        await store.write(Write(records=[Record("runs", "a", {"n": 2}), Record("runs", "b", None)]))
        await store.write(Write(records=[Record("runs", "never", None)]))
        assert store.records("runs") == {"a": {"n": 2}} and store.records("keys") == {"a": {}}
        assert set(before) == {"a", "b"}, "what was handed out must not change under its reader"
        assert store.record("runs", "b") is None and store.record("nothing", "a") is None

    run(story)


# Pages -------------------------------------------------------------------------------------------


def test_pages_are_in_order_and_together_hold_everything_once(run: Run) -> None:
    async def story(store: Store) -> None:
        await fill(store, "dbeca")
        await fill(store, "zy", "another")
        seen, token, sizes = [], "", []
        while True:
            page = store.page(ALL, limit=3, token=token)
            seen += [str(one.key) for one in page.items]
            sizes.append(len(page.items))
            token = page.next
            if not token:
                break
        assert seen == ["another/y", "another/z", *(f"default/{name}" for name in "abcde")]
        assert sizes == [3, 3, 1]
        whole = store.page(ALL)
        assert len(whole.items) == 7 and whole.next == "" and whole.version == store.version

    run(story)


def test_a_page_that_ends_with_the_last_match_has_no_next(run: Run) -> None:
    async def story(store: Store) -> None:
        await fill(store, "abc")
        await fill(store, "z", "other")
        assert store.page(Filter(namespace="default"), limit=3).next == ""
        assert store.page(Filter(namespace="default"), limit=2).next != ""

    run(story)


def test_the_next_page_goes_on_where_the_last_ended_whatever_came_or_went(run: Run) -> None:
    async def story(store: Store) -> None:
        await fill(store, "bdf")
        first = store.page(ALL, limit=2)
        await store.write(Write(delete=key_of("d")))
        await fill(store, "ae")
        rest = store.page(ALL, token=first.next)
        assert [one.key.name for one in rest.items] == ["e", "f"]

    run(story)


def test_pages_are_filtered_by_namespace_phase_and_labels(run: Run) -> None:
    async def story(store: Store) -> None:
        await store.write(Write(put=a_training("a", labels={"team": "x", "tier": "1"})))
        await store.write(Write(put=a_training("b", labels={"team": "x"}, phase="ready")))
        await store.write(Write(put=a_training("c", namespace="n2", phase="ready")))

        def names(which: Filter) -> list[str]:
            return [one.key.name for one in store.page(which).items]

        assert names(Filter(namespace="n2")) == ["c"]
        assert names(Filter(namespace="n1")) == []
        assert names(Filter(phase="ready")) == ["b", "c"]
        assert names(Filter(labels={"team": "x"})) == ["a", "b"]
        assert names(Filter(labels={"team": "x", "tier": "1"})) == ["a"]
        await store.write(Write(put=a_training("a", phase="failed")))
        assert names(Filter(phase="failed")) == ["a"] and names(Filter(labels={"tier": "1"})) == []

    run(story)


@pytest.mark.parametrize("token", ["x", "!!!!", "é", "e30=", "WzEsMl0=", "bnVsbA==", "WyJhIl0=", "W1tb" * 9000])
def test_a_token_that_no_page_gave_is_refused(run: Run, token: str) -> None:
    async def story(store: Store) -> None:
        await fill(store, "ab")
        with pytest.raises(errors.InvalidRequest, match="token"):
            store.page(ALL, limit=1, token=token)
        with pytest.raises(errors.InvalidRequest):
            store.page(ALL, limit=0)

    run(story)

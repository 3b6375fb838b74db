from __future__ import annotations

import random
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.core.training import lent_spans, metering
from muster.core.training.metering import Rates
from muster.types.codec import Invalid, show_time
from muster.types.event import FINISHED, TRIMMED, WORKER_BACK, WORKER_EXITED, WORKER_LENT, WORKER_STARTED, Event
from muster.types.usage import Interval, Usage

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return NOON + timedelta(seconds=seconds)


def an_event(reason: str, seconds: float, *, training: str = "demo", namespace: str = "default", **data: Any) -> Event:
    return Event(
        reason, at=at(seconds), namespace=namespace, training=training, uid=f"uid-{namespace}-{training}", data=data
    )


def started(worker: str, seconds: float, gpus: object = 0, **more: Any) -> Event:
    return an_event(WORKER_STARTED, seconds, worker=worker, gpus=gpus, **more)


def exited(worker: str, seconds: float, **more: Any) -> Event:
    return an_event(WORKER_EXITED, seconds, worker=worker, **more)


def lent(worker: str, seconds: float, **more: Any) -> Event:
    return an_event(WORKER_LENT, seconds, worker=worker, **more)


def back(worker: str, seconds: float, **more: Any) -> Event:
    return an_event(WORKER_BACK, seconds, worker=worker, **more)


def ended(state: str, seconds: float, **more: Any) -> Event:
    return an_event(FINISHED[state], seconds, **more)


def the_usage(events: list[Event], now: float, **more: Any) -> Usage:
    [usage] = metering.totals(metering.intervals(events, at(now)), now=at(now), **more)
    return usage


def test_a_worker_counts_from_its_start_to_its_exit() -> None:
    usage = the_usage([started("w0", 0, gpus=2), exited("w0", 90)], now=1000)

    assert (usage.worker_seconds, usage.gpu_seconds, usage.workers, usage.running) == (90, 180, 1, 0)


def test_a_running_worker_counts_up_to_now() -> None:
    usage = the_usage([started("w0", 0, gpus=1)], now=30)

    assert (usage.worker_seconds, usage.gpu_seconds, usage.running) == (30, 30, 1)


@pytest.mark.parametrize("state", FINISHED)
def test_the_end_of_a_training_closes_what_is_open(state: str) -> None:
    found = metering.intervals([started("w0", 0), started("w1", 5), exited("w0", 20), ended(state, 60)], at(100))

    assert [(one.worker, one.until, one.why) for one in found] == [
        ("w0", at(20), WORKER_EXITED),
        ("w1", at(60), FINISHED[state]),
    ]


def test_the_end_of_one_training_closes_nothing_of_another() -> None:
    found = metering.intervals([started("w0", 0), ended("failed", 60, training="other")], at(100))

    assert found[0].until is None


def test_a_second_start_or_exit_changes_nothing() -> None:
    once = [started("w0", 0, gpus=1), exited("w0", 50), ended("succeeded", 60)]
    again = [*once, started("w0", 70, gpus=1), exited("w0", 80), ended("succeeded", 90), started("w0", 0, gpus=1)]

    assert metering.intervals(again, at(100)) == metering.intervals(once, at(100))


def test_an_exit_before_its_start_gives_an_empty_interval() -> None:
    assert the_usage([started("w0", 10), exited("w0", 5)], now=100).worker_seconds == 0


def test_an_exit_of_a_worker_that_never_started_costs_nothing() -> None:
    assert metering.intervals([exited("w0", 5)], at(100)) == []


def test_the_time_meant_goes_before_the_time_of_writing() -> None:
    events = [started("w0", 0), exited("w0", 500, at=show_time(at(40)))]

    assert the_usage(events, now=1000).worker_seconds == 40


def test_a_time_that_cannot_be_read_gives_way_to_the_time_of_writing() -> None:
    assert the_usage([started("w0", 0), exited("w0", 500, at="yesterday")], now=1000).worker_seconds == 500


def test_a_start_in_the_future_counts_as_now() -> None:
    assert the_usage([started("w0", 50)], now=10).worker_seconds == 0


def test_gpus_may_be_given_as_indices() -> None:
    assert the_usage([started("w0", 0, gpus=[3, 5, 7]), exited("w0", 10)], now=20).gpu_seconds == 30


LENT = [
    ("for a while", [lent("w0", 10), back("w0", 30)], 80.0),
    ("until the end", [lent("w0", 60)], 60.0),
    ("twice", [lent("w0", 10), back("w0", 20), lent("w0", 50), back("w0", 60)], 80.0),
    ("told twice", [lent("w0", 10), back("w0", 30), lent("w0", 10), back("w0", 30)], 80.0),
    ("lent while it is lent", [lent("w0", 10), lent("w0", 20), back("w0", 30)], 80.0),
    ("back without being lent", [back("w0", 30)], 100.0),
    ("told the other way round", [back("w0", 30), lent("w0", 10)], 80.0),
    ("for no time", [back("w0", 30), lent("w0", 30)], 100.0),
    ("before it started", [lent("w0", -20), back("w0", 10)], 90.0),
    ("after it ended", [lent("w0", 120)], 100.0),
    ("back after it ended", [lent("w0", 90), back("w0", 130)], 90.0),
    ("another worker", [lent("w1", 10)], 100.0),
    ("another training", [lent("w0", 10, training="other")], 100.0),
    ("told late", [lent("w0", 300, at=show_time(at(10))), back("w0", 300, at=show_time(at(30)))], 80.0),
]


@pytest.mark.parametrize(("entries", "seconds"), [row[1:] for row in LENT], ids=[row[0] for row in LENT])
def test_gpus_that_are_lent_do_not_count_and_the_worker_does(entries: list[Event], seconds: float) -> None:
    usage = the_usage([started("w0", 0, gpus=2), exited("w0", 100), *entries], now=1000)

    assert (usage.worker_seconds, usage.gpu_seconds) == (100, 2 * seconds)


def test_what_is_lent_now_does_not_count_up_to_now() -> None:
    usage = the_usage([started("w0", 0, gpus=1), lent("w0", 40)], now=100)

    assert (usage.worker_seconds, usage.gpu_seconds, usage.running) == (100, 40, 1)


def test_only_what_was_not_lent_after_since_counts() -> None:
    events = [started("w0", 0, gpus=1), lent("w0", 10), back("w0", 60)]

    assert the_usage(events, now=100, since=at(50)).gpu_seconds == 40


def test_the_end_of_a_worker_ends_what_it_lent() -> None:
    [one] = metering.intervals([started("w0", 0, gpus=1), lent("w0", 10), exited("w0", 30)], at(100))

    assert one.lent == ((at(10), at(30)),)


def test_a_name_that_is_used_again_has_a_row_of_its_own() -> None:
    first, second = (
        started("w0", 0),
        Event(WORKER_STARTED, at=at(50), training="demo", uid="later", data={"worker": "w"}),
    )

    found = metering.totals(metering.intervals([first, second], at(60)), now=at(60))

    assert sorted(usage.worker_seconds for usage in found) == [10, 60]


def test_only_what_lies_after_since_counts() -> None:
    events = [started("w0", 0), exited("w0", 40), started("w1", 0), exited("w1", 100)]

    usage = the_usage(events, now=200, since=at(50))

    assert (usage.workers, usage.worker_seconds) == (1, 50)


def test_sums_can_be_by_namespace() -> None:
    events = [
        started("w0", 0, training="a"),
        started("w0", 0, training="b"),
        started("w0", 0, training="c", namespace="research"),
    ]

    found = metering.totals(metering.intervals(events, at(10)), now=at(10), by="namespace")

    assert [(usage.namespace, usage.training, usage.workers, usage.worker_seconds) for usage in found] == [
        ("default", "", 2, 20),
        ("research", "", 1, 10),
    ]


def test_rates_turn_hours_into_cost() -> None:
    events = [started("w0", 0, gpus=2), exited("w0", 3600)]

    assert the_usage(events, now=4000, rates=Rates(worker_hour=0.1, gpu_hour=2.5)).cost == pytest.approx(5.1)
    assert the_usage(events, now=4000).cost is None


@pytest.mark.parametrize(
    "text",
    [
        '{"currency": "EUR", "workerHour": 0.1, "gpuHour": 2.5}',
        'currency = "EUR"\nworkerHour = 0.1\ngpuHour = 2.5\n',
    ],
)
def test_rates_are_read_from_json_and_toml(text: str) -> None:
    assert metering.read_rates(text) == Rates(0.1, 2.5, "EUR")


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('{"gpuHour": -1}', "gpuHour"),
        ('{"gpuHours": 1}', "gpuHours"),
        ('{"gpuHour": "2"}', "gpuHour"),
        ("{", "rates"),
        ("what is this", "rates"),
        ("[1]", "body"),
    ],
)
def test_bad_rates_name_the_field(text: str, field: str) -> None:
    with pytest.raises(Invalid) as caught:
        metering.read_rates(text)

    assert [problem.field for problem in caught.value.problems] == [field]


# Properties --------------------------------------------------------------------------------------

_seconds = st.integers(0, 1000)
_names = st.sampled_from(["w0", "w1", "w2"])
_trainings = st.sampled_from(["a", "b"])
_entries = st.one_of(
    st.builds(lambda w, s, g, t: started(w, s, gpus=g, training=t), _names, _seconds, st.integers(0, 8), _trainings),
    st.builds(lambda w, s, t: exited(w, s, training=t), _names, _seconds, _trainings),
    st.builds(lambda w, s, t: lent(w, s, training=t), _names, _seconds, _trainings),
    st.builds(lambda w, s, t: back(w, s, training=t), _names, _seconds, _trainings),
    st.builds(lambda p, s, t: ended(p, s, training=t), st.sampled_from(sorted(FINISHED)), _seconds, _trainings),
)
_journals = st.lists(_entries, max_size=30)


def _sum(found: list[Interval], now: float, since: float | None = None) -> tuple[float, float]:
    usages = metering.totals(found, now=at(now), since=None if since is None else at(since))
    return sum(usage.worker_seconds for usage in usages), sum(usage.gpu_seconds for usage in usages)


@given(_journals, st.randoms(use_true_random=False))
def test_order_and_repetition_change_nothing(journal: list[Event], chance: random.Random) -> None:
    mixed = [*journal, *(event for event in journal if chance.random() < 0.5)]
    chance.shuffle(mixed)

    assert metering.intervals(mixed, at(2000)) == metering.intervals(journal, at(2000))


@given(_journals)
def test_every_worker_opens_once_and_closes_once(journal: list[Event]) -> None:
    found = metering.intervals(journal, at(2000))
    opened = {(event.uid, event.data["worker"]) for event in journal if event.reason == WORKER_STARTED}
    over = {event.uid for event in journal if event.reason in FINISHED.values()}

    assert sorted((one.uid, one.worker) for one in found) == sorted(opened)
    assert all(one.until is not None for one in found if one.uid in over)
    assert all(one.until is None or one.until >= one.since for one in found)


@given(_journals, _seconds, _seconds)
def test_no_sum_is_negative(journal: list[Event], now: int, since: int) -> None:
    for usage in metering.totals(metering.intervals(journal, at(now)), now=at(now), since=at(since)):
        assert usage.worker_seconds >= 0
        assert usage.gpu_seconds >= 0
        assert 0 <= usage.running <= usage.workers


@given(_journals, _seconds, _seconds)
def test_two_spans_that_meet_sum_up_to_the_whole(journal: list[Event], middle: int, start: int) -> None:
    found = metering.intervals(journal, at(2000))
    start, middle = sorted((start, middle))

    first, second = _sum(found, now=middle, since=start), _sum(found, now=2000, since=middle)

    assert (first[0] + second[0], first[1] + second[1]) == _sum(found, now=2000, since=start)


@given(_journals, _seconds)
def test_what_counts_and_what_is_lent_are_all_the_gpus_time(journal: list[Event], since: int) -> None:
    for one in metering.intervals(journal, at(2000)):
        end = at(2000) if one.until is None else one.until
        begin = max(one.since, at(since))
        lent_s = lent_spans.seconds(one.lent, begin, end)
        [usage] = metering.totals([one], now=at(2000), since=at(since)) or [Usage("")]
        assert 0 <= lent_s <= max(0.0, (end - begin).total_seconds())
        assert usage.gpu_seconds + lent_s * one.gpus == usage.worker_seconds * one.gpus


@given(_journals)
def test_spans_that_are_lent_are_apart_in_order_and_within_the_workers_time(journal: list[Event]) -> None:
    for one in metering.intervals(journal, at(2000)):
        times = [time for span in one.lent for time in span if time is not None]
        assert times == sorted(times) and all(one.since <= time <= (one.until or at(2000)) for time in times)
        assert one.until is None or all(end is not None for _, end in one.lent)


# What is left of entries that were dropped -------------------------------------------------------

_turns = st.lists(
    st.tuples(
        st.integers(1, 50), st.integers(0, 8), st.sampled_from(["start", "exit", "lend", "lend", "back", "tell", "end"])
    )
)


def _life(turns: list[tuple[int, int, str]]) -> list[Event]:
    """The journal of one training, in order: workers start under new names, lend, exit, and other things happen."""
    found, alive, now = list[Event](), list[str](), 0
    for number, (passes, which, what) in enumerate(turns):
        now += passes
        if what == "start":
            alive.append(f"w{number}")
            found.append(started(f"w{number}", now, gpus=which))
        elif what == "exit" and alive:
            found.append(exited(alive.pop(which % len(alive)), now))
        elif what in ("lend", "back") and alive:
            found.append((lent if what == "lend" else back)(alive[which % len(alive)], now))
        else:
            found.append(an_event("RoundReleased", now))
    return [*found, ended("failed", now + 1)] if turns and turns[-1][2] == "end" else found


@given(_turns, st.lists(st.integers(2, 20), max_size=5), st.integers(0, 3000))
def test_dropping_the_oldest_entries_loses_no_usage(
    turns: list[tuple[int, int, str]], cuts: list[int], later: int
) -> None:
    whole = left = _life(turns)
    for cut in cuts:
        if len(left) >= cut:
            left = [metering.folded(left[:cut], at(10_000)), *left[cut:]]
    now = at(10_000 + later)
    before = metering.totals(metering.intervals(whole, now), now=now)
    after = metering.totals(metering.intervals(left, now), now=now)
    assert [(one.workers, one.running, one.uid) for one in after] == [
        (one.workers, one.running, one.uid) for one in before
    ]
    assert sum(one.worker_seconds for one in after) == pytest.approx(sum(one.worker_seconds for one in before))
    assert sum(one.gpu_seconds for one in after) == pytest.approx(sum(one.gpu_seconds for one in before))
    if left and left[0].reason == TRIMMED:
        assert left[0].data["entries"] == len(whole) - len(left) + 1


def test_dropped_usage_is_spread_over_its_time() -> None:
    one = metering.folded([started("w0", 0, gpus=2), exited("w0", 100)], at(100))
    found = metering.intervals([one], at(200))
    assert _sum(found, now=200, since=75) == (25.0, 50.0) and _sum(found, now=200) == (100.0, 200.0)
    assert one.message == "2 older entries were dropped; what they tell of usage is kept"


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 500)), max_size=12), st.integers(0, 12))
def test_what_is_dropped_of_a_worker_that_runs_is_told_whatever_comes_late(
    marks: list[tuple[bool, int]], cut: int
) -> None:
    journal = [started("w0", 0, gpus=1), *((lent if out else back)("w0", seconds) for out, seconds in marks)]
    left = [metering.folded(journal[: cut + 1], at(600)), *journal[cut + 1 :]]

    assert metering.intervals(left, at(600))[0].lent == metering.intervals(journal, at(600))[0].lent


def test_of_very_many_spans_the_oldest_become_one_and_no_second_is_lost() -> None:
    times = range(0, 40 * lent_spans.MOST, 40)
    journal = [started("w0", 0, gpus=1), *(one for t in times for one in (lent("w0", t), back("w0", t + 10)))]
    journal += [lent("w0", 50 * lent_spans.MOST)]
    one = metering.folded(journal, at(60 * lent_spans.MOST))

    assert len(one.data["running"][0]["lent"]) == lent_spans.MOST
    now = 60 * lent_spans.MOST
    assert the_usage([one], now=now).gpu_seconds == the_usage(journal, now=now).gpu_seconds
    recent = at(30 * lent_spans.MOST)
    assert the_usage([one], now=now, since=recent) == the_usage(journal, now=now, since=recent)


def test_what_older_versions_kept_of_open_workers_is_read() -> None:
    one = metering.folded([started("w0", 0, gpus=2), lent("w0", 5)], at(50))
    del one.data["running"][0]["lent"]

    assert the_usage([one], now=100).gpu_seconds == 200


def test_marks_that_change_nothing_push_out_no_span() -> None:
    marks = lent_spans.Marks({at(0)}, {at(10), *(at(20 + number) for number in range(lent_spans.MOST))})

    assert lent_spans.kept(marks) == ((at(0), at(10)),)

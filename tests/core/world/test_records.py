"""The record of a run, and what another coordinator restores from it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given as hypothesis_given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from muster.core.world import pace, records, transitions
from muster.core.world.run import Run
from muster.types.frames import RunRecord
from muster.types.records import replace
from muster.types.state import Holding
from muster.types.world import Healing, MemberId, Pace, RunId
from tests.core.builders import NOW, a_round, a_run, an_id

RUN = RunId("run")
CLOCK = "a boot"

times = st.none() | st.floats(-1e6, NOW)
seconds = st.floats(0.0, 1e6)
names = st.sampled_from("abc")
healings = st.builds(
    Healing,
    why=st.text(max_size=9),
    size=st.integers(1, 9),
    since=times,
    top=st.none() | st.integers(0, 10**9),
    lost=st.tuples() | st.tuples(names),
    heirs=st.frozensets(names.map(MemberId)),
    crashed=st.booleans(),
    settle_s=seconds,
)
paces = st.builds(
    Pace,
    round=st.integers(-1, 9),
    last_at=st.floats(0.0, NOW),
    per_step=st.lists(seconds, max_size=pace.SAMPLES).map(tuple),
    longest=seconds,
)


def stored(run: Run) -> RunRecord:
    """Write the record as a coordinator does, and read it again."""
    return records.read(json.loads(json.dumps(records.write(records.record(RUN, 1, run, CLOCK)))))


def restored(run: Run, *, clock: str = CLOCK, now: float = NOW, certain: bool = True) -> Run:
    record = records.on_clock(stored(run), clock, now)
    return transitions.restored(
        record.settings,
        record.target,
        record.restarts_used,
        record.as_round(),
        now,
        healing=record.healing,
        usual=record.pace,
        certain=certain,
    )


def a_healing_run(since: float | None = NOW - 3.0) -> Run:
    healing = Healing("b lost", 2, since, 636, ("b",), frozenset({MemberId("id-c")}))
    formed = a_round("a c", 1, store_addr="127.0.0.1", store_port=1, since=since, ran_at=NOW - 1.0)
    return replace(a_run("a c", last=formed), healing=healing)


@hypothesis_settings(max_examples=100, deadline=None)
@hypothesis_given(st.none() | healings, times, times, paces)
def test_a_restored_run_has_the_heal_the_times_and_the_pace(
    healing: Healing | None, since: float | None, ran_at: float | None, usual: Pace
) -> None:
    formed = a_round("a b", 1, store_addr="127.0.0.1", store_port=1, since=since, ran_at=ran_at)
    run = replace(a_run("a b", last=formed), healing=healing, pace=usual)
    again = restored(run)
    assert again.healing == healing
    assert again.round is not None and (again.round.since, again.round.ran_at) == (since, ran_at)
    assert (again.pace.per_step, again.pace.longest) == (usual.per_step, usual.longest)
    assert pace.limit_s(again.pace) == pace.limit_s(usual)


@pytest.mark.parametrize(
    ("clock", "now"),
    [("another boot", NOW), ("", NOW), (CLOCK, NOW - 10.0)],
    ids=["another machine, or a restart of it", "a machine without a boot id", "times that are still to come"],
)
def test_times_on_another_clock_are_unknown(clock: str, now: float) -> None:
    again = restored(a_healing_run(), clock=clock, now=now)
    assert again.healing is not None and again.healing.since is None and again.healing.top == 636
    assert again.round is not None and (again.round.since, again.round.ran_at) == (None, None)
    assert (again.round.ranks_run_s, again.round.next_step_s) == (None, None)


def test_times_of_two_machines_without_a_boot_id_are_unknown() -> None:
    record = records.record(RUN, 1, a_healing_run())
    assert records.on_clock(record, "", NOW).since is None


def test_a_record_of_an_older_version_has_no_times_no_heal_and_no_pace() -> None:
    fields = records.write(records.record(RUN, 1, a_healing_run(), CLOCK))
    for name in ("clock", "since", "ran_at", "healing", "pace"):
        fields.pop(name, None)
    record = records.on_clock(records.read(fields), CLOCK, NOW)
    assert (record.since, record.ran_at, record.healing, record.pace) == (None, None, None, Pace())


def test_the_newest_step_on_disk_is_not_forgotten_with_the_workers_that_reported_it() -> None:
    run = a_run("a b")
    for step in (5, 9, 7, None):
        run = transitions.holds(run, an_id("a"), Holding(durable=step), NOW)
    assert run.durable_step == 9
    formed = a_round("a b", 1, store_addr="127.0.0.1", store_port=1)
    record = stored(replace(run, round=formed))
    place = record.place_of(an_id("b"))
    assert record.durable_step == 9 and place is not None and place.durable_step == 9
    assert records.read({**records.write(record), "durable_step": None}).durable_step is None


def test_the_heal_in_the_record_of_a_member_may_be_over() -> None:
    assert restored(a_healing_run(), certain=False).healing is None


def test_the_pace_is_kept_again_when_its_limit_has_changed() -> None:
    usual = Pace(per_step=(0.1, 0.1, 0.1), longest=1.0)
    assert not pace.has_changed(None, Pace(per_step=(0.1, 0.1)))
    assert pace.has_changed(None, usual)
    assert not pace.has_changed(pace.limit_s(usual), replace(usual, longest=15.0))
    assert pace.has_changed(pace.limit_s(usual), replace(usual, longest=20.0))

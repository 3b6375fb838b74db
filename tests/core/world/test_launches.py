"""The run to which a worker belongs, as a table, and the time at which the next run may begin."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.core.world import launches
from muster.core.world.launches import Belonging
from muster.core.world.run import Run
from muster.types.world import EndedRun, OutcomeState, RunOutcome
from tests.core.builders import NOW, a_round, a_run, an_id

DONE = RunOutcome(OutcomeState.SUCCEEDED, "succeeded", "done")
BROKEN = RunOutcome(OutcomeState.FAILED, "rank_failed", "broken")
BEFORE = EndedRun(("old",), ("sunday",), BROKEN)
IDS = st.sampled_from(["", "now", "old", "elsewhere"])
LAUNCHES = st.sampled_from(["", "monday", "sunday", "tuesday"])
OUTCOMES = st.sampled_from([None, DONE, BROKEN])


def a_live_run() -> Run:
    return replace(a_run("a b"), incarnations=("now",), launches=("monday",), earlier=(BEFORE,))


def an_ended_run(**known: object) -> Run:
    return replace(a_live_run(), outcome=DONE, **known)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("ended", "launch", "incarnation", "brings", "belongs", "outcome"),
    [
        (False, "", "", None, Belonging.HERE, None),
        (False, "tuesday", "", None, Belonging.HERE, None),
        (False, "monday", "now", None, Belonging.HERE, None),
        (False, "monday", "now", DONE, Belonging.HERE, None),  # the member got the outcome before its coordinator died
        (False, "", "elsewhere", None, Belonging.HERE, None),  # this coordinator had lost its record
        (False, "", "elsewhere", DONE, Belonging.EARLIER, DONE),
        (False, "", "old", None, Belonging.EARLIER, BROKEN),
        (False, "sunday", "", None, Belonging.LATE, BROKEN),
        (True, "", "", None, Belonging.NEXT, None),
        (True, "tuesday", "", None, Belonging.NEXT, None),
        (True, "monday", "", None, Belonging.LATE, DONE),
        (True, "", "now", None, Belonging.HERE, None),
        (True, "monday", "now", DONE, Belonging.HERE, None),
        (True, "", "old", None, Belonging.EARLIER, BROKEN),
        (True, "sunday", "", None, Belonging.LATE, BROKEN),
        (True, "", "elsewhere", None, Belonging.NEXT, None),
        (True, "", "elsewhere", BROKEN, Belonging.EARLIER, BROKEN),
    ],
)
def test_a_worker_belongs_to_the_run_that_it_proves(
    ended: bool,
    launch: str,
    incarnation: str,
    brings: RunOutcome | None,
    belongs: Belonging,
    outcome: RunOutcome | None,
) -> None:
    run = an_ended_run() if ended else a_live_run()
    verdict = launches.judge(run, launch, incarnation, brings)
    assert (verdict.belonging, verdict.outcome) == (belongs, outcome)
    assert verdict.reason


@given(ended=st.booleans(), launch=LAUNCHES, incarnation=IDS, brings=OUTCOMES)
def test_nobody_gets_an_outcome_without_a_proof(
    ended: bool, launch: str, incarnation: str, brings: RunOutcome | None
) -> None:
    verdict = launches.judge(an_ended_run() if ended else a_live_run(), launch, incarnation, brings)
    proved = bool(incarnation) or launch in ("monday", "sunday")
    assert proved or verdict.outcome is None
    assert proved or verdict.belonging is (Belonging.NEXT if ended else Belonging.HERE)
    assert (verdict.outcome is None) == (verdict.belonging in (Belonging.HERE, Belonging.NEXT))


def test_the_next_run_waits_for_members_that_stop_their_ranks() -> None:
    wait = launches.wait_for_ranks(an_ended_run(), NOW)
    assert wait is not None and "a, b still stopping ranks" in wait.reason
    assert launches.wait_for_ranks(an_ended_run(farewell_said=True), NOW) is None


def test_the_next_run_waits_until_ranks_of_a_lost_worker_are_certainly_gone() -> None:
    fenced = replace(a_round("a b"), fences={an_id("b"): NOW + 2.0})
    run = an_ended_run(farewell_said=True, round=fenced)
    wait = launches.wait_for_ranks(run, NOW)
    assert wait is not None and wait.until == NOW + 2.0
    assert launches.wait_for_ranks(run, NOW + 2.0) is None
    assert launches.wait_for_ranks(replace(run, round=replace(fenced, gone=frozenset({an_id("b")}))), NOW) is None


def test_what_is_kept_of_earlier_runs_and_of_launches_is_bounded() -> None:
    run = a_live_run()
    for number in range(50):
        run = launches.with_launch(run, f"launch {number}")
    assert len(run.launches) == launches.MOST_LAUNCHES and run.launches[-1] == "launch 49"
    ended = replace(run, outcome=DONE, earlier=(BEFORE,) * launches.MOST_EARLIER)
    assert len(launches.earlier_runs(ended)) == launches.MOST_EARLIER
    assert launches.earlier_runs(ended)[-1].incarnations == ("now",)
    many = launches.merged(tuple(map(str, range(20))), ("y" * 1000, "", "x", "3"), launches.MOST_INCARNATIONS)
    assert len(many) == launches.MOST_INCARNATIONS and many[-2:] == ("x", "3")

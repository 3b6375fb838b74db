"""What is reported of a heal: once, when the training gets on, with who, how long and which steps."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from muster.core.world import decisions, heals, transitions
from muster.core.world.heals import MOST_SETTLE_S, SETTLE_S
from muster.core.world.run import UNSEEN, ReportHeal, Run
from muster.types.state import Resume
from muster.types.world import Cause, Loss, Progress, Round
from tests.core.builders import NOW, a_round, a_run, a_seat, an_exit, an_id, recalled

UP_AT = NOW + 0.054
STEP_AT = NOW + 2.3
LATER = NOW + 1e6
BOTH = "ranks run after 54 ms, next step after 2.3 s"


def steps(*told: int) -> dict[int, Progress]:
    return {rank: Progress(step, NOW) for rank, step in enumerate(told)}


def a_loss(name: str, at: float = NOW, **known: Any) -> Loss:
    return Loss(an_id(name), name, at, "its connection closed", **known)


def broken(names: str, *losses: Loss, at: int | None = 636, cause: Cause = Cause.LOSS, **known: Any) -> Run:
    """A round that was called back, with steps of its ranks."""
    progress = {} if at is None else steps(at, at - 1)
    last = a_round(names, progress=progress, losses=losses, **known)
    return recalled(a_run(names, last=last), cause, NOW + 0.01)


def crashed(at: int | None = 636, up_at: float = NOW - 4.0) -> Run:
    failed: dict[str, Any] = {"exits": {1: an_exit(1)}, "first_failed_at": NOW - 0.1, "first_failed_rank": 1}
    last = a_round("a b", progress={} if at is None else steps(at, at - 1), up_at=up_at, **failed)
    return recalled(a_run("a b", last=last), Cause.FAILURE, reason="rank 1 on b: Exit 1")


def healing(before: Run, names: str, **formed: Any) -> Run:
    """After the release of a round with those; it has nothing to show yet."""
    out = a_round(names, number=1, up_at=None, **formed)
    known = heals.begun(before, out)
    out = replace(out, since=heals.since(before, known))
    return replace(a_run(names, target=out.world_size), round=out, healing=known, best_step=heals_top(before))


def heals_top(before: Run) -> int | None:
    assert before.round is not None
    return max((mark.step for mark in before.round.progress.values()), default=before.best_step)


def up(run: Run, at: float = UP_AT, **story: Any) -> Run:
    assert run.round is not None
    return replace(run, round=replace(run.round, up_at=at, ran_at=at, **story))


def stepped(run: Run, first: int, highest: int | None = None, at: float = STEP_AT) -> Run:
    """All run, and have made steps from `first` to `highest`."""
    return up(run, progress=steps(first if highest is None else highest), first_step=first, first_step_at=at)


def sentence(run: Run, now: float = STEP_AT) -> str:
    """What is reported at that time; empty while it is too early."""
    report = heals.report(run)
    return report.text if report is not None and now >= heals.due(run) else ""


def test_a_loss_is_healed_with_the_first_step_after_it() -> None:
    run = healing(broken("lm-0 lm-1", a_loss("lm-0")), "lm-2 lm-1")
    assert sentence(run, LATER) == "" and heals.awaits_step(run), "its ranks do not run yet"
    run = up(run)
    assert heals.due(run) == math.inf and heals.awaits_step(run), "they run, and import for seconds"
    run = stepped(run, 625, 650)
    assert not heals.awaits_step(run)
    assert sentence(run) == f"lm-0 lost; lm-2 has rank 0; {BOTH}; back at step 625, 12 steps redone"
    report = heals.report(run)
    assert report is not None and report.data == {
        "lost": ["lm-0"],
        "heirs": [{"worker": "lm-2", "ranks": "0"}],
        "workers": 2,
        "ranksRunSeconds": 0.054,
        "nextStepSeconds": 2.3,
        "step": 625,
        "redone": 12,
    }


@pytest.mark.parametrize(
    ("first", "resume", "words"),
    [
        (637, None, "; back at step 637, no step redone"),
        (636, None, "; back at step 636, 1 step redone"),
        (0, None, "; back at step 0, 637 steps redone"),
        (640, Resume(624, why="in memory"), "; back at step 624, 12 steps redone"),
    ],
)
def test_steps_are_those_that_are_known(first: int, resume: Resume | None, words: str) -> None:
    run = stepped(healing(broken("a b", a_loss("a")), "c b", resume=resume), first)
    assert sentence(run) == f"a lost; c has rank 0; {BOTH}{words}"


def test_before_the_first_step_the_reason_says_how_far_the_heal_is() -> None:
    run = healing(broken("a b", a_loss("a")), "c b")
    c = run.members[an_id("c")]
    run = replace(run, members={**run.members, c.member_id: replace(c, doing="importing torch")})
    assert decisions.decide(run, NOW).reason == (
        "healing: a lost; c has rank 0; no step yet, step 636 was the last before; start, importing torch on c"
    )
    assert decisions.decide(up(run), NOW + 1).reason == (
        "healing: a lost; c has rank 0; ranks run after 54 ms; no step yet, step 636 was the last before"
    )


def test_a_heal_is_reported_once_and_over_then() -> None:
    run = stepped(healing(broken("a b", a_loss("a")), "c b"), 637)
    decision = decisions.decide(run, NOW)
    assert isinstance(decision.action, ReportHeal) and decision.reason.startswith("a lost; c has rank 0; ranks run")
    run = decisions.carry_out(run, decision.action, NOW)
    assert run.healing is None and decisions.decide(run, NOW).reason == "round 1: 2 workers train"


def test_where_no_rank_tells_steps_a_loss_is_healed_when_ranks_have_run_for_a_while() -> None:
    run = up(healing(broken("a b", a_loss("a"), at=None), "c b"))
    assert not heals.awaits_step(run), "its target is reached when its ranks run"
    assert heals.due(run) == UP_AT + SETTLE_S
    assert sentence(run, UP_AT + SETTLE_S) == "a lost; c has rank 0; ranks run after 54 ms"
    assert "reported as healed when they have run for 10 s" in decisions.decide(run, UP_AT).reason
    assert sentence(stepped(run, 3)).endswith(f"{BOTH}; back at step 3"), "it tells its first one after all"


def test_a_crash_has_not_healed_before_a_step_beyond_the_one_at_which_it_happened() -> None:
    run = healing(crashed(at=636), "a b")
    assert sentence(stepped(run, 600, 636), LATER) == "", "it may crash again at the same step"
    assert "at step 636, step 636 was the last before the crash" in decisions.decide(stepped(run, 600, 636), NOW).reason
    assert sentence(stepped(run, 600, 637)) == (
        "rank 1 on b: Exit 1; 2 workers train again; ranks run after 154 ms, next step after 2.4 s; "
        "back at step 600, 37 steps redone"
    )


@pytest.mark.parametrize(("lived_s", "settles_s"), [(0.1, SETTLE_S), (20.0, 30.0), (3600.0, MOST_SETTLE_S)])
def test_without_steps_a_crash_has_healed_when_the_round_outlives_it(lived_s: float, settles_s: float) -> None:
    run = up(healing(crashed(at=None, up_at=NOW - lived_s), "a b"))
    assert heals.due(run) == pytest.approx(UP_AT + settles_s)


def test_a_step_that_a_program_tells_for_the_first_time_after_a_crash_does_not_make_it_good() -> None:
    run = stepped(healing(crashed(at=None), "a b"), 3)
    assert heals.due(run) == pytest.approx(UP_AT + SETTLE_S)


def test_a_crash_that_repeats_is_one_heal_and_none_is_reported_at_its_end() -> None:
    run = healing(crashed(at=636), "a b")
    again = recalled(replace(stepped(run, 600, 636), restarts_used=1), Cause.FAILURE, reason="rank 1 on b: Exit 1")
    run = healing(again, "a b")
    assert run.healing is not None and run.healing.since == NOW - 0.1 and run.healing.top == 636
    assert sentence(stepped(run, 600, 636), LATER) == ""


def test_a_world_that_nobody_was_left_for_goes_on_smaller() -> None:
    run = healing(broken("a b", a_loss("a")), "b")
    assert sentence(stepped(run, 636)) == f"a lost; goes on with 1 worker; {BOTH}; back at step 636, 1 step redone"


def test_one_that_came_back_has_its_rank_again() -> None:
    run = healing(broken("a b", a_loss("b", NOW - 1.5)), "a b")
    assert sentence(stepped(run, 637)).startswith("b lost; b has rank 1; ranks run after 1.6 s, next step after 3.8 s;")


def test_ranks_of_a_worker_with_several_are_told_as_they_are_numbered() -> None:
    seats = tuple(a_seat(rank, name, procs=4) for rank, name in enumerate(("a", "b")))
    heirs = tuple(a_seat(rank, name, procs=4) for rank, name in enumerate(("a", "c")))
    before = recalled(a_run("a b", last=Round(0, seats, losses=(a_loss("b"),))))
    known = heals.begun(before, Round(1, heirs))
    run = replace(a_run("a c"), round=Round(1, heirs, up_at=UP_AT, ran_at=UP_AT, since=NOW), healing=known)
    assert sentence(run, LATER) == "b lost; c has ranks 4-7; ranks run after 54 ms"


def test_a_second_loss_before_it_is_told_belongs_to_the_same_heal() -> None:
    run = healing(broken("a b c", a_loss("a")), "d b c")
    assert run.round is not None
    last = replace(run, round=replace(run.round, losses=(a_loss("b", NOW + 1.0),)))
    run = healing(recalled(last, at=NOW + 1.0), "d e c")
    run = up(run, NOW + 1.5, progress=steps(630), first_step=630, first_step_at=NOW + 4.0)
    assert sentence(run, NOW + 4.0) == (
        "a, b lost; d has rank 0, e has rank 1; ranks run after 1.5 s, next step after 4.0 s; "
        "back at step 630, 7 steps redone"
    )


@pytest.mark.parametrize("cause", [Cause.GROW, Cause.SHRINK, Cause.DRAIN])
def test_a_planned_resize_is_no_heal(cause: Cause) -> None:
    """Also if somebody leaves meanwhile: one that was asked to go counts as lost when it is gone."""
    assert healing(broken("a b", a_loss("b"), cause=cause), "a").healing is None


def test_a_heal_that_a_resize_cuts_short_goes_on_in_the_next_round() -> None:
    run = healing(broken("a b", a_loss("a")), "c b")
    run = healing(recalled(up(run), Cause.GROW), "c b d")
    assert sentence(up(run), LATER) == ""
    assert sentence(stepped(run, 637)).startswith(f"a lost; c has rank 0; {BOTH}")


def test_a_size_that_is_taken_back_and_the_first_round_are_none() -> None:
    last = a_round("a b")
    assert healing(recalled(a_run("a b", last=last), Cause.FAILURE, forgiven=True), "a").healing is None
    assert heals.begun(a_run(waiting="a b"), a_round("a b")) is None
    assert heals.since(a_run(waiting="a b"), None) is None


@pytest.mark.parametrize(
    ("cause", "asked_at", "since"),
    [
        (Cause.GROW, NOW - 1.0, NOW - 1.0),
        (Cause.GROW, -math.inf, NOW + 0.01),
        (Cause.GROW, NOW - 9.0, NOW + 0.01),  # answered long ago: this round grows by a worker that came late
        (Cause.DRAIN, NOW - 1.0, NOW + 0.01),
    ],
)
def test_a_resized_round_counts_from_the_request(cause: Cause, asked_at: float, since: float) -> None:
    before = replace(broken("a b", cause=cause, up_at=NOW - 5.0), target_set_at=asked_at)
    assert heals.since(before, None) == since


def test_of_a_loss_that_no_coordinator_saw_no_time_is_told() -> None:
    run = stepped(healing(broken("a b", a_loss("a", UNSEEN)), "c b"), 630)
    assert sentence(run) == "a lost; c has rank 0; back at step 630, 7 steps redone"


def test_of_a_thousand_lost_workers_a_few_are_named() -> None:
    many = " ".join(f"w{i}" for i in range(1000))
    run = stepped(healing(broken(f"{many} x", *(a_loss(name) for name in many.split())), "x"), 637)
    assert sentence(run).startswith("w0, w1, w2, w3, w4, w5, w6, w7 and 992 more lost; goes on with 1 worker;")
    others = " ".join(f"v{i}" for i in range(1000))
    run = stepped(healing(broken(many, *(a_loss(name) for name in many.split())), others), 637)
    assert len(sentence(run)) < 400


def test_the_next_step_is_the_first_of_any_rank_and_never_before_ranks_run() -> None:
    run = a_run("a b")
    run = transitions.advanced(run, an_id("a"), 0, [(0, Progress(9, NOW))], Progress(7, NOW - 0.5))
    run = transitions.advanced(run, an_id("b"), 0, [(1, Progress(8, NOW))], Progress(6, NOW - 0.2))
    run = transitions.advanced(run, an_id("a"), 0, [(0, Progress(11, NOW))])
    assert run.round is not None and (run.round.first_step, run.round.first_step_at) == (6, NOW - 0.5)
    early = replace(run.round, since=NOW - 2.0, ran_at=NOW)
    assert (early.ranks_run_s, early.next_step_s) == (2.0, 2.0), "a worker may tell any age"

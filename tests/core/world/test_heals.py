"""What is told of a heal: once, with who, how long and which steps, and nothing that nobody saw."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from muster.core.world import heals, transitions
from muster.core.world.heals import STEP_WAIT_S, Healing
from muster.core.world.run import UNSEEN, Run
from muster.types.state import Resume
from muster.types.world import Cause, Loss, Progress, Round
from tests.core.builders import NOW, a_round, a_run, a_seat, an_exit, an_id, recalled

UP_AT = NOW + 0.054


def steps(*told: int) -> dict[int, Progress]:
    return {rank: Progress(step, NOW) for rank, step in enumerate(told)}


def a_loss(name: str, at: float = NOW, **known: Any) -> Loss:
    return Loss(an_id(name), name, at, "its connection closed", **known)


def broken(names: str, *losses: Loss, at: int = 636, cause: Cause = Cause.LOSS, **known: Any) -> Run:
    """A round that was called back, with steps of its ranks."""
    last = a_round(names, progress=steps(at, at - 1), losses=losses, **known)
    return recalled(a_run(names, last=last), cause, NOW + 0.01)


def begun(before: Run, names: str, known: Healing | None = None, **formed: Any) -> tuple[Healing | None, Run]:
    """After the release of a round with those; it has nothing to show yet."""
    out = a_round(names, number=1, up_at=None, **formed)
    return heals.begun(before, out, known), replace(a_run(names), round=out)


def up(run: Run, at: float = UP_AT, **story: Any) -> Run:
    assert run.round is not None
    return replace(run, round=replace(run.round, up_at=at, **story))


def sentence(healing: Healing | None, run: Run, now: float = UP_AT, **how: bool) -> str:
    assert healing is not None
    told = heals.over(healing, run, now, **how)
    return "" if told is None else told.text


def test_who_was_lost_who_has_its_rank_how_long_it_took_and_what_is_done_again() -> None:
    healing, run = begun(broken("lm-0 lm-1", a_loss("lm-0")), "lm-2 lm-1")
    assert sentence(healing, run) == "", "its ranks do not run yet"
    run = up(run)
    assert sentence(healing, run) == "", "nobody knows yet how far back it is"
    run = up(run, progress=steps(650), first_step=625)
    assert sentence(healing, run) == "lm-0 lost; lm-2 has rank 0 after 54 ms; back at step 625, 12 steps redone"
    assert healing is not None
    told = heals.over(healing, run, UP_AT)
    assert told is not None and told.data == {
        "lost": ["lm-0"],
        "heirs": [{"worker": "lm-2", "ranks": "0"}],
        "workers": 2,
        "seconds": 0.054,
        "step": 625,
        "redone": 12,
    }


@pytest.mark.parametrize(
    ("story", "words"),
    [
        ({"first_step": 637, "progress": steps(640)}, "; back at step 637, no step redone"),
        ({"first_step": 636, "progress": steps(640)}, "; back at step 636, 1 step redone"),
        ({"first_step": 0, "progress": steps(1)}, "; back at step 0, 637 steps redone"),
        ({"progress": steps(650, 640)}, "; back at step 640"),  # an older agent: how many is not known
        ({"resume": Resume(624, why="in memory")}, "; back at step 624, 12 steps redone"),
    ],
)
def test_steps_are_those_that_are_known(story: dict[str, Any], words: str) -> None:
    healing, run = begun(broken("a b", a_loss("a")), "c b")
    assert sentence(healing, up(run, **story)) == f"a lost; c has rank 0 after 54 ms{words}"


def test_without_a_step_it_is_told_after_a_while() -> None:
    healing, run = begun(broken("a b", a_loss("a")), "c b")
    assert healing is not None and heals.due(healing, run) == math.inf
    run = up(run)
    assert heals.due(healing, run) == UP_AT + STEP_WAIT_S
    assert sentence(healing, run, UP_AT + STEP_WAIT_S) == "a lost; c has rank 0 after 54 ms"
    assert sentence(healing, run, final=True) == "a lost; c has rank 0 after 54 ms"


def test_a_program_that_tells_no_steps_is_not_waited_for() -> None:
    last = a_round("a b", losses=(a_loss("a"),))
    healing, run = begun(recalled(a_run("a b", last=last), at=NOW), "c b")
    assert sentence(healing, up(run)) == "a lost; c has rank 0 after 54 ms"


def test_a_world_that_nobody_was_left_for_goes_on_smaller() -> None:
    healing, run = begun(broken("a b", a_loss("a")), "b")
    assert sentence(healing, up(run, first_step=636)) == (
        "a lost; goes on with 1 worker after 54 ms; back at step 636, 1 step redone"
    )


def test_one_that_came_back_has_its_rank_again() -> None:
    healing, run = begun(broken("a b", a_loss("b", NOW - 1.5)), "a b")
    assert sentence(healing, up(run), final=True) == "b lost; b has rank 1 after 1.6 s"


def test_a_rank_that_failed_is_named_where_no_worker_was_lost() -> None:
    last = a_round("a b", exits={1: an_exit(1)}, first_failed_at=NOW - 0.1, first_failed_rank=1)
    before = recalled(a_run("a b", last=last), Cause.FAILURE, reason="rank 1 on b: Exit 1")
    healing, run = begun(before, "a b")
    assert sentence(healing, up(run)) == "rank 1 on b: Exit 1; 2 workers train again after 154 ms"


def test_ranks_of_a_worker_with_several_are_told_as_they_are_numbered() -> None:
    seats = tuple(a_seat(rank, name, procs=4) for rank, name in enumerate(("a", "b")))
    heirs = tuple(a_seat(rank, name, procs=4) for rank, name in enumerate(("a", "c")))
    before = recalled(a_run("a b", last=Round(0, seats, losses=(a_loss("b"),))))
    healing = heals.begun(before, Round(1, heirs), None)
    run = replace(a_run("a c"), round=Round(1, heirs, up_at=UP_AT))
    assert sentence(healing, run) == "b lost; c has ranks 4-7 after 54 ms"


def test_a_second_loss_before_it_is_told_belongs_to_the_same_heal() -> None:
    first, run = begun(broken("a b c", a_loss("a")), "d b c")
    assert run.round is not None
    last = replace(run, round=replace(run.round, losses=(a_loss("b", NOW + 1.0),)))
    healing, run = begun(recalled(last, at=NOW + 1.0), "d e c", first)
    assert sentence(healing, up(run, NOW + 1.5, first_step=630)) == (
        "a, b lost; d has rank 0, e has rank 1 after 1.5 s; back at step 630, 7 steps redone"
    )


@pytest.mark.parametrize("cause", [Cause.GROW, Cause.SHRINK, Cause.DRAIN])
def test_a_planned_resize_is_no_heal(cause: Cause) -> None:
    """Also if somebody leaves meanwhile: one that was asked to go counts as lost when it is gone."""
    assert begun(broken("a b", a_loss("b"), cause=cause), "a")[0] is None


def test_a_size_that_is_taken_back_and_the_first_round_are_none() -> None:
    last = a_round("a b")
    assert begun(recalled(a_run("a b", last=last), Cause.FAILURE, forgiven=True), "a")[0] is None
    assert begun(a_run(waiting="a b"), "a b")[0] is None


def test_of_a_loss_that_no_coordinator_saw_no_time_is_told() -> None:
    healing, run = begun(broken("a b", a_loss("a", UNSEEN)), "c b")
    assert sentence(healing, up(run, first_step=630)) == "a lost; c has rank 0; back at step 630, 7 steps redone"


def test_of_a_thousand_lost_workers_a_few_are_named() -> None:
    many = " ".join(f"w{i}" for i in range(1000))
    healing, run = begun(broken(f"{many} x", *(a_loss(name) for name in many.split())), "x")
    text = sentence(healing, up(run), final=True)
    assert text.startswith("w0, w1, w2, w3, w4, w5, w6, w7 and 992 more lost; goes on with 1 worker after")
    others = " ".join(f"v{i}" for i in range(1000))
    healing, run = begun(broken(many, *(a_loss(name) for name in many.split())), others)
    assert len(sentence(healing, up(run), final=True)) < 400


def test_the_first_step_of_a_round_is_the_lowest_that_was_told_first() -> None:
    run = a_run("a b")
    run = transitions.advanced(run, an_id("a"), 0, [(0, Progress(9, NOW))], 7)
    run = transitions.advanced(run, an_id("b"), 0, [(1, Progress(8, NOW))], 6)
    run = transitions.advanced(run, an_id("a"), 0, [(0, Progress(11, NOW))])
    assert run.round is not None and run.round.first_step == 6

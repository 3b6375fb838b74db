"""Trainings beside pipelines in one plan: what holds of every one, and the stories behind the rules."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from muster.core.sharing import workers
from muster.core.sharing.hands import places
from muster.core.sharing.planner import plan
from muster.core.sharing.plans import SharePlan
from muster.types.sharing import ClusterSpec, LeaseState, Pool, Shares, gpus_of, mask_of
from tests.core.sharing import invariants
from tests.core.sharing.pools import (
    NOW,
    a_crew,
    a_lease,
    a_pipeline,
    a_request,
    a_state,
    crewed,
    fixed_leases,
    shared_states,
)

FULL4 = ClusterSpec([0, 1, 2, 3])


def seats(made: SharePlan, name: str) -> list[list[int]]:
    return [gpus_of(seat.mask) for seat in made.seats if seat.training == name]


def carried_out(shares: Shares, made: SharePlan) -> Shares:
    return workers.seated(workers.leaving(shares, made.leaves, NOW), [one for one in made.seats if one.ready], NOW)


def check_rules(shares: Shares) -> None:
    assert invariants.broken(shares) == []
    made = plan(shares, NOW)
    assert invariants.broken_by(shares, made) == []
    assert made.recheck_at is None or made.recheck_at > NOW
    assert made.standings.keys() == shares.crews.keys()
    assert all(one.message and one.reason for one in made.standings.values())
    after = carried_out(shares, made)
    assert invariants.broken(after) == []
    for uid, crew in shares.crews.items():
        before, now = len(workers.held(shares, uid)), len(workers.held(after, uid))
        assert now >= min(before, crew.min) or before > crew.most, "nobody's minimum is ever taken"
        if crew.ready is not None and before <= crew.most:
            joined = [[mask for mask in workers.held(one, uid) if not mask & ~crew.ready] for one in (shares, after)]
            assert len(joined[1]) >= min(len(joined[0]), crew.min), "nor replaced by one that is still to come"


@pytest.mark.parametrize("examples", [300, pytest.param(5_000, marks=pytest.mark.soak)])
def test_no_plan_breaks_a_rule(examples: int) -> None:
    settings(max_examples=examples)(given(shared_states())(check_rules))()


def check_equal_plans(shares: Shares) -> None:
    turned = replace(
        shares,
        crews=dict(list(shares.crews.items())[::-1]),
        workers=dict(list(shares.workers.items())[::-1]),
        leases=dict(list(shares.leases.items())[::-1]),
    )
    first, second = plan(shares, NOW), plan(turned, NOW)
    assert set(first.seats) == set(second.seats) and first.leaves.keys() == second.leaves.keys()
    assert set(first.expands) == set(second.expands) and first.grants == second.grants


@pytest.mark.parametrize("examples", [100, pytest.param(2_000, marks=pytest.mark.soak)])
def test_equal_inputs_give_equal_plans(examples: int) -> None:
    settings(max_examples=examples)(given(shared_states())(check_equal_plans))()


# Minima ------------------------------------------------------------------------------------------


def test_a_training_gets_its_minimum_and_then_what_it_wants_of_a_pool_that_is_idle() -> None:
    made = plan(crewed(a_state(4, []), a_crew("t", 2, 3)), NOW)
    assert seats(made, "t") == [[0], [1], [2]] and all(seat.ready for seat in made.seats)
    assert made.standings["t"].message == "3 of 4 GPUs are its own"


def test_generation_gives_way_to_a_minimum_and_not_to_more() -> None:
    pipeline = a_pipeline("p", FULL4)
    shares = a_state(4, [pipeline], leases=[a_lease(pipeline, rank) for rank in range(4)], remaining={"p": 40})
    made = plan(crewed(shares, a_crew("t", 1, 4)), NOW)
    assert len(made.shrinks) == 1 and len(seats(made, "t")) == 1 and not made.seats[0].ready


def test_a_training_that_waits_is_not_passed_by_a_younger_one() -> None:
    shares = crewed(crewed(a_state(4, []), a_crew("held", 3, 3), 0, 1, 2), a_crew("large", 2, 2, asked_at=1.0))
    made = plan(crewed(shares, a_crew("small", 1, 1, asked_at=2.0)), NOW - 98.0)
    assert made.seats == ()
    assert "default/held (3)" in made.standings["large"].message
    assert (
        made.standings["small"].reason == "Queued" and "default/large is before it" in made.standings["small"].message
    )


def test_one_that_can_never_start_holds_back_nobody() -> None:
    made = plan(crewed(crewed(a_state(4, []), a_crew("giant", 5, 5)), a_crew("small", 1, 1)), NOW)
    assert seats(made, "small") == [[0]]
    assert made.standings["giant"].message.endswith("there are only 4 here: it can never start")


def test_a_better_priority_comes_first() -> None:
    shares = crewed(a_state(2, []), a_crew("low", 2, 2, asked_at=1.0))
    made = plan(crewed(shares, a_crew("high", 2, 2, priority=1, asked_at=2.0)), NOW)
    assert len(seats(made, "high")) == 2 and seats(made, "low") == []


def test_gpus_on_which_pipelines_train_are_taken_last() -> None:
    pipeline = a_pipeline("p", FULL4, actor_train=ClusterSpec([0, 1]))
    made = plan(crewed(a_state(4, [pipeline]), a_crew("t", 2, 2)), NOW)
    assert seats(made, "t") == [[2], [3]]


# Lending -----------------------------------------------------------------------------------------


def test_a_fixed_stage_gets_what_is_above_a_minimum_and_never_the_minimum() -> None:
    pipeline = a_pipeline("p", FULL4, actor_train=ClusterSpec([0, 1]))
    shares = a_state(4, [pipeline], requests=(a_request(1, "p", "actor_train"),))
    lender = crewed(shares, a_crew("t", 2, 4, elasticity="lend"), 0, 1, 2, 3)
    made = plan(lender, NOW)
    assert set(made.leaves) == {"t/0", "t/1"} and made.grants and not made.grants[0].ready
    tight = plan(crewed(shares, a_crew("t", 3, 4, elasticity="lend"), 0, 1, 2, 3), NOW)
    assert not tight.leaves and not tight.grants
    assert tight.reasons["#1"] == "waits for training default/t (its minimum)"
    firm = plan(crewed(shares, a_crew("t", 1, 4), 0, 1, 2, 3), NOW)
    assert not firm.leaves and firm.reasons["#1"] == "waits for training default/t"


def test_a_minimum_in_the_way_moves_to_other_gpus_before_it_leaves() -> None:
    shares = a_state(2, [a_pipeline("p", ClusterSpec([0, 1]), actor_train=ClusterSpec([0]))])
    shares = replace(shares, requests=(a_request(1, "p", "actor_train"),))
    crew = a_crew("t", 1, 1, 2, "fill")
    made = plan(crewed(shares, crew, 0), NOW)
    assert seats(made, "t") == [[1]] and not made.leaves and not made.grants
    assert made.reasons["#1"] == "waits for training default/t (its minimum), which moves to other GPUs"
    both = crewed(shares, crew, 0, 1)
    starting = replace(both, crews={"t": replace(both.crews["t"], ready=mask_of([0]))})
    assert not plan(starting, NOW).leaves, "its worker there has not joined yet"
    joined = replace(both, crews={"t": replace(both.crews["t"], ready=mask_of([0, 1]))})
    made = plan(joined, NOW)
    assert set(made.leaves) == {"t/0"} and made.grants


def test_lenders_and_generation_share_by_need() -> None:
    pipeline = a_pipeline("p", ClusterSpec(range(8), slots_per_bundle=8))
    shares = crewed(a_state(8, [pipeline], remaining={"p": 800}), a_crew("t", 0, 8, elasticity="lend"), *range(8))
    made = plan(shares, NOW)
    assert 3 <= len(made.leaves) <= 5 and len(made.expands) == len(made.leaves)


def test_what_was_lent_comes_back_to_the_worker_that_waits_for_it() -> None:
    lender = crewed(a_state(4, []), a_crew("t", 1, 3, elasticity="lend"), 0)
    lender = replace(lender, crews={"t": replace(lender.crews["t"], parked=mask_of([2, 3]))})
    assert sorted(seats(plan(lender, NOW), "t")) == [[2], [3]]


def test_a_spare_is_lent_first() -> None:
    pipeline = a_pipeline("p", FULL4)
    shares = crewed(a_state(4, [pipeline], remaining={"p": 1}), a_crew("t", 2, 4, elasticity="lend"), 0, 1, 2, 3)
    shares = replace(shares, crews={"t": replace(shares.crews["t"], resting=mask_of([1]))})
    assert set(plan(shares, NOW).leaves) == {"t/1"}


def test_two_trainings_that_are_in_the_way_move_to_different_places() -> None:
    pipeline = a_pipeline("p", ClusterSpec(range(6)), actor_train=ClusterSpec([0, 1]))
    shares = a_state(6, [pipeline], requests=(a_request(1, "p", "actor_train"),))
    shares = crewed(crewed(shares, a_crew("s", 1, 1, 2, "fill"), 0), a_crew("t", 1, 1, 2, "fill"), 1)
    made = plan(shares, NOW)
    moved = seats(made, "s") + seats(made, "t")
    assert len(moved) == 2 and moved[0] != moved[1] and not {0, 1} & {gpu for one in moved for gpu in one}
    assert invariants.broken_by(shares, made) == []


def test_one_that_has_all_it_can_use_leaves_first_what_is_not_of_its_minimum() -> None:
    pipeline = a_pipeline("p", ClusterSpec(range(8)), actor_train=ClusterSpec([0, 3, 5]))
    shares = a_state(8, [pipeline], requests=(a_request(1, "p", "actor_train"),))
    shares = crewed(shares, a_crew("t", 2, 4, elasticity="lend"), 0, 2, 3, 5)
    made = plan(shares, NOW)
    assert len(made.leaves) == 1 and set(made.leaves) <= {"t/0", "t/3", "t/5"}
    assert len(seats(made, "t")) == 1 and not {0, 2, 3, 5} & set(seats(made, "t")[0])
    after = carried_out(shares, made)
    for key in made.leaves:
        after = workers.left(after, "t", after.workers[key].mask, NOW)
    after = replace(after, crews={"t": replace(after.crews["t"], using=mask_of([0, 1, 2, 3, 5]))})
    assert plan(after, NOW).grants, "the rest of what is in the way is above its minimum now"


def test_a_wide_bundle_is_made_of_what_fills_and_what_is_lent() -> None:
    pipeline = a_pipeline("p", ClusterSpec([2, 3], 2))
    shares = a_state(4, [pipeline], remaining={"p": 8}, waiting={"p": NOW - 60.0})
    shares = crewed(shares, a_crew("fills", 1, 1, 2, "fill"), 0, 3)
    shares = crewed(shares, a_crew("lends", 1, 2, elasticity="lend"), 1, 2)
    made = plan(shares, NOW)
    assert set(made.leaves) == {"fills/3", "lends/2"} and len(made.expands) == 1


def test_one_that_gives_two_workers_for_a_wide_bundle_gets_two_others_and_no_more() -> None:
    pipeline = a_pipeline("p", ClusterSpec([6, 7], 2))
    shares = a_state(8, [pipeline], remaining={"p": 64}, waiting={"p": NOW})
    made = plan(crewed(shares, a_crew("t", 1, 5, elasticity="lend"), 0, 2, 5, 6, 7), NOW)
    assert set(made.leaves) == {"t/6", "t/7"} and len(made.expands) == 1
    assert len(seats(made, "t")) == 2


def test_which_workers_are_minima_is_chosen_so_that_a_wide_bundle_can_be_had() -> None:
    pipeline = a_pipeline("p", ClusterSpec([0, 1, 2, 3], 2), actor_train=ClusterSpec([1, 3]))
    shares = a_state(4, [pipeline], remaining={"p": 64}, waiting={"p": NOW - 60.0})
    shares = crewed(shares, a_crew("s", 1, 2, elasticity="lend"), 0, 3)
    made = plan(crewed(shares, a_crew("t", 1, 2, elasticity="lend"), 1, 2), NOW)
    assert set(made.leaves) == {"s/0", "t/1"} and len(made.expands) == 1


# Filling -----------------------------------------------------------------------------------------


def filled(since: float, **known: object) -> SharePlan:
    crew = a_crew("t", 1, 1, 4, "fill", vacate_s=0.3, return_s=0.5, **known)
    shares = crewed(a_state(4, []), crew, 0)
    return plan(replace(shares, vacant_since=dict.fromkeys(range(4), since)), NOW)


def test_idle_gpus_are_filled_once_they_have_been_idle_for_what_the_change_costs() -> None:
    assert seats(filled(NOW - 10.0), "t") == [[1], [2], [3]]
    early = filled(NOW)
    assert not early.seats and early.recheck_at is not None
    assert NOW < early.recheck_at < NOW + 1.5


def test_one_that_fills_yields_to_generation_and_keeps_what_it_wants() -> None:
    pipeline = a_pipeline("p", FULL4)
    shares = crewed(a_state(4, [pipeline], remaining={"p": 8}), a_crew("t", 1, 1, 4, "fill"), 0, 1, 2, 3)
    made = plan(shares, NOW)
    assert len(made.leaves) == 3 and len(made.expands) == 3


def test_a_bundle_that_its_pipeline_cannot_fill_with_work_goes_to_one_that_fills() -> None:
    pipeline = a_pipeline("p", ClusterSpec(range(4), slots_per_bundle=8))
    shares = a_state(4, [pipeline], leases=[a_lease(pipeline, rank) for rank in range(3)], remaining={"p": 5})
    rollouts = {name: replace(one, reported_at=NOW - 30.0) for name, one in shares.rollouts.items()}
    shares = crewed(replace(shares, rollouts=rollouts), a_crew("t", 1, 1, 4, "fill"), 3)
    made = plan(shares, NOW)
    assert len(made.shrinks) == 2 and len(made.seats) == 2
    assert all("5 left need 1 of" in made.reasons[str(bundle)] for bundle in made.shrinks)


def test_what_a_pipeline_keeps_without_work_goes_to_one_that_fills() -> None:
    pipeline = a_pipeline("p", FULL4)
    shares = a_state(4, [pipeline], leases=[a_lease(pipeline, rank) for rank in range(3)])
    made = plan(crewed(shares, a_crew("t", 1, 1, 4, "fill"), 3), NOW)
    assert len(made.shrinks) == 3 and len(made.seats) == 3
    assert all("nothing left to do, training default/t has" in made.reasons[str(one)] for one in made.shrinks)


def test_a_stage_does_not_wait_for_a_training_that_waits_for_another_training() -> None:
    pipeline = a_pipeline("p", FULL4, actor_train=ClusterSpec([3]))
    shares = crewed(a_state(4, [pipeline]), a_crew("filler", 1, 1, 4, "fill"), 0, 1, 2, 3)
    shares = replace(shares, requests=(a_request(1, "p", "actor_train"),))
    waits = crewed(shares, a_crew("large", 4, 4, asked_at=1.0))
    made = plan(waits, NOW)
    assert set(made.leaves) == {"filler/3"} and made.grants, "large waits for the minimum of filler"
    soon = crewed(shares, a_crew("large", 3, 3, asked_at=1.0))
    assert not plan(soon, NOW).grants, "it has waited for long, and gets what it needs first"


def test_nobody_who_lends_or_fills_takes_a_gpu_from_a_stage_that_is_granted_whole() -> None:
    pipeline = a_pipeline("p", FULL4, actor_train=FULL4)
    shares = a_state(4, [pipeline], leases=fixed_leases(pipeline, "actor_train"))
    made = plan(crewed(shares, a_crew("t", 1, 2, 4, "fill")), NOW)
    assert not made.seats and "p/actor_train (4)" in made.standings["t"].message


# The end of one ----------------------------------------------------------------------------------


def test_one_that_has_ended_asks_for_nothing_and_keeps_what_something_of_it_still_uses() -> None:
    shares = crewed(a_state(4, []), a_crew("t", 1, 4), 0, 1)
    ended = workers.ending(shares, "t", mask_of([0]))
    made = plan(ended, NOW)
    assert not made.seats and set(made.leaves) == {"t/1"}
    assert set(workers.leaving(ended, made.leaves, NOW).workers) == {"t/0"}
    assert workers.ending(ended, "t", mask_of([0])) is ended and workers.ending(shares, "u", 0) is shares


# Places and records ------------------------------------------------------------------------------


def test_places_lie_inside_a_node_or_on_whole_nodes() -> None:
    pool = Pool(10, 4)
    assert places(pool, 1).gpus == tuple(range(10))
    assert places(pool, 2).bundles == ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9))
    assert places(pool, 3).bundles == ((0, 1, 2), (4, 5, 6))
    assert places(pool, 8).bundles == ((0, 1, 2, 3, 4, 5, 6, 7),)


def test_a_gpu_is_free_when_its_worker_has_said_so_and_not_before() -> None:
    shares = crewed(a_state(2, []), a_crew("t", 0, 2, elasticity="lend"), 0, 1)
    asked = workers.leaving(shares, {"t/0": "p needs it"}, NOW)
    assert asked.workers["t/0"].state is LeaseState.DRAINING
    assert workers.left(asked, "t", mask_of([1]), NOW) is asked, "what it need not leave stays its own"
    done = workers.left(asked, "t", mask_of([0]), NOW + 0.4)
    assert set(done.workers) == {"t/1"} and done.crews["t"].vacate_s == 0.4000000000000057
    nobody = replace(shares, crews={"t": replace(shares.crews["t"], using=0)})
    assert set(workers.leaving(nobody, {"t/0": "p needs it"}, NOW).workers) == {"t/1"}, "where there is no worker"

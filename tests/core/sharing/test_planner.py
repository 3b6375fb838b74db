"""What every plan keeps, over random states and against a brute-force oracle; and the stories behind the rules."""

from __future__ import annotations

import itertools
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.core.sharing import due
from muster.core.sharing.planner import plan
from muster.types.sharing import ClusterSpec, LeaseState, Pipeline, Priority, Shares, mask_of
from tests.core.sharing import invariants
from tests.core.sharing.pools import NOW, a_lease, a_pipeline, a_request, a_state, fixed_leases, states

FULL4 = ClusterSpec([0, 1, 2, 3])


def counts(shares: Shares) -> dict[str, int]:
    """Bundles of each open pipeline when the plan has been carried out."""
    holdings = invariants.after(shares, plan(shares, NOW))
    return {name: sum(bundle.pipeline == name for bundle in holdings) for name in shares.rollouts}


def emptied(shares: Shares) -> Shares:
    """The same demand on a pool that nobody has used yet."""
    fresh = {name: replace(one, waiting_since=NOW) for name, one in shares.rollouts.items()}
    return replace(shares, leases={}, requests=(), rollouts=fresh)


def check_rules(shares: Shares) -> None:
    assert invariants.broken(shares) == []
    made = plan(shares, NOW)
    assert invariants.broken_by(shares, made) == []
    for bundle in made.shrinks:
        assert made.reasons[str(bundle)], "every shrink says why"
    assert made.recheck_at is None or made.recheck_at > NOW


@pytest.mark.parametrize("examples", [200, pytest.param(5_000, marks=pytest.mark.soak)])
def test_no_plan_breaks_a_rule(examples: int) -> None:
    settings(max_examples=examples)(given(states())(check_rules))()


def check_equal_plans(shares: Shares, shuffle: object) -> None:
    leases, pipelines = list(shares.leases.items()), list(shares.pipelines.items())
    shuffle.shuffle(leases)  # type: ignore[attr-defined]
    shuffle.shuffle(pipelines)  # type: ignore[attr-defined]
    again = replace(shares, leases=dict(leases), pipelines=dict(pipelines))
    first, second = plan(shares, NOW), plan(again, NOW)
    assert (set(first.shrinks), set(first.expands), first.grants) == (
        set(second.shrinks),
        set(second.expands),
        second.grants,
    )


@pytest.mark.parametrize("examples", [100, pytest.param(2_000, marks=pytest.mark.soak)])
def test_equal_inputs_give_equal_plans(examples: int) -> None:
    settings(max_examples=examples)(given(states(), st.randoms())(check_equal_plans))()


def check_largest_remainders(shares: Shares) -> None:
    cold = emptied(shares)
    claims = {
        name: shares.pipelines[name].weight * rollout.remaining
        for name, rollout in cold.rollouts.items()
        if rollout.remaining > 0
    }
    if not claims:
        return
    spec = next(iter(cold.pipelines.values())).infer
    caps = {name: _useful(cold, str(name)) for name in claims}
    if any(caps[name] < len(spec.masks) for name in claims):
        return  # caps move what the others get; the oracle below covers that
    expected = _largest_remainders({str(name): claim for name, claim in claims.items()}, len(spec.masks))
    assert {name: count for name, count in counts(cold).items() if name in claims} == expected


@pytest.mark.parametrize("examples", [100, pytest.param(2_000, marks=pytest.mark.soak)])
def test_a_cold_plan_gives_largest_remainders(examples: int) -> None:
    settings(max_examples=examples)(given(states(equal_maps=True))(check_largest_remainders))()


def _useful(shares: Shares, name: str) -> int:
    pipeline, rollout = shares.pipelines[name], shares.rollouts[name]  # type: ignore[index]
    slots = pipeline.infer.slots_per_bundle
    return -(-rollout.remaining // slots) if slots else rollout.remaining


def _largest_remainders(claims: dict[str, float], seats: int) -> dict[str, int]:
    total = sum(Fraction(claim) for claim in claims.values())
    quota = {name: seats * Fraction(claim) / total for name, claim in claims.items()}
    given = {name: 0 for name in claims}
    by_need = sorted(claims, key=lambda name: (-quota[name], name))
    for name in by_need[:seats]:
        given[name] = 1
    while sum(given.values()) < seats:
        name = min(claims, key=lambda one: (-(quota[one] - given[one]), one))
        given[name] += 1
    return given


@settings(max_examples=150, deadline=None)
@given(states(most_gpus=4, tps=(1,)))
def test_no_other_assignment_serves_more_pipelines(shares: Shares) -> None:
    """Against every assignment of vacant bundles of a cold pool: nobody waits who could have been served."""
    cold = emptied(shares)
    wanting = {str(name): _useful(cold, str(name)) for name, one in cold.rollouts.items() if one.remaining > 0}
    have = counts(cold)
    served = sum(have[name] > 0 for name in wanting)
    assert served == _most_served(cold, list(wanting))


def _most_served(shares: Shares, names: list[str]) -> int:
    choices = [[0, *shares.pipelines[name].infer.masks] for name in names]  # type: ignore[index]
    best = 0
    for picked in itertools.product(*choices):
        used, clash = 0, False
        for mask in picked:
            clash = clash or bool(mask & used)
            used |= mask
        if not clash:
            best = max(best, sum(mask > 0 for mask in picked))
    return best


@given(states(equal_maps=True))
def test_a_warm_plan_leaves_nobody_a_whole_bundle_short_while_another_has_too_much(shares: Shares) -> None:
    calm = replace(
        shares, requests=(), leases={b: one for b, one in shares.leases.items() if one.state is LeaseState.HELD}
    )
    calm = replace(calm, leases={b: one for b, one in calm.leases.items() if one.priority is Priority.GENERATION})
    have = counts(calm)
    dues = _dues(calm)
    for poor in dues:
        if have[poor] and dues[poor] - have[poor] >= 1 and have[poor] < _useful(calm, poor):
            assert all(have[rich] <= dues[rich] or have[rich] == 1 for rich in dues if rich != poor)


def _dues(shares: Shares) -> dict[str, float]:
    claims = []
    for name, rollout in shares.rollouts.items():
        spec = shares.pipelines[name].infer
        if rollout.remaining > 0:
            most = min(len(spec.masks), _useful(shares, str(name))) * spec.tp_size
            claims.append(due.ShareClaim(name, float(rollout.remaining * spec.tp_size), spec.mask, float(most)))
    return {str(name): gpus / shares.pipelines[name].infer.tp_size for name, gpus in due.shares(claims).items()}


# Stories


def two(**more: ClusterSpec) -> tuple[Pipeline, Pipeline]:
    return a_pipeline("a", FULL4, **more), a_pipeline("b", FULL4)


def test_both_get_their_share_whoever_spoke_first() -> None:
    a, b = two()
    assert counts(a_state(4, [a, b], remaining={"a": 8, "b": 8})) == {"a": 2, "b": 2}
    held_by_a = a_state(4, [a, b], leases=[a_lease(a, rank) for rank in range(4)], remaining={"a": 8, "b": 8})
    assert counts(held_by_a) == {"a": 2, "b": 2}


def test_a_training_request_takes_only_what_it_needs() -> None:
    a, b = a_pipeline("a", FULL4, actor_train=ClusterSpec([0, 1])), a_pipeline("b", FULL4)
    shares = a_state(
        4,
        [a, b],
        leases=[a_lease(b, rank) for rank in range(4)],
        remaining={"b": 8},
        requests=(a_request(1, "a", "actor_train"),),
    )
    made = plan(shares, NOW)
    assert {bundle.rank for bundle in made.shrinks} == {0, 1}
    assert [(grant.seq, grant.ready) for grant in made.grants] == [(1, False)]


def test_a_request_that_cannot_be_granted_moves_nothing() -> None:
    a = a_pipeline("a", FULL4, actor_train=ClusterSpec([0, 1]))
    b = a_pipeline("b", FULL4, actor_train=ClusterSpec([1, 2]))
    c = a_pipeline("c", FULL4)
    leases = [*fixed_leases(a, "actor_train"), a_lease(c, 2), a_lease(c, 3)]
    request = a_request(1, "b", "actor_train")
    made = plan(a_state(4, [a, b, c], leases=leases, remaining={"c": 9}, requests=(request,)), NOW)
    assert made.shrinks == () and made.grants == ()
    assert "a/actor_train" in made.reasons["#1"]


def test_a_large_request_is_served_against_a_stream_of_small_ones() -> None:
    both = a_pipeline("both", FULL4, actor_train=ClusterSpec([0, 1]))
    small = a_pipeline("small", FULL4, actor_train=ClusterSpec([0]))
    other = a_pipeline("other", FULL4, actor_train=ClusterSpec([1]))
    leases = fixed_leases(other, "actor_train")
    queue = (a_request(1, "both", "actor_train", since=NOW), a_request(2, "small", "actor_train", since=NOW))
    made = plan(a_state(4, [both, small, other], leases=leases, requests=queue), NOW)
    assert made.grants == () and "reserved for both/actor_train" in made.reasons["#2"]
    urgent = (queue[0], a_request(2, "small", "actor_train", Priority.INITIALIZATION))
    state = a_state(4, [both, small, other], leases=leases, requests=urgent)
    assert [grant.seq for grant in plan(state, NOW).grants] == [2], "a more urgent one may pass, for a while"
    assert plan(state, NOW + 31).grants == ()


def test_a_request_that_waits_for_a_holder_does_not_keep_that_holder_from_getting_on() -> None:
    holder = a_pipeline("a", FULL4, critic=ClusterSpec([0]), reference=ClusterSpec([1]))
    waiting = a_pipeline("b", FULL4, actor_train=ClusterSpec([0, 1]))
    other = a_pipeline("c", FULL4, actor_train=ClusterSpec([1]))
    requests = (
        a_request(1, "b", "actor_train", since=NOW - 50),
        a_request(2, "c", "actor_train"),
        a_request(3, "a", "reference"),
    )
    state = a_state(4, [holder, waiting, other], leases=fixed_leases(holder, "critic"), requests=requests)
    assert [grant.seq for grant in plan(state, NOW).grants] == [3]


def test_a_holder_without_demand_yields_everything() -> None:
    a, b = two()
    shares = a_state(4, [a, b], leases=[a_lease(a, rank) for rank in range(4)], remaining={"b": 9})
    assert counts(shares) == {"b": 4}


def test_a_narrow_and_a_wide_map_leave_no_gpu_idle() -> None:
    narrow, wide = a_pipeline("n", ClusterSpec([0])), a_pipeline("w", FULL4)
    assert counts(a_state(4, [narrow, wide], remaining={"n": 9, "w": 9})) == {"n": 1, "w": 3}
    assert counts(a_state(4, [narrow, wide], remaining={"n": 1, "w": 90})) == {"n": 1, "w": 3}


def test_nothing_moves_for_less_than_a_bundle() -> None:
    a, b = two()
    leases = [a_lease(a, 0), a_lease(a, 1), a_lease(b, 2), a_lease(b, 3)]
    assert plan(a_state(4, [a, b], leases=leases, remaining={"a": 10, "b": 14}), NOW).shrinks == ()
    assert len(plan(a_state(4, [a, b], leases=leases, remaining={"a": 10, "b": 30}), NOW).shrinks) == 1


def test_five_pipelines_take_turns_on_four_bundles() -> None:
    pipelines = [a_pipeline(f"p{i}", FULL4) for i in range(5)]
    leases = [a_lease(pipelines[i], i, held_since=NOW - 10 + i) for i in range(4)]
    everyone = {f"p{i}": 9 for i in range(5)}
    shares = a_state(4, pipelines, leases=leases, remaining=everyone, waiting={"p4": NOW - 1})
    made = plan(shares, NOW)
    assert [str(bundle) for bundle in made.shrinks] == ["p0/actor_infer[0]"], "held longest"
    assert [str(expand.bundle) for expand in made.expands] == ["p4/actor_infer[0]"]
    young = a_state(
        4, pipelines, leases=[a_lease(p, i, held_since=NOW) for i, p in enumerate(pipelines[:4])], remaining=everyone
    )
    assert plan(young, NOW).shrinks == () and plan(young, NOW).recheck_at == NOW + 2.0


def test_what_is_draining_is_not_shrunk_again() -> None:
    a, b = two()
    leases = [a_lease(a, 0), a_lease(a, 1), a_lease(a, 2, LeaseState.DRAINING), a_lease(a, 3, LeaseState.DRAINING)]
    made = plan(a_state(4, [a, b], leases=leases, remaining={"a": 8, "b": 8}), NOW)
    assert made.shrinks == () and {expand.ready for expand in made.expands} == {False}
    assert mask_of([2, 3]) == sum(expand.mask for expand in made.expands)


def test_a_detached_pipeline_is_left_alone_and_named() -> None:
    a, b = a_pipeline("a", FULL4), a_pipeline("b", FULL4, actor_train=ClusterSpec([0, 1]))
    gone = replace(a, detached_since=NOW - 1)
    shares = a_state(4, [gone, b], leases=[a_lease(a, 0)], requests=(a_request(1, "b", "actor_train"),))
    made = plan(shares, NOW)
    assert made.shrinks == () and made.grants == () and "detached" in made.reasons["#1"]


def test_no_move_for_what_is_nearly_done() -> None:
    a, b = two()
    slow = [replace(one, shrink_s=2.0, expand_s=6.0) for one in (a, b)]
    leases = [a_lease(a, 0), a_lease(a, 1), a_lease(a, 2), a_lease(b, 3)]
    shares = a_state(4, slow, leases=leases, remaining={"a": 4, "b": 40})
    quick = {name: replace(one, rate=10.0) for name, one in shares.rollouts.items()}
    assert len(plan(shares, NOW).shrinks) >= 1
    assert plan(replace(shares, rollouts=quick), NOW).shrinks == ()

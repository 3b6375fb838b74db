"""Is every second of every GPU counted for one holder, and for no more than one?"""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.core.sharing import leases, records, usage, workers
from muster.core.sharing.leases import used_mask
from muster.core.sharing.plans import Seat
from muster.types.sharing import (
    Bundle,
    ClusterSpec,
    LeaseState,
    PipelineId,
    Pool,
    Priority,
    Request,
    Shares,
    Tenant,
    Used,
    gpus_of,
)
from tests.core.sharing.pools import a_crew

P1, P2 = PipelineId("p1"), PipelineId("p2")
ALL = {"actor_train": ClusterSpec([0, 1]), "actor_infer": ClusterSpec(range(4))}
START = 1_000.0


def a_pool(gpus: int = 4) -> Shares:
    """Two pipelines and a training that has nothing yet; it is counted from START on."""
    shares = Shares(Pool(gpus, gpus))
    for name in (P1, P2):
        shares = leases.admitted(leases.registered(shares, name, ALL, 1.0), name)
    shares = workers.declared(shares, a_crew("t", 0, 2, 4, "fill"), START)
    return usage.begun(shares, START)


def expanding(shares: Shares, at: float, pipeline: PipelineId = P1, *ranks: int) -> Shares:
    bundles = [Bundle(pipeline, "actor_infer", rank) for rank in ranks]
    return usage.metered(shares, leases.expanding(shares, bundles, at), at)


def seconds(shares: Shares, at: float) -> dict[tuple[str, str], float]:
    return {(one.kind, one.name): one.gpu_seconds for one in usage.totals(shares, at)}


# Tables


def test_a_lease_counts_from_its_granting_until_its_gpu_is_vacated() -> None:
    shares = expanding(a_pool(), START + 10, P1, 3)
    epochs = {one.bundle: one.epoch for one in shares.leases.values()}
    shares = usage.metered(shares, leases.expanded(shares, epochs, START + 12), START + 12)
    drained = leases.draining(shares, list(epochs), START + 20)
    shares = usage.metered(shares, drained, START + 20)
    epochs = {one.bundle: one.epoch for one in shares.leases.values()}
    assert seconds(shares, START + 23) == {("pipeline", "p1"): 13.0, ("idle", ""): 4 * 10 + 3 * 13.0}
    shares = usage.metered(shares, leases.vacated(shares, epochs, START + 25), START + 25)
    assert seconds(shares, START + 100)["pipeline", "p1"] == 15.0


def test_a_gpu_that_a_training_lends_counts_for_it_until_it_has_left() -> None:
    shares = a_pool()
    seated = workers.seated(shares, [Seat("t", "default/t", 1 << 3, True)], START)
    shares = usage.metered(shares, workers.declared(seated, replace(seated.crews["t"], using=1 << 3), START), START)
    key = next(iter(shares.workers))
    shares = usage.metered(shares, workers.leaving(shares, {key: "p1 trains"}, START + 5), START + 5)
    shares = usage.metered(shares, workers.left(shares, "t", 1 << 3, START + 6), START + 6)
    shares = expanding(shares, START + 6, P1, 3)
    found = seconds(shares, START + 10)
    assert (found["training", "default/t"], found["pipeline", "p1"], found["idle", ""]) == (6.0, 4.0, 30.0)


def test_what_a_pipeline_used_outlives_it_and_its_successor_in_another_training_is_another_holder() -> None:
    shares = leases.occupied(a_pool(), P1, Tenant("a", "uid-1", 0))
    shares = expanding(shares, START, P1, 0)
    shares = usage.metered(shares, leases.unregistered(shares, P1), START + 4)
    assert seconds(shares, START + 9)["pipeline", "p1"] == 4.0
    shares = leases.registered(shares, P1, ALL, 1.0)
    shares = leases.occupied(leases.admitted(shares, P1), P1, Tenant("b", "uid-2", 0))
    shares = expanding(shares, START + 10, P1, 0)
    found = [(one.training, one.gpu_seconds) for one in usage.totals(shares, START + 11) if one.kind == "pipeline"]
    assert found == [("uid-1", 4.0), ("uid-2", 1.0)]


def test_the_time_without_a_control_plane_counts_once_for_whoever_held_the_gpu() -> None:
    shares = expanding(a_pool(), START + 1, P1, 0, 1)
    entries = {key: value for key, value in records.changes(Shares(shares.pool), shares, 7.0).items() if value}
    kept = records.read(entries, Shares(shares.pool), "test").shares
    assert kept.usage == shares.usage
    again = usage.begun(leases.detached(leases.shifted(kept, 500.0), 507.0), START + 61)
    assert seconds(again, START + 61) == {("pipeline", "p1"): 120.0, ("idle", ""): 4.0 + 120.0}
    back = usage.metered(again, leases.unregistered(again, P1), START - 1000)  # a clock that was set back
    assert min(seconds(back, START - 1000).values()) >= 0.0


def test_a_journal_that_knows_of_no_usage_is_counted_from_now_on() -> None:
    shares = expanding(a_pool(), START, P1, 0)
    written = records.changes(Shares(shares.pool), shares, 7.0)
    entries = {key: value for key, value in written.items() if value and not key.startswith("usage/")}
    kept = records.read(entries, Shares(shares.pool), "test").shares
    assert kept.usage == {}
    assert seconds(usage.begun(kept, START + 50), START + 60)["pipeline", "p1"] == 10.0


def test_holders_that_are_gone_are_bounded_and_their_sum_is_kept() -> None:
    shares = a_pool()
    gone = {
        f"pipeline/x{at}": Used("pipeline", f"x{at}", gpu_seconds=2.0, since=float(at), at=float(at))
        for at in range(usage.MOST_KEPT + 50)
    }
    shares = expanding(replace(shares, usage={**shares.usage, **gone}), START + 1, P1, 0)
    kept = [one for one in shares.usage.values() if one.kind == "pipeline" and not one.held]
    assert len(kept) == usage.MOST_KEPT + 1
    assert sum(one.gpu_seconds for one in kept) == 2.0 * len(gone)
    assert shares.usage["former/pipeline"].gpu_seconds == 100.0 and "pipeline/x0" not in shares.usage


def test_nothing_is_written_where_nothing_changes_hands() -> None:
    shares = expanding(a_pool(), START, P1, 0)
    epochs = {one.bundle: one.epoch for one in shares.leases.values()}
    after = usage.metered(shares, leases.expanded(shares, epochs, START + 3), START + 3)
    assert after.usage is shares.usage


# Rows beside those of trainings


def test_rows_are_for_those_who_may_see_the_training_and_of_no_training_for_those_who_see_all() -> None:
    used = [
        Used("pipeline", "mine", "uid-1", 10.0, since=START, at=START + 10),
        Used("pipeline", "theirs", "uid-2", 20.0, since=START, at=START + 10),
        Used("pipeline", "free", "", 30.0, since=START, at=START + 10),
        Used("training", "default/t", "uid-1", 99.0, since=START, at=START + 10),
        Used("idle", gpu_seconds=99.0),
    ]
    owners = {"uid-1": ("default", "t")}
    mine = usage.rows(used, owners, START + 20, every=False)
    assert [(one.namespace, one.training, one.pipeline, one.gpu_seconds) for one in mine] == [
        ("default", "t", "mine", 10.0)
    ]
    every = usage.rows(used, owners, START + 20, every=True)
    assert {(one.namespace, one.pipeline) for one in every} == {("default", "mine"), ("", "theirs"), ("", "free")}
    late = usage.rows(used, owners, START + 20, since=START + 5, every=False)
    assert [one.gpu_seconds for one in late] == [5.0]
    assert usage.rows(used, owners, START + 20, since=START + 15, every=True) == []
    summed = usage.added([], every, lambda s: s / 10, by_namespace=True)
    assert [(one.namespace, one.gpu_seconds, one.cost) for one in summed] == [("", 50.0, 5.0), ("default", 10.0, 1.0)]


# Any history


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[float, Shares]]:
    """States that follow one another, with when; what they hold is any of what can be held."""
    shares, at = a_pool(), START
    found = [(at, shares)]
    for _ in range(draw(st.integers(1, 25))):
        at += draw(st.sampled_from([0.0, 0.001, 0.25, 7.0]))
        shares = usage.metered(shares, _next(draw, shares, at), at)
        found.append((at, shares))
        if draw(st.integers(0, 8)) == 0:  # killed and started again
            at += draw(st.sampled_from([0.0, 30.0]))
            entries = {key: one for key, one in records.changes(Shares(shares.pool), shares, at).items() if one}
            kept = records.read(entries, Shares(shares.pool), "test").shares
            shares = usage.begun(leases.attached(leases.attached(kept, P1, at), P2, at), at)
            found.append((at, shares))
    return found


def _next(draw: st.DrawFn, shares: Shares, at: float) -> Shares:
    free = [gpu for gpu in range(shares.pool.gpus) if not used_mask(shares) >> gpu & 1]
    name = draw(st.sampled_from([P1, P2]))
    mine = [one for one in shares.leases.values() if one.bundle.pipeline == name]
    generation = [one for one in mine if one.priority is Priority.GENERATION]
    deed = draw(st.sampled_from(["expand", "drain", "vacate", "train", "release", "seat", "leave", "left", "lose"]))
    if deed == "expand" and free and name in shares.pipelines:
        return leases.expanding(shares, [Bundle(name, "actor_infer", draw(st.sampled_from(free)))], at)
    if deed == "drain":
        going = [one.bundle for one in generation if one.state is not LeaseState.DRAINING]
        return leases.draining(shares, going[:1], at)
    if deed == "vacate":
        return leases.vacated(shares, {one.bundle: one.epoch for one in generation}, at)
    if deed == "train" and {0, 1} <= set(free):
        request = Request(shares.seq + 1, name, "actor_train", Priority.ACTOR_TRAINING, at)
        shares = replace(shares, requests=(*shares.requests, request), seq=request.seq)
        return leases.granted(shares, request.seq, at)
    if deed == "release":
        return leases.released(shares, name, "actor_train", at)
    if deed == "seat" and free:
        gpu = draw(st.sampled_from(free))
        shares = workers.seated(shares, [Seat("t", "default/t", 1 << gpu, True)], at)
        crew = shares.crews["t"]
        return workers.declared(shares, replace(crew, using=crew.using | 1 << gpu), at)
    if deed == "leave":
        return workers.leaving(shares, dict.fromkeys(list(shares.workers)[:1], "somebody needs it"), at)
    if deed == "left":
        return workers.left(shares, "t", shares.pool.mask, at)
    if deed == "lose":
        lost = leases.node_lost(shares, 0, "gone", at)
        return leases.node_back(lost, 0) if shares.lost_gpus else lost
    return shares


@given(histories())
def test_all_sums_together_are_gpus_times_time_and_each_is_what_its_gpus_say(
    history: list[tuple[float, Shares]],
) -> None:
    told: dict[str, float] = {}
    for (at, shares), (until, _) in itertools.pairwise(history):
        holders = _holders(shares)
        assert sorted(holders) == list(range(shares.pool.gpus)), "each GPU has one holder"
        for holder in holders.values():
            told[holder] = told.get(holder, 0.0) + until - at
    end, last = history[-1]
    found = {f"{one.kind} {one.name}".strip(): one.gpu_seconds for one in usage.totals(last, end)}
    assert sum(found.values()) == pytest.approx(last.pool.gpus * (end - START))
    for holder in {*told, *found}:
        assert found.get(holder, 0.0) == pytest.approx(told.get(holder, 0.0)), holder


def _holders(shares: Shares) -> dict[int, str]:
    """GPU by GPU, in another way than it is counted."""
    found: dict[int, str] = {}
    for gpu in range(shares.pool.gpus):
        names = [f"pipeline {bundle.pipeline}" for bundle, one in shares.leases.items() if gpu in gpus_of(one.mask)]
        names += ["training default/t" for one in shares.workers.values() if gpu in gpus_of(one.mask)]
        names += ["lost"] if gpu in shares.lost_gpus and not names else []
        assert len(names) <= 1, f"GPU {gpu} has {names}"
        found[gpu] = names[0] if names else "idle"
    return found

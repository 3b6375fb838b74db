"""Is demand counted once, kept while it lasts, and refused when it could never be met?"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.core.sharing import demand, leases
from muster.core.sharing.demand import Wish
from muster.errors import PipelineQuarantined, RequestRefused, WouldDeadlock
from muster.types.sharing import (
    Bundle,
    ClusterSpec,
    PipelineId,
    Pool,
    Priority,
    ProgressReport,
    Shares,
)

P1, P2, P3 = PipelineId("p1"), PipelineId("p2"), PipelineId("p3")
GENERATE = Wish(P1, "actor_infer", Priority.GENERATION, 8)


def pipelines(**clusters: dict[str, list[int]]) -> Shares:
    """Pipelines with these clusters; each generates on the last GPU unless it says otherwise."""
    shares = Shares(Pool(gpus=6, gpus_per_node=6))
    for name, maps in clusters.items():
        specs = {cluster: ClusterSpec(gpus) for cluster, gpus in ({"actor_infer": [5]} | maps).items()}
        shares = leases.admitted(leases.registered(shares, PipelineId(name), specs, 1.0), PipelineId(name))
    return shares


def granted(shares: Shares, name: str, cluster: str) -> Shares:
    asked = demand.requested(shares, Wish(PipelineId(name), cluster, Priority.ACTOR_TRAINING), 1.0)
    assert asked.request is not None
    return leases.granted(asked.shares, asked.request.seq, 2.0)


def waiting(shares: Shares, name: str, cluster: str) -> Shares:
    return demand.requested(shares, Wish(PipelineId(name), cluster, Priority.ACTOR_TRAINING), 3.0).shares


def holding(shares: Shares) -> Shares:
    shares = leases.expanding(shares, [Bundle(P1, "actor_infer", 0)], 4.0)
    return leases.expanded(shares, {bundle: lease.epoch for bundle, lease in shares.leases.items()}, 4.0)


def test_a_rollout_is_open_from_its_request_and_does_not_end_with_the_grant() -> None:
    asked = demand.requested(pipelines(p1={}), GENERATE, 3.0)
    assert asked.request is not None and asked.request.opened
    assert (asked.shares.rollouts[P1].remaining, asked.shares.rollouts[P1].waiting_since) == (8, 3.0)
    held = demand.answered(holding(asked.shares), asked.request.seq)
    assert (held.requests, held.rollouts[P1].remaining, held.rollouts[P1].waiting_since) == ((), 8, None)
    assert P1 not in demand.cleared(held, P1).rollouts


def test_an_estimate_starts_a_new_step_and_drops_earlier_streams() -> None:
    shares = holding(demand.requested(pipelines(p1={}), GENERATE, 3.0).shares)
    shares = replace(shares, requests=())
    shares, _ = demand.reported(shares, ProgressReport("p1", 3, 8, "a"), 5.0)
    kept = demand.requested(shares, replace(GENERATE, estimate=None), 6.0)
    assert (kept.request, kept.gpus, kept.shares.rollouts[P1].remaining) == (None, (5,), 5)
    new = demand.requested(shares, replace(GENERATE, estimate=20), 6.0)
    assert (new.request, new.shares.rollouts[P1].streams, new.shares.rollouts[P1].remaining) == (None, {}, 20)


@given(reports=st.lists(st.tuples(st.sampled_from(["", "a", "b"]), st.integers(0, 12), st.integers(0, 10)), max_size=9))
def test_the_latest_report_of_each_stream_counts_and_streams_add_up(reports: list[tuple[str, int, int]]) -> None:
    shares = demand.requested(pipelines(p1={}), GENERATE, 3.0).shares
    latest = {}
    for at, (stream, completed, target) in enumerate(reports):
        shares, uncounted = demand.reported(shares, ProgressReport("p1", completed, target, stream or None), float(at))
        assert uncounted == ""
        latest[stream] = max(0, target - completed)
    assert shares.rollouts[P1].remaining == (sum(latest.values()) if reports else 8)


@pytest.mark.parametrize("opened_id", [None, "r2"])
def test_a_report_for_the_rollout_before_is_not_counted(opened_id: str | None) -> None:
    shares = demand.requested(pipelines(p1={}), replace(GENERATE, rollout_id="r1"), 3.0).shares
    shares = demand.requested(demand.cleared(shares, P1), replace(GENERATE, rollout_id=opened_id), 4.0).shares
    after, uncounted = demand.reported(shares, ProgressReport("p1", 8, 8, rollout_id="r1"), 5.0)
    assert after is shares
    assert "r1" in uncounted
    after, uncounted = demand.reported(shares, ProgressReport("p1", 1, 8, rollout_id="r2"), 5.0)
    assert (uncounted, after.rollouts[P1].remaining) == ("", 7)


@pytest.mark.parametrize("touched", ["nothing", "reported", "not opened by it"])
def test_a_withdrawn_request_closes_only_what_nobody_else_spoke_of(touched: str) -> None:
    shares = pipelines(p1={})
    if touched == "not opened by it":
        shares = replace(demand.requested(shares, GENERATE, 2.0).shares, requests=())
    shares = demand.requested(shares, GENERATE, 3.0).shares
    if touched == "reported":
        shares, _ = demand.reported(shares, ProgressReport("p1", 0, 8), 4.0)
    after = demand.withdrawn(shares, shares.requests[0].seq)
    assert after.requests == ()
    assert (P1 in after.rollouts) == (touched != "nothing")


def test_a_lost_waiter_takes_its_place_again_by_the_same_wish_and_loses_it_by_another() -> None:
    shares = demand.requested(pipelines(p1={}), GENERATE, 3.0).shares
    with pytest.raises(RequestRefused, match="pending"):
        demand.requested(shares, GENERATE, 9.0)
    again = demand.requested(shares, GENERATE, 9.0, orphans={1})
    assert (again.shares, again.request) == (shares, shares.requests[0])
    other = demand.requested(shares, replace(GENERATE, estimate=9), 9.0, orphans={1})
    assert [(one.seq, one.since) for one in other.shares.requests] == [(2, 9.0)]


def test_a_cycle_over_three_pipelines_is_refused_and_told() -> None:
    shares = pipelines(
        p1={"actor_train": [0], "critic": [1]},
        p2={"actor_train": [1], "critic": [2]},
        p3={"actor_train": [2], "critic": [0]},
    )
    for name in ("p1", "p2", "p3"):
        shares = granted(shares, name, "actor_train")
    shares = waiting(waiting(shares, "p1", "critic"), "p2", "critic")
    with pytest.raises(WouldDeadlock) as caught:
        waiting(shares, "p3", "critic")
    assert "p3 waits for GPU 0, held by p1/actor_train; p1 waits for GPU 1, held by p2/actor_train" in str(caught.value)


def test_a_pipeline_does_not_wait_for_itself() -> None:
    shares = granted(pipelines(p1={"actor_train": [0, 1], "critic": [1, 2]}), "p1", "actor_train")
    with pytest.raises(WouldDeadlock, match="p1 waits for GPU 1, held by p1/actor_train"):
        waiting(shares, "p1", "critic")


def test_waiting_in_line_is_no_cycle() -> None:
    shares = pipelines(p1={"actor_train": [0]}, p2={"actor_train": [0], "critic": [1]}, p3={"actor_train": [1]})
    shares = granted(granted(shares, "p1", "actor_train"), "p3", "actor_train")
    shares = waiting(waiting(shares, "p2", "actor_train"), "p2", "critic")
    assert demand.deadlocked(shares, P2) is None


def test_a_grant_that_closes_a_cycle_names_the_wait_that_must_end() -> None:
    shares = pipelines(
        p1={"actor_train": [0], "critic": [1]}, p2={"actor_train": [1], "critic": [0]}, p3={"actor_train": [0]}
    )
    shares = granted(granted(shares, "p3", "actor_train"), "p2", "actor_train")
    shares = waiting(waiting(waiting(shares, "p1", "actor_train"), "p1", "critic"), "p2", "critic")
    shares = leases.released(shares, P3, "actor_train", 4.0)
    shares = leases.granted(shares, shares.requests[0].seq, 5.0)
    found = demand.deadlocked(shares, P1)
    assert found is not None
    assert (found[0].pipeline, found[0].cluster) == (P1, "critic")


def test_a_quarantined_pipeline_is_refused_at_once() -> None:
    with pytest.raises(PipelineQuarantined, match="silent"):
        demand.requested(leases.quarantined(pipelines(p1={}), P1, "silent"), GENERATE, 3.0)


def test_generation_that_is_done_is_not_waited_for() -> None:
    shares = replace(demand.requested(pipelines(p1={}), GENERATE, 3.0).shares, requests=())
    shares, _ = demand.reported(shares, ProgressReport("p1", 8, 8), 4.0)
    with pytest.raises(RequestRefused, match="nothing left"):
        demand.requested(shares, replace(GENERATE, estimate=None), 5.0)

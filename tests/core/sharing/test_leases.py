"""Do leases keep every GPU in one place, whatever happens in whatever order?"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from muster.core.sharing import demand, leases
from muster.errors import AlreadyExists, InvalidRequest, MusterError, PipelineQuarantined, RequestRefused
from muster.types.sharing import (
    Bundle,
    ClusterSpec,
    LeaseState,
    PipelineId,
    Pool,
    Priority,
    ProgressReport,
    Shares,
)
from tests.core.sharing.invariants import broken

POOL = Pool(gpus=4, gpus_per_node=2)
P1, P2 = PipelineId("p1"), PipelineId("p2")
FOUR = {"actor_train": ClusterSpec([0, 1]), "actor_infer": ClusterSpec([0, 1, 2, 3])}
PAIRS = {"actor_train": ClusterSpec([1, 2]), "actor_infer": ClusterSpec([0, 1, 2, 3], tp_size=2)}


def two_pipelines() -> Shares:
    shares = leases.registered(leases.registered(Shares(POOL), P1, FOUR, 1.0), P2, PAIRS, 1.0)
    return leases.admitted(leases.admitted(shares, P1), P2)


def bundles(*ranks: int, pipeline: PipelineId = P1) -> list[Bundle]:
    return [Bundle(pipeline, "actor_infer", rank) for rank in ranks]


def epochs(shares: Shares, *ranks: int) -> dict[Bundle, int]:
    return {bundle: shares.leases[bundle].epoch for bundle in bundles(*ranks)}


def holding(*ranks: int) -> Shares:
    shares = leases.expanding(two_pipelines(), bundles(*ranks), 1.0)
    return leases.expanded(shares, epochs(shares, *ranks), 2.0)


def states(shares: Shares) -> dict[str, str]:
    return {str(bundle): lease.state.value for bundle, lease in shares.leases.items()}


def test_a_lease_goes_from_free_to_held_and_back_with_a_new_epoch_each_way() -> None:
    granting = leases.expanding(two_pipelines(), bundles(0), 1.0, {"p1/actor_infer[0]": "it is idle"})
    (lease,) = granting.leases.values()
    assert (lease.state, lease.epoch, lease.reason, lease.mask) == (LeaseState.GRANTING, 1, "it is idle", 1)
    held = leases.expanded(granting, {lease.bundle: 1}, 2.0)
    assert (held.leases[lease.bundle].state, held.leases[lease.bundle].held_since) == (LeaseState.HELD, 2.0)
    draining = leases.draining(held, [lease.bundle], 3.0)
    assert (draining.leases[lease.bundle].state, draining.leases[lease.bundle].epoch) == (LeaseState.DRAINING, 2)
    assert leases.vacated(draining, {lease.bundle: 2}, 4.0).leases == {}


def test_a_reply_of_an_older_epoch_changes_nothing() -> None:
    granting = leases.expanding(two_pipelines(), bundles(0), 1.0)
    old = epochs(granting, 0)
    draining = leases.draining(granting, bundles(0), 2.0)
    assert leases.expanded(draining, old, 3.0) is draining
    assert leases.vacated(draining, old, 3.0) is draining
    gone = leases.vacated(draining, epochs(draining, 0), 3.0)
    again = leases.expanding(gone, bundles(0), 4.0)
    assert leases.expanded(again, old, 5.0) is again


def test_a_gpu_that_is_not_free_is_not_given() -> None:
    with pytest.raises(RequestRefused, match="GPU 1"):
        leases.expanding(holding(1), bundles(0, pipeline=P2), 3.0)
    lost = leases.node_lost(two_pipelines(), 1, "node-lost", 1.0)
    with pytest.raises(RequestRefused, match="GPU 2"):
        leases.expanding(lost, bundles(2), 3.0)


def test_a_fixed_lease_is_not_drained() -> None:
    asked = demand.requested(two_pipelines(), demand.Wish(P1, "actor_train", Priority.ACTOR_TRAINING), 1.0)
    held = leases.granted(asked.shares, 1, 2.0)
    assert held.requests == ()
    with pytest.raises(RequestRefused, match="ACTOR_TRAINING"):
        leases.draining(held, [Bundle(P1, "actor_train", 0)], 3.0)


def test_a_release_frees_what_is_held_and_drains_what_was_called_for() -> None:
    shares = leases.expanding(holding(0, 1), bundles(2, 3), 3.0)
    after = leases.released(shares, P1, "actor_infer", 4.0, dispatched=bundles(2))
    assert states(after) == {"p1/actor_infer[2]": "draining"}
    assert after.leases[bundles(2)[0]].epoch > shares.leases[bundles(2)[0]].epoch


def test_awaiting_a_release_drains_all_but_what_was_not_called_for() -> None:
    shares = leases.expanding(holding(0, 1), bundles(2, 3), 3.0)
    shares = leases.draining(shares, bundles(1), 3.5)
    after = leases.suspended(shares, P1, 4.0, dispatched=bundles(2))
    assert states(after) == {f"p1/actor_infer[{rank}]": "draining" for rank in (0, 1, 2)}
    detached = leases.suspended(leases.detached(shares, 3.9), P1, 4.0)
    assert len(detached.leases) == 4, "after a restart nobody knows what was called for"


def test_what_was_being_granted_at_a_restart_is_drained_on_attaching() -> None:
    shares = leases.detached(leases.expanding(holding(0), bundles(1), 3.0), 4.0)
    after = leases.attached(shares, P1, 5.0)
    assert states(after) == {"p1/actor_infer[0]": "held", "p1/actor_infer[1]": "draining"}
    assert (after.pipelines[P1].movable, after.pipelines[P2].movable) == (True, False)


def test_a_quarantine_freezes_leases_and_keeps_demand_and_ends_with_nothing_held() -> None:
    shares = demand.requested(holding(0), demand.Wish(P1, "actor_infer", Priority.GENERATION, 8), 3.0).shares
    frozen = leases.quarantined(shares, P1, "silent")
    assert (frozen.leases, frozen.rollouts[P1].remaining) == (shares.leases, 8)
    with pytest.raises(PipelineQuarantined, match="silent"):
        leases.released(frozen, P1, "actor_infer", 4.0)
    back = leases.reinstated(frozen, P1, 5.0)
    assert (back.leases, back.pipelines[P1].quarantined, back.rollouts[P1].waiting_since) == ({}, "", 5.0)


def test_registering_validates_before_it_stores() -> None:
    shares = two_pipelines()
    assert leases.registered(shares, P1, FOUR, 1.0) is shares
    with pytest.raises(AlreadyExists):
        leases.registered(shares, P1, PAIRS, 1.0)
    with pytest.raises(InvalidRequest) as caught:
        leases.registered(shares, PipelineId("p3"), {"actor_infer": ClusterSpec([9])}, -1.0)
    assert [problem.field for problem in caught.value.problems] == ["weight", "clusters.actor_infer"]


def test_hook_times_are_a_moving_average() -> None:
    shares = leases.measured(leases.measured(two_pipelines(), P1, shrink_s=4.0), P1, shrink_s=2.0)
    assert (shares.pipelines[P1].shrink_s, shares.pipelines[P1].expand_s) == (3.0, None)


@given(by=st.floats(-1e6, 1e6))
def test_a_shift_of_the_clock_changes_times_only(by: float) -> None:
    shares = demand.requested(holding(0), demand.Wish(P1, "actor_infer", Priority.GENERATION, 8), 3.0).shares
    there = leases.shifted(shares, by)
    assert [lease.since - by for lease in there.leases.values()] == pytest.approx([2.0])
    assert states(there) == states(shares)
    assert replace(there, leases={}, requests=(), rollouts={}) == replace(shares, leases={}, requests=(), rollouts={})


class Leasing(RuleBasedStateMachine):
    """Random transitions: those that are refused change nothing, the others keep every GPU in one place."""

    clock = 0.0

    @initialize()
    def begin(self) -> None:
        self.shares = two_pipelines()
        self.seen = 0

    def step(self, change: object) -> None:
        before = self.shares
        try:
            self.shares = change()  # type: ignore[operator]
        except MusterError:
            assert self.shares is before
        self.clock += 1.0

    @rule(pipeline=st.sampled_from([P1, P2]), rank=st.integers(0, 1))
    def expand(self, pipeline: PipelineId, rank: int) -> None:
        self.step(lambda: leases.expanding(self.shares, bundles(rank, pipeline=pipeline), self.clock))

    @rule(pipeline=st.sampled_from([P1, P2]), rank=st.integers(0, 1))
    def drain(self, pipeline: PipelineId, rank: int) -> None:
        self.step(lambda: leases.draining(self.shares, bundles(rank, pipeline=pipeline), self.clock))

    @rule(stale=st.integers(0, 2), up=st.booleans())
    def reply(self, stale: int, up: bool) -> None:
        told = {bundle: lease.epoch - stale for bundle, lease in self.shares.leases.items()}
        replied = leases.expanded if up else leases.vacated
        before = self.shares
        self.step(lambda: replied(self.shares, told, self.clock))
        if stale:
            assert self.shares is before

    @rule(pipeline=st.sampled_from([P1, P2]), estimate=st.none() | st.integers(1, 9))
    def generate(self, pipeline: PipelineId, estimate: int | None) -> None:
        wish = demand.Wish(pipeline, "actor_infer", Priority.GENERATION, estimate)
        self.step(lambda: demand.requested(self.shares, wish, self.clock).shares)

    @rule(pipeline=st.sampled_from([P1, P2]))
    def train(self, pipeline: PipelineId) -> None:
        wish = demand.Wish(pipeline, "actor_train", Priority.ACTOR_TRAINING)
        self.step(lambda: demand.requested(self.shares, wish, self.clock).shares)

    @rule()
    def grant(self) -> None:
        for request in self.shares.requests:
            self.step(lambda seq=request.seq: leases.granted(self.shares, seq, self.clock))

    @rule(pipeline=st.sampled_from([P1, P2]), done=st.integers(0, 9))
    def report(self, pipeline: PipelineId, done: int) -> None:
        self.step(lambda: demand.reported(self.shares, ProgressReport(pipeline, done, 8), self.clock)[0])

    @rule(pipeline=st.sampled_from([P1, P2]), cluster=st.sampled_from(["actor_train", "actor_infer"]))
    def release(self, pipeline: PipelineId, cluster: str) -> None:
        self.step(lambda: leases.released(self.shares, pipeline, cluster, self.clock))
        assert pipeline not in self.shares.rollouts or cluster == "actor_train"

    @rule(pipeline=st.sampled_from([P1, P2]))
    def suspend(self, pipeline: PipelineId) -> None:
        self.step(lambda: leases.suspended(self.shares, pipeline, self.clock))
        assert pipeline not in self.shares.rollouts

    @invariant()
    def every_gpu_is_in_one_place(self) -> None:
        if not hasattr(self, "shares"):
            return
        assert broken(self.shares) == []
        used = [gpu for lease in self.shares.leases.values() for gpu in range(4) if lease.mask >> gpu & 1]
        assert sorted([*used, *leases.free_gpus(self.shares)]) == [0, 1, 2, 3]
        assert self.shares.epoch >= self.seen
        self.seen = self.shares.epoch

    @invariant()
    def waiting_is_told_from_holding(self) -> None:
        if not hasattr(self, "shares"):
            return
        for name, rollout in self.shares.rollouts.items():
            found = demand.leases_of(self.shares, name, "actor_infer")
            has = any(lease.state is not LeaseState.DRAINING for lease in found)
            assert (rollout.waiting_since is None) == (has or rollout.remaining == 0)


TestLeasing = Leasing.TestCase
TestLeasing.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)

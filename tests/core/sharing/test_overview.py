"""What do people see of a pool, and of GPUs that a training has lent?"""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from muster.core.sharing import leases, overview
from muster.core.sharing.plans import Standing
from muster.types.sharing import ClusterSpec, LeaseState, PipelineId, Rollout, Shares, WorkerLease
from tests.core.sharing.pools import NOW, a_crew, a_lease, a_pipeline, a_request, a_state, crewed, fixed_leases

SHOWN = datetime(2026, 1, 1, tzinfo=UTC)
MOMENT = overview.Moment(NOW, SHOWN)
P2 = a_pipeline("p2", ClusterSpec(range(8)), actor_train=ClusterSpec([6, 7]))


def lending(*held: int, parked: int = 0, **crew: object) -> Shares:
    """p2 generates on GPU 5 since 12 s; a training has workers on others and waits for some."""
    shares = a_state(8, [P2], leases=[a_lease(P2, 5, held_since=NOW - 12)])
    made = a_crew("t", 1, 4, 4, "lend", **crew)
    shares = crewed(shares, made, *held, since=NOW - 60)
    return replace(shares, crews={"t": replace(shares.crews["t"], parked=parked)})


def generating(shares: Shares, remaining: int, rate: float | None) -> Shares:
    return replace(shares, rollouts={PipelineId("p2"): Rollout(remaining, rate=rate)})


# When it comes back


def test_an_estimate_is_what_remains_at_the_rate_of_all_bundles_that_are_held() -> None:
    shares = generating(lending(0, 1, 2, parked=1 << 5), 60, 2.0)
    told = "GPU 5 is with p2's generation since 12 s, comes back in about 30 s"
    assert overview.returning(shares, "t", NOW) == told
    more = replace(shares, leases={**shares.leases, **{one.bundle: one for one in [a_lease(P2, 4)]}})
    assert overview.returning(more, "t", NOW).endswith("in about 15 s")
    slow = generating(shares, 6000, 2.0)
    assert overview.returning(slow, "t", NOW).endswith("in about 50 min")


@pytest.mark.parametrize("rate", [None, 0.0])
def test_nothing_is_estimated_that_nobody_has_measured(rate: float | None) -> None:
    shares = generating(lending(0, parked=1 << 5), 60, rate)
    assert overview.returning(shares, "t", NOW).endswith("since 12 s, comes back when it is done")
    closed = replace(shares, rollouts={})
    assert overview.returning(closed, "t", NOW).endswith("comes back when it is done")


def test_a_training_stage_comes_back_when_it_is_done_and_gpus_of_one_holder_are_told_together() -> None:
    held = [replace(one, held_since=NOW - 3) for one in fixed_leases(P2, "actor_train")]
    shares = lending(0, 1, parked=1 << 6 | 1 << 7)
    shares = replace(shares, leases={one.bundle: one for one in held})
    assert overview.returning(shares, "t", NOW) == (
        "GPUs 6 and 7 are with p2's actor_train since 3 s, come back when it is done"
    )


def test_what_is_not_simply_with_somebody_is_told_as_it_is() -> None:
    shares = lending(0, parked=1 << 5)
    frozen = leases.quarantined(shares, PipelineId("p2"), "silent")
    assert "which is quarantined" in overview.returning(frozen, "t", NOW)
    going = leases.draining(shares, list(shares.leases), NOW)
    assert overview.returning(going, "t", NOW).endswith("which is leaving it")
    assert overview.returning(replace(shares, leases={}), "t", NOW) == "GPU 5 is free, and on its way back"
    other = crewed(replace(shares, leases={}), a_crew("u", 1, 1), 5, since=NOW - 7)
    told = "GPU 5 is with training default/u since 7 s, comes back when it is done"
    assert overview.returning(other, "t", NOW) == told
    assert overview.returning(shares, "nobody", NOW) == ""
    assert overview.returning(lending(0, 1, 2, 3), "t", NOW) == ""
    fixed = replace(shares, crews={"t": replace(shares.crews["t"], elasticity="fixed")})
    assert overview.returning(fixed, "t", NOW) == ""


def test_very_many_holders_are_counted() -> None:
    names = [a_pipeline(f"p{at}", ClusterSpec(range(8))) for at in range(8)]
    shares = a_state(8, names, leases=[a_lease(one, rank) for rank, one in enumerate(names)])
    shares = crewed(shares, a_crew("t", 0, 8, 8, "lend"))
    shares = replace(shares, crews={"t": replace(shares.crews["t"], parked=0xFF)})
    assert overview.returning(shares, "t", NOW).endswith("; 5 more are elsewhere")


# Every GPU


def test_every_gpu_is_told_with_its_holder_and_since_when() -> None:
    shares = lending(0, 1, parked=1 << 5)
    leaving = WorkerLease("t", 1 << 2, LeaseState.DRAINING, NOW - 1, NOW - 50, "p2 trains" + "!" * 500)
    shares = replace(
        shares,
        workers={**shares.workers, leaving.key: leaving},
        lost_gpus={7: "node-lost"},
        vacant_since={3: NOW - 9},
    )
    names = {0: "t-0", 1: "t-1", 5: "t-5"}
    found = overview.gpus(shares, [f"dev{gpu}" for gpu in range(7)], lambda uid: names, MOMENT)

    assert [one.gpu for one in found] == list(range(8))
    assert [one.state for one in found] == ["held", "held", "draining", "idle", "idle", "held", "idle", "lost"]
    assert (found[0].training, found[0].worker, found[0].seconds, found[0].device) == ("default/t", "t-0", 60.0, "dev0")
    assert found[0].since == SHOWN - timedelta(seconds=60)
    assert found[2].worker is None and len(found[2].reason) == 300
    assert (found[3].seconds, found[4].seconds) == (9.0, None)
    five = found[5]
    assert (five.pipeline, five.cluster, five.rank, five.seconds) == ("p2", "actor_infer", 5, 12.0)
    assert (five.lent_by, five.lent_worker) == ("default/t", "t-5")
    assert (found[7].reason, found[7].device) == ("node-lost", "")


def test_pipelines_wait_in_order_and_trainings_below_their_minimum_before_others() -> None:
    shares = lending(0, 1, parked=1 << 5)
    shares = crewed(shares, a_crew("young", 4, 4, created=2.0, asked_at=NOW - 20))
    shares = crewed(shares, a_crew("whole", 0, 0))
    shares = replace(shares, requests=(a_request(3, "p2", "actor_train", since=NOW - 5),))
    standings = {
        "t": Standing(True, "Lent", "GPU 5 is with p2's generation"),
        "young": Standing(False, "Queued", "needs 4 GPUs"),
        "whole": Standing(True, "Admitted", "it has all"),
    }
    found = overview.waiting(shares, {3: "waits for t"}, standings, MOMENT)
    assert [(one.pipeline or one.training, one.state, one.seconds) for one in found] == [
        ("p2", None, 5.0),
        ("default/young", "Queued", 20.0),
        ("default/t", "Lent", None),
    ]
    assert [(one.workers, one.wanted) for one in found[1:]] == [(0, 4), (2, 4)]
    assert (found[0].cluster, found[0].priority, found[0].reason) == ("actor_train", "ACTOR_TRAINING", "waits for t")

"""The lease of a worker whose renewals reach a coordinator that does not answer, on virtual time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from muster.core.member.standing import MemberLease

LEASE_S = 1.5

steps = st.lists(st.tuples(st.floats(0.01, 5.0), st.sampled_from(["renew", "read", "nothing"])), max_size=60)


@given(steps)
def test_a_worker_never_runs_beyond_the_moment_at_which_the_coordinator_gives_it_up(
    steps: list[tuple[float, str]],
) -> None:
    """Either side may stand still for any time. The coordinator reads all that has come before it gives a worker up."""
    now, heard, unread, given_up = 0.0, 0.0, False, False
    lease = MemberLease(0.0)
    for passed_s, event in steps:
        now += passed_s
        if event == "renew":
            unread = True  # in the coordinator's kernel
            if not given_up:  # else the connection is closed, and nothing is delivered
                lease.delivered(now, LEASE_S)
        elif event == "read":  # the coordinator runs
            heard = now if unread else heard
            unread = False
            given_up = given_up or now > heard + LEASE_S
        if given_up:
            assert now > lease.over_at(LEASE_S)


def test_a_worker_that_stood_still_for_a_lease_itself_waits_for_an_answer() -> None:
    lease = MemberLease(10.0)
    lease.delivered(10.0 + 2 * LEASE_S, LEASE_S)
    assert lease.over_at(LEASE_S) == 10.0 + LEASE_S


def test_renewals_without_a_gap_prolong_the_lease_for_as_long_as_the_coordinator_stands_still() -> None:
    lease = MemberLease(0.0)
    for tick in range(1, 1000):
        lease.delivered(tick * 0.5, LEASE_S)
    assert lease.over_at(LEASE_S) == 999 * 0.5 + LEASE_S

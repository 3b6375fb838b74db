"""What does a member do when its lease is old? Frame by frame; what many of them do together is told by histories."""

from __future__ import annotations

from muster.core.member.orders import Drop, Exit, Order, Renew, StartRanks, StopRanks
from muster.core.member.state import MemberState
from muster.types.frames import RecallFrame, ReleaseFrame, RenewedFrame, RunRecord, WelcomeFrame
from muster.types.world import RunId, Settings
from tests.core.builders import a_seat, an_id

LEASE_S = 2.0
SETTINGS = Settings(lease_s=LEASE_S)
SLOW_S = LEASE_S + 0.5  # how long a welcome takes on a machine that is very busy


def a_member() -> MemberState:
    return MemberState(an_id("a"), RunId("run"), SETTINGS, 0.0)


def a_release(number: int = 0) -> ReleaseFrame:
    seat = a_seat(0, "a")
    return ReleaseFrame(record=RunRecord(SETTINGS, 1, 0, round=number, seats=(seat,), store=("127.0.0.1", 1)))


def kinds(orders: list[Order]) -> list[type]:
    return [type(one) for one in orders if isinstance(one, Drop | Renew | StartRanks | StopRanks)]


def welcomed(member: MemberState, after_s: float) -> list[Order]:
    member.hello(0.0)
    return [*member.heard(WelcomeFrame(), after_s), *member.tick(after_s)]


def test_a_fresh_lease_starts_ranks_at_once() -> None:
    member = a_member()
    welcomed(member, 0.1)
    assert kinds(member.heard(a_release(), 0.2)) == [StartRanks]


def test_who_was_let_in_late_renews_and_is_not_given_up_by_himself() -> None:
    member = a_member()
    assert kinds(welcomed(member, SLOW_S)) == [Renew]
    assert kinds(member.tick(SLOW_S + 0.1)) == []


def test_a_release_that_is_read_late_starts_when_the_lease_is_renewed() -> None:
    member = a_member()
    welcomed(member, SLOW_S)
    assert kinds([*member.heard(a_release(), SLOW_S), *member.tick(SLOW_S)]) == [Renew]
    assert kinds(member.heard(RenewedFrame(), SLOW_S + 0.1)) == [StartRanks]
    assert kinds(member.heard(RenewedFrame(), SLOW_S + 0.2)) == []


def test_a_release_that_is_read_late_and_was_called_back_starts_nothing() -> None:
    member = a_member()
    welcomed(member, SLOW_S)
    member.heard(a_release(), SLOW_S)
    member.heard(RecallFrame(round=0), SLOW_S)
    assert kinds(member.heard(RenewedFrame(), SLOW_S + 0.1)) == []
    assert kinds(member.heard(a_release(1), SLOW_S + 0.2)) == [StartRanks]


def test_a_release_of_a_connection_that_has_ended_starts_nothing() -> None:
    member = a_member()
    welcomed(member, SLOW_S)
    member.heard(a_release(), SLOW_S)
    member.down("cut", SLOW_S + 0.1)
    member.hello(SLOW_S + 0.2)
    member.heard(WelcomeFrame(), SLOW_S + 0.3)
    assert kinds(member.heard(RenewedFrame(), SLOW_S + 0.4)) == []


def test_ranks_end_when_the_lease_is_over_whoever_answers_then() -> None:
    member = a_member()
    welcomed(member, 0.1)
    member.heard(a_release(), 0.2)
    member.down("cut", 0.3)
    member.hello(0.4)
    assert StopRanks in kinds([*member.heard(WelcomeFrame(), 0.4 + SLOW_S), *member.tick(0.4 + SLOW_S)])


def test_a_coordinator_that_never_answers_is_dropped() -> None:
    member = a_member()
    welcomed(member, 0.1)
    at = 0.1
    dropped: list[type] = []
    while not dropped and at < 2 * LEASE_S:
        at += 0.1
        dropped = [kind for kind in kinds(member.tick(at)) if kind is Drop]
    assert dropped and LEASE_S <= at < LEASE_S + 0.5


def test_a_release_that_waited_is_forgotten_with_its_connection() -> None:
    member = a_member()
    welcomed(member, SLOW_S)
    member.heard(a_release(), SLOW_S)
    member.down("cut", SLOW_S + 0.1)
    member.hello(SLOW_S + 0.2)
    member.heard(WelcomeFrame(), SLOW_S + 0.3)
    assert kinds(member.heard(a_release(), SLOW_S + 0.31)) == [StartRanks]
    assert kinds(member.heard(a_release(1), SLOW_S + 0.32)) == [StopRanks]
    assert kinds(member.heard(RenewedFrame(), SLOW_S + 0.4)) == [], "round 0 is still being ended"


def test_a_coordinator_that_is_found_dead_after_a_standstill_was_dead_before_it_at_the_earliest() -> None:
    member = a_member()
    welcomed(member, 0.1)
    member.heard(a_release(), 0.2)
    member.tick(1.9)  # the timer comes first, then what lay in the socket
    member.found_dead(1.9)
    assert member.at.lease.over_at(LEASE_S) <= 0.2 + LEASE_S
    member.tick(2.0)
    member.found_dead(2.05)
    assert member.at.lease.over_at(LEASE_S) > 0.2 + LEASE_S


def lost(member: MemberState, now: float) -> list[Order]:
    """The coordinator closes the connection and never answers again."""
    return member.down("refused", now)


def ends_at(member: MemberState) -> tuple[float, Exit]:
    """Return when and how the member gives up, driven only by its own timers."""
    now = member.wake_at
    while member.ended is None:
        assert now < 10_000.0, "it never gives up"
        member.tick(now)
        now = max(member.wake_at, now + 0.01)
    return now, member.ended


def test_a_worker_without_a_rank_gives_up_the_coordinator_after_a_lease_and_a_minute() -> None:
    member = a_member()
    welcomed(member, 0.1)
    lost(member, 10.0)
    gave_up_at, end = ends_at(member)
    assert 0 <= gave_up_at - (10.0 + LEASE_S + 60.0) < 1.0
    assert (end.code, end.why) == (75, "the coordinator was lost (refused); gave up after 62 s, for no rank runs here")


def test_a_worker_with_a_rank_searches_for_an_hour() -> None:
    member = a_member()
    welcomed(member, 0.1)
    member.heard(a_release(), 0.2)
    lost(member, 10.0)
    gave_up_at, end = ends_at(member)
    assert gave_up_at >= 10.0 + SETTINGS.orphan_s
    assert end.why == "the coordinator was lost (refused); gave up after 3600 s"


def test_so_does_one_whose_ranks_silence_has_ended() -> None:
    """The round may go on from the state in its memory."""
    member = a_member()
    welcomed(member, 0.1)
    member.heard(a_release(), 0.2)
    orders = member.tick(0.2 + LEASE_S)
    assert StopRanks in kinds(orders)
    member.held.cleared(0, 3.0)
    lost(member, 10.0)
    assert ends_at(member)[0] >= 10.0 + SETTINGS.orphan_s


def test_a_successor_that_is_found_in_time_keeps_the_spare() -> None:
    member = a_member()
    welcomed(member, 0.1)
    lost(member, 10.0)
    member.tick(60.0)
    member.hello(61.0)
    member.heard(WelcomeFrame(), 61.1)
    member.tick(61.2)
    assert member.ended is None
    lost(member, 70.0)
    assert ends_at(member)[0] >= 70.0 + LEASE_S + 60.0, "the search begins again with each loss"


def test_a_spare_does_not_search_longer_than_ranks_would_go_on() -> None:
    settings = Settings(lease_s=LEASE_S, orphan_s=1.0)
    member = MemberState(an_id("a"), RunId("run"), settings, 0.0)
    welcomed(member, 0.1)
    lost(member, 10.0)
    assert 11.0 <= ends_at(member)[0] < 12.0

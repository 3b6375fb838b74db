"""What reports do to the run, one by one and in any order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given as hypothesis_given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from muster.core.world import transitions
from muster.core.world.closing import still_there
from muster.core.world.decisions import carry_out, decide
from muster.core.world.run import Decision, Release, Run, Stay
from muster.core.world.transitions import Held, Refusal
from muster.types.bench import Bench
from muster.types.world import (
    NEVER_S,
    Cause,
    OutcomeState,
    Progress,
    RanksState,
    Role,
    Round,
    RunOutcome,
    Settings,
    Spot,
)
from tests.core.builders import NOW, a_member, a_round, a_run, an_exit, an_id, recalled, settle, with_members


def entered(answer: Run | Refusal | Held) -> Run:
    assert isinstance(answer, Run), answer
    return answer


def the_round(given: Run) -> Round:
    assert given.round is not None
    return given.round


def test_only_the_worker_of_rank_0_says_what_was_measured_and_only_once() -> None:
    given, first, second = a_run("a b", max=2), Bench(via="gloo"), Bench(via="nccl")
    number = the_round(given).number
    assert transitions.measured(given, an_id("b"), number, first).bench is None
    assert transitions.measured(given, an_id("a"), number + 1, first).bench is None
    told = transitions.measured(given, an_id("a"), number, first)
    assert told.bench == replace(first, round=number)
    assert transitions.measured(told, an_id("a"), number, second) is told


# Coming


def test_a_newcomer_is_a_spare_with_a_fresh_lease() -> None:
    after = entered(transitions.join(a_run("a", max=2), a_member("b"), NOW))
    member = after.members[an_id("b")]
    assert (member.role, member.joined_at, member.lease_until) == (Role.SPARE, NOW, NOW + 2.0)


def test_a_name_is_held_until_the_lease_of_its_bearer_ends() -> None:
    given = a_run("a", max=2)
    answer = transitions.join(given, replace(a_member("a"), member_id=an_id("other"), joined_at=NOW), NOW)
    assert isinstance(answer, Held) and answer.until == NOW + 2.0


def test_a_name_is_refused_when_its_bearer_was_heard_since() -> None:
    given = transitions.renew(a_run("a", max=2), {an_id("a"): NOW + 1.0})
    twin = replace(a_member("a", host="there", pid=7), member_id=an_id("other"), joined_at=NOW)
    answer = transitions.join(given, twin, NOW + 1.0)
    assert isinstance(answer, Refusal) and answer.code == "duplicate_name"
    assert "a (127.0.0.1, pid 0) is alive, a (there, pid 7) may not use it" in answer.message


def test_a_duplicate_infra_rank_names_both() -> None:
    given = with_members(a_run("a", max=3), a_member("b", infra_rank=4))
    answer = transitions.join(given, a_member("c", infra_rank=4), NOW)
    assert isinstance(answer, Refusal) and "b (" in answer.message and "c (" in answer.message


def test_a_segmented_run_refuses_members_without_a_domain() -> None:
    answer = transitions.join(transitions.open_run(Settings(min=2, max=4, segment=2)), a_member("a"), NOW)
    assert isinstance(answer, Refusal) and answer.code == "no_domain"


def test_the_time_in_which_it_was_suspended_is_nobodys_absence() -> None:
    short = replace(a_run(min=2, max=4, below_min_timeout_s=NEVER_S), below_min_since=NOW - 10_000)
    usual = replace(short.settings, below_min_timeout_s=300.0)
    assert transitions.reconfigure(short, usual, short.target, NOW).below_min_since == NOW
    before = replace(short, settings=usual)
    other = replace(usual, below_min_timeout_s=600.0)
    assert transitions.reconfigure(before, other, before.target, NOW).below_min_since == NOW - 10_000


def test_who_is_started_by_a_control_plane_learns_its_domain_from_it_before_or_after_it_comes() -> None:
    given = replace(transitions.open_run(Settings(min=2, max=4, segment=2)), holds_farewell=True)
    given = entered(transitions.join(given, a_member("a"), NOW))
    assert given.members[an_id("a")].domain is None
    given = transitions.placed(given, {"a": Spot("rack", 0), "b": Spot("rack", 1)})
    given = entered(transitions.join(given, a_member("b"), NOW))
    known = {member.name: (member.domain, member.infra_rank) for member in given.members.values()}
    assert known == {"a": ("rack", 0), "b": ("rack", 1)}


def test_an_infra_rank_that_the_control_plane_gave_is_no_claim_of_its_bearers() -> None:
    given = replace(transitions.open_run(Settings(min=1, max=4)), holds_farewell=True)
    given = entered(transitions.join(transitions.placed(given, {"a": Spot("r", 0)}), a_member("a"), NOW))
    given = transitions.placed(given, {"b": Spot("r", 0)})  # a is on its way out
    assert entered(transitions.join(given, a_member("b"), NOW)).members[an_id("b")].infra_rank == 0


def test_what_a_member_knows_itself_stands_when_it_comes() -> None:
    given = transitions.placed(transitions.open_run(Settings(max=2)), {"a": Spot("told", 7)})
    member = entered(transitions.join(given, a_member("a", domain="own"), NOW)).members[an_id("a")]
    assert (member.domain, member.infra_rank) == ("own", 7)


def test_an_active_member_that_connects_anew_has_lost_its_place() -> None:
    after = entered(transitions.join(a_run("a b", max=2), a_member("b"), NOW))
    assert after.members[an_id("b")].role is Role.SPARE
    assert [loss.name for loss in the_round(after).losses] == ["b"] and not after.departed


def test_a_recovering_coordinator_gives_places_back() -> None:
    given = transitions.restored(Settings(max=2), 2, 0, a_round("a b", 3), NOW)
    after = entered(transitions.join(given, a_member("b"), NOW))
    member = after.members[an_id("b")]
    assert (member.role, member.rank, member.ranks_state) == (Role.ACTIVE, 1, RanksState.RUNNING)
    assert not the_round(after).losses


@pytest.mark.parametrize(("certain", "not_before"), [(True, float("-inf")), (False, NOW + 2.5)])
def test_what_only_a_member_presents_may_not_be_the_last_word(certain: bool, not_before: float) -> None:
    settings = Settings(max=2, lease_s=2.0)
    given = transitions.restored(settings, 2, 1, a_round("a b", 3), NOW, certain=certain)
    assert (given.not_before, given.next_round, given.restarts_used) == (not_before, 4, 1)
    assert given.recovery_until == NOW + 5.0


def test_the_lease_of_a_run_never_becomes_shorter() -> None:
    """Its members go by the one that they were told, and nothing is given away before that is over."""
    given = a_run("a b", max=2, lease_s=10.0)
    after = transitions.reconfigure(given, replace(given.settings, lease_s=1.0, max=3), 2, NOW)
    assert (after.settings.lease_s, after.settings.max) == (10.0, 3)
    assert transitions.reconfigure(given, replace(given.settings, lease_s=1.0), given.target, NOW) is given
    assert transitions.reconfigure(given, replace(given.settings, lease_s=20.0), 2, NOW).settings.lease_s == 20.0


# Going


def test_a_closed_connection_is_a_loss_and_a_fence() -> None:
    after = transitions.disconnected(a_run("a b", max=2), an_id("b"), NOW)
    assert an_id("b") not in after.members and after.departed == ("b",)
    assert the_round(after).fences == {an_id("b"): NOW + 2.5}


def test_a_member_that_confirmed_its_stop_needs_no_fence() -> None:
    given = transitions.stopped(recalled(a_run("a b", max=2)), an_id("b"), 0, 5, NOW)
    assert not the_round(transitions.disconnected(given, an_id("b"), NOW)).fences


def test_nobody_is_lost_twice() -> None:
    given = transitions.leaving(a_run("a b", max=2), an_id("b"), "it was told to leave", NOW)
    after = transitions.disconnected(given, an_id("b"), NOW + 1.0)
    assert [(loss.name, loss.why) for loss in the_round(after).losses] == [("b", "it was told to leave")]


def test_the_word_of_a_guard_that_cleared_everything_ends_the_membership() -> None:
    after = transitions.guard_cleared(a_run("a b", max=2), an_id("b"), 0, NOW)
    assert an_id("b") not in after.members
    assert the_round(after).gone == {an_id("b")} and not the_round(after).fences


@pytest.mark.parametrize("agent_first", [True, False])
def test_the_end_of_all_its_processes_needs_no_fence_whichever_end_is_seen_first(agent_first: bool) -> None:
    events = [transitions.disconnected, transitions.ended]
    after = recalled(a_run("a b", max=2))
    for event in events if agent_first else reversed(events):
        after = event(after, an_id("b"), NOW)
    assert an_id("b") not in after.members
    assert an_id("b") in the_round(after).gone and len(the_round(after).losses) == 1
    stopped = transitions.stopped(after, an_id("a"), 0, 5, NOW)
    assert not still_there(the_round(stopped), NOW)


def test_a_guard_that_answers_puts_the_fence_off() -> None:
    given = transitions.disconnected(a_run("a b", max=2), an_id("b"), NOW)
    after = transitions.guard_alive(given, an_id("b"), NOW + 1.0)
    assert the_round(after).fences == {an_id("b"): NOW + 3.5}


def test_an_unfit_member_is_parked_and_gives_up_its_place() -> None:
    after = transitions.unfit(a_run("a b", max=2), an_id("b"), "no GPU", NOW)
    assert after.members[an_id("b")].role is Role.PARKED and the_round(after).losses[0].why == "no GPU"
    again = transitions.fit(after, an_id("b"))
    assert again.members[an_id("b")].role is Role.SPARE


# Ranks


def test_the_earliest_failure_is_the_first_whenever_it_is_told() -> None:
    given = transitions.exited(a_run("a b", max=2), an_id("b"), 0, [(an_exit(1, worker="b"), NOW)])
    after = transitions.exited(given, an_id("a"), 0, [(an_exit(0, worker="a"), NOW - 0.5)])
    assert (the_round(after).first_failed_rank, the_round(after).first_failed_at) == (0, NOW - 0.5)


@pytest.mark.parametrize(
    ("end", "fails"),
    [
        (an_exit(1, 0), False),
        (an_exit(1, 1), True),
        (an_exit(1, 143, stopped=True), False),
        (an_exit(1, 134, hung=True), False),
    ],
)
def test_which_exits_are_failures(end: object, fails: bool) -> None:
    after = transitions.exited(a_run("a b", max=2), an_id("b"), 0, [(end, NOW)])  # type: ignore[list-item]
    assert (the_round(after).first_failed_rank == 1) is fails


def test_an_exit_that_is_told_twice_counts_once() -> None:
    once = transitions.exited(a_run("a b", max=2), an_id("b"), 0, [(an_exit(1, 3), NOW)])
    twice = transitions.exited(once, an_id("b"), 0, [(an_exit(1, 0), NOW + 1.0)])
    assert the_round(twice).exits[1].exit_code == 3


def test_the_first_rank_that_was_stopped_is_remembered() -> None:
    given = transitions.exited(a_run("a b", max=2), an_id("b"), 0, [(an_exit(1, 143, stopped=True), NOW)])
    assert the_round(given).first_stopped_at == NOW


EVENTS_OF_A_ROUND: list[Callable[[Run, int], Run]] = [
    lambda given, number: transitions.started(given, an_id("b"), number),
    lambda given, number: transitions.finished(given, an_id("b"), number),
    lambda given, number: transitions.gone(given, an_id("b"), number),
    lambda given, number: transitions.exited(given, an_id("b"), number, [(an_exit(1), NOW)]),
    lambda given, number: transitions.advanced(given, an_id("b"), number, [(1, Progress(3, NOW))]),
]


@pytest.mark.parametrize("event", EVENTS_OF_A_ROUND)
def test_a_report_about_another_round_changes_nothing(event: Callable[[Run, int], Run]) -> None:
    given = a_run("a b", max=2)
    assert event(given, 1) == given and event(given, -1) == given
    assert event(given, 0) != given


def test_a_leavers_0_is_never_success() -> None:
    given = transitions.leaving(a_run("a b", max=2), an_id("b"), "scaled down", NOW)
    assert not the_round(transitions.finished(given, an_id("b"), 0)).finished


def test_ranks_that_were_stopped_without_a_recall_are_a_loss() -> None:
    after = transitions.stopped(a_run("a b", max=2), an_id("b"), 0, 5, NOW, "the coordinator was silent for a lease")
    assert the_round(after).gone == {an_id("b")}
    assert the_round(after).losses[0].why == "the coordinator was silent for a lease"
    assert after.members[an_id("b")].store_port == 5


# Orders


@pytest.mark.parametrize(
    ("target", "remove", "code"),
    [(1, [], "out_of_bounds"), (5, [], "out_of_bounds"), (3, [], "out_of_bounds"), (2, ["a"], "out_of_bounds")],
)
def test_a_target_that_cannot_be_is_refused(target: int, remove: list[str], code: str) -> None:
    answer = transitions.set_target(a_run("a b", min=2, max=4, segment=2), target, remove, NOW)
    assert isinstance(answer, Refusal) and answer.code == code


def test_names_to_remove_must_be_known_and_of_use() -> None:
    given = a_run("a b c", min=2, max=3)
    for target, name, code in ((2, "zoe", "not_found"), (3, "a", "out_of_bounds")):
        answer = transitions.set_target(given, target, [name], NOW)
        assert isinstance(answer, Refusal) and answer.code == code
    assert entered(transitions.set_target(given, 2, ["a"], NOW)).removals == ("a",)


def test_nothing_changes_after_the_outcome() -> None:
    outcome = RunOutcome(OutcomeState.FAILED, "rank_failed", "too bad")
    given = replace(a_run("a b", max=4), outcome=outcome)
    assert isinstance(transitions.set_target(given, 3, [], NOW), Refusal)
    assert isinstance(transitions.cancel(given, "enough"), Refusal)
    assert transitions.adopt(given, RunOutcome(OutcomeState.SUCCEEDED, "succeeded", "no")).outcome == outcome


@pytest.mark.parametrize(
    ("given", "odd"),
    [
        ({}, []),
        ({"min": 2, "max": 4}, []),
        ({"min": "2", "lease_s": "1.5"}, []),
        ({"target": 4}, []),  # what it would be anyway
        ({"max_restarts": 7}, ["max_restarts is 3, this member has 7"]),
        ({"frobnicate": 1}, []),
    ],
)
def test_settings_are_compared_by_what_they_mean(given: dict[str, object], odd: list[str]) -> None:
    assert transitions.settings_differ(Settings(min=2, max=4), given) == odd


def test_a_number_that_was_used_elsewhere_is_skipped() -> None:
    given = a_run("a b", max=2)
    assert transitions.skip_past(given, 7).next_round == 8
    assert transitions.skip_past(given, 0) == given


# Any events in any order: what must hold of every run that comes out


@st.composite
def an_event(draw: st.DrawFn) -> tuple[str, str, int]:
    often = ["join", "stop", "stop", "wait", "fail", "lose"] * 2
    kinds = [
        *often,
        "silent",
        "leave",
        "guard",
        "ended",
        "unfit",
        "fit",
        "done",
        "done",
        "up",
        "up",
        "step",
        "target",
        "cancel",
    ]
    return draw(st.sampled_from(kinds)), draw(st.sampled_from("abcdef")), draw(st.integers(0, 4))


def stop_all(given: Run, now: float) -> Run:
    """Everyone confirms that the round which was called back is gone."""
    if given.round is not None and given.round.recall is not None:
        for member_id in given.members:
            given = transitions.stopped(given, member_id, given.round.number if given.round else -1, 1, now)
    return given


def a_full_run(settings: Settings) -> Run:
    given = transitions.open_run(settings)
    for name in "abcd":
        given = entered(transitions.join(given, a_member(name), 0.0))
    return given


def enter(given: Run, event: tuple[str, str, int], now: float) -> Run:
    """One report or order; where a choice of rank is needed, the member's own is taken."""
    kind, name, extra = event
    member_id, number = an_id(name), given.round.number if given.round else -1
    seat = given.round.seat_of(member_id) if given.round else None
    rank = seat.rank if seat else 0
    match kind:
        case "join":
            answer = transitions.join(given, a_member(name, joined_at=now, checks_health=name == "f"), now)
            return answer if isinstance(answer, Run) else given
        case "silent":
            return transitions.renew(given, {member_id: now - given.settings.lease_s})
        case "lose":
            return transitions.disconnected(given, member_id, now)
        case "leave":
            return transitions.leaving(given, member_id, "told to", now)
        case "guard":
            return transitions.guard_cleared(given, member_id, number, now)
        case "ended":
            return transitions.ended(given, member_id, now)
        case "unfit":
            return transitions.unfit(given, member_id, "ill", now)
        case "fit":
            return transitions.fit(given, member_id)
        case "fail":
            return transitions.exited(given, member_id, number, [(an_exit(rank, worker=name), now)])
        case "done":
            return transitions.finished(given, member_id, number)
        case "stop":
            return stop_all(given, now)
        case "up":
            return transitions.up(given, member_id, number, now)
        case "step":
            return transitions.advanced(given, member_id, number, [(rank, Progress(extra, now))])
        case "target":
            changed = transitions.set_target(given, 1 + extra % given.settings.max, [name] if extra == 4 else [], now)
            return changed if isinstance(changed, Run) else given
        case "cancel":
            ended = transitions.cancel(given, "enough") if extra == 4 else given
            return ended if isinstance(ended, Run) else given
        case _:
            return given


def check_decision(before: Run, decision: Decision, now: float) -> None:
    assert decision.reason.strip()
    if isinstance(decision.action, Stay):
        assert decision.wake_at > now
    if isinstance(decision.action, Release):
        formed = decision.action.round
        assert [seat.rank for seat in formed.seats] == list(range(formed.world_size))
        assert len({seat.member_id for seat in formed.seats}) == formed.world_size
        assert before.settings.min <= formed.world_size <= before.aim <= before.settings.max
        assert formed.number == before.next_round and before.outcome is None
        if before.round is not None:
            gone = before.round.gone | {key for key, fence in before.round.fences.items() if fence <= now}
            assert {seat.member_id for seat in before.round.seats} <= gone, "released before everyone was out"


def check_run(before: Run, after: Run) -> None:
    assert after.restarts_used <= after.settings.max_restarts
    assert before.outcome is None or after.outcome == before.outcome
    assert after.next_round >= before.next_round
    active = [member for member in after.members.values() if member.role is Role.ACTIVE]
    if after.round is not None:
        assert all(after.round.seat_of(member.member_id) for member in active)
    assert len({member.rank for member in active}) == len(active)


EVENTS = st.lists(st.tuples(an_event(), st.sampled_from([0.0, 0.01, 0.3, 1.0, 3.0])), min_size=10, max_size=40)
SETTINGS = st.builds(
    Settings,
    min=st.integers(1, 2),
    max=st.integers(2, 4),
    spares=st.integers(0, 2),
    max_restarts=st.integers(0, 2),
    below_min_timeout_s=st.just(20.0),
    hang_timeout_s=st.sampled_from([None, 2.5]),
    no_progress_rounds=st.sampled_from([None, 3]),
)


@pytest.mark.parametrize("examples", [100, pytest.param(3_000, marks=pytest.mark.soak)])
def test_any_events_in_any_order_keep_the_roll_in_order(examples: int) -> None:
    hypothesis_settings(max_examples=examples)(hypothesis_given(EVENTS, SETTINGS)(check_any_events))()


def check_any_events(events: list[tuple[tuple[str, str, int], float]], settings: Settings) -> None:
    given, now = a_full_run(settings), 0.0
    for event, pause in events:
        now += pause
        before = transitions.renew(given, dict.fromkeys(given.members, now))
        given = enter(before, event, now)
        check_run(before, given)
        while True:
            before = transitions.tell_time(given, now)
            decision = decide(before, now)
            check_decision(before, decision, now)
            given = carry_out(before, decision.action, now)
            check_run(before, given)
            if isinstance(decision.action, Stay):
                break


@hypothesis_settings(max_examples=100, deadline=None)
@hypothesis_given(st.lists(st.tuples(an_event(), st.sampled_from([0.0, 0.3, 1.0])), min_size=5, max_size=25))
def test_whatever_happened_a_quiet_roll_ends_or_trains(events: list[tuple[tuple[str, str, int], float]]) -> None:
    given, now = a_full_run(Settings(min=2, max=3, spares=1, below_min_timeout_s=20.0)), 0.0
    for event, pause in events:
        now += pause
        given = transitions.renew(given, dict.fromkeys(given.members, now))
        given, _ = settle(enter(given, event, now), now)
    for _ in range(200):
        if given.outcome is not None or given.running is not None:
            break
        given, decisions = settle(given, now)
        now = max(now, decisions[-1].wake_at) if decisions[-1].wake_at < float("inf") else now + 1.0
        given = transitions.renew(stop_all(given, now), dict.fromkeys(given.members, now))
        for member in list(given.members.values()):
            given = transitions.fit(given, member.member_id) if member.member_id in given.checking else given
    assert given.outcome is not None or given.running is not None


def test_a_recall_of_any_cause_ends_in_another_round() -> None:
    for cause in Cause:
        given = recalled(a_run("a b", max=2), cause)
        for name in "ab":
            given = transitions.stopped(given, an_id(name), 0, 1, NOW)
        after, _ = settle(given, NOW)
        assert the_round(after).number == 1, cause


def test_who_said_that_it_goes_is_lost_since_then() -> None:
    """The others were called back for it, although its connection ended later."""
    given = transitions.leaving(a_run("a b", max=2), an_id("b"), "it leaves", NOW, planned=True)
    assert [(loss.at, loss.planned) for loss in the_round(given).losses] == [(NOW, True)]
    after = transitions.disconnected(given, an_id("b"), NOW + 1.0)
    assert [(loss.at, loss.planned) for loss in the_round(after).losses] == [(NOW, False)]

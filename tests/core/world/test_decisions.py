"""What is decided about a run, and why: one table or sentence per rule."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from muster.core.world import run as runs
from muster.core.world import transitions
from muster.core.world.closing import RoundCost, judge, over
from muster.core.world.decisions import carry_out, decide
from muster.core.world.records import record
from muster.core.world.run import (
    CallBack,
    CheckHealth,
    Dismiss,
    Farewell,
    Finish,
    GiveUpOn,
    Lose,
    Release,
    Run,
    Stay,
    TellUnwatched,
)
from muster.types.world import (
    Cause,
    Loss,
    OutcomeState,
    Progress,
    Role,
    Round,
    RunId,
    RunOutcome,
    Spot,
)
from tests.core.builders import (
    NOW,
    a_member,
    a_round,
    a_run,
    all_gone,
    an_exit,
    an_id,
    recalled,
    seated,
    settle,
    with_members,
    without,
)


def released(given: Run, now: float = NOW) -> list[str]:
    """Names by rank of the round that is released now, or nothing."""
    action = decide(given, now).action
    return [seat.name for seat in action.round.seats] if isinstance(action, Release) else []


def lost(given: Run, name: str, now: float = NOW) -> Run:
    return runs.lose(given, an_id(name), now, "its connection closed")


# The first round


def test_the_first_round_forms_at_once_with_target_and_spares() -> None:
    assert released(a_run(waiting="c a b", max=3)) == ["a", "b", "c"]
    assert not released(a_run(waiting="c a b", max=3, spares=1, target=3))


@pytest.mark.parametrize(
    ("reached_ago_s", "forms"),
    [(0.0, False), (1.9, False), (2.0, True), (9.0, True)],
)
def test_the_first_round_waits_the_last_call_after_min(reached_ago_s: float, forms: bool) -> None:
    given = replace(a_run(waiting="a b", min=2, max=4), min_reached_at=NOW - reached_ago_s)
    decision = decide(given, NOW)
    assert isinstance(decision.action, Release) is forms
    if not forms:
        assert decision.reason == "2 workers are here; last call for 2 more"
        assert decision.wake_at == pytest.approx(NOW - reached_ago_s + 2.0)


def test_below_min_nothing_forms_and_the_reason_counts() -> None:
    given = replace(a_run(waiting="a", min=3, max=4), departed=("w10", "w9"))
    decision = decide(given, NOW)
    assert decision.action == Stay()
    assert decision.reason == "1 of at least 3 workers: 2 missing; left: w9, w10"


def test_below_min_for_too_long_ends_the_run() -> None:
    given = replace(a_run(waiting="a", min=3, max=4), below_min_since=NOW - 300.0)
    action = decide(given, NOW).action
    assert isinstance(action, Finish) and action.outcome.reason == "below_minimum"


def test_parked_members_are_named_where_they_are_missed() -> None:
    given = with_members(a_run(waiting="a", min=2, max=2), a_member("b", role=Role.PARKED, note="no GPU"))
    assert decide(given, NOW).reason == "1 of at least 2 workers: 1 missing; parked: b (no GPU)"


# A round that is out


def test_with_segments_only_those_train_of_whom_is_known_where_they_are() -> None:
    given = a_run(waiting="a b c", min=2, max=2, segment=2)
    nowhere = decide(given, NOW)
    assert isinstance(nowhere.action, Stay) and "in no domain that is known: a, b, c" in nowhere.reason
    given = transitions.placed(given, {"a": Spot("r1", 0), "b": Spot("r2", 1)})
    assert isinstance(decide(given, NOW).action, Stay), "one of each is no segment"
    given = transitions.placed(given, {"a": Spot("r1", 0), "b": Spot("r2", 2), "c": Spot("r1", 1)})
    formed = decide(given, NOW).action
    assert isinstance(formed, Release)
    assert [(seat.name, seat.domain) for seat in formed.round.seats] == [("a", "r1"), ("c", "r1")]


def test_a_round_goes_on_while_nothing_happens() -> None:
    decision = decide(a_run("a b", max=2), NOW)
    assert (decision.action, decision.reason) == (Stay(), "round 0: 2 workers train")
    assert decision.wake_at == NOW + 2.0, "the first lease to end"


def test_all_done_is_success() -> None:
    given = a_run("a b", max=2)
    assert given.round is not None
    given = replace(given, round=replace(given.round, finished=frozenset({an_id("a"), an_id("b")})))
    action = decide(given, NOW).action
    assert isinstance(action, Finish) and action.outcome.state is OutcomeState.SUCCEEDED
    assert action.outcome.message == "all 2 ranks of round 0 exited 0"


def test_all_done_is_success_even_after_a_recall() -> None:
    given = recalled(a_run("a b", max=3), Cause.GROW)
    assert given.round is not None
    given = replace(given, round=replace(given.round, finished=frozenset({an_id("a"), an_id("b")})))
    assert isinstance(decide(given, NOW).action, Finish)


def test_a_loss_calls_the_round_back() -> None:
    decision = decide(lost(a_run("a b", "c", max=2), "b"), NOW)
    assert isinstance(decision.action, CallBack) and decision.action.recall.cause is Cause.LOSS
    assert decision.reason == "lost b: its connection closed" and decision.action.recall.grace_s == 0.2


def test_a_finished_member_that_is_lost_is_not_missed() -> None:
    given = a_run("a b", max=2)
    assert given.round is not None
    given = replace(given, round=replace(given.round, finished=frozenset({an_id("b")})))
    assert decide(lost(given, "b"), NOW).action == Stay()


def with_failure(given: Run, rank: int = 0, at: float = NOW) -> Run:
    assert given.round is not None
    seat = given.round.worker_of(rank)
    assert seat is not None
    end = an_exit(rank, worker=seat.name)
    failed = replace(given.round, exits={rank: end}, first_failed_at=at, first_failed_rank=rank)
    return replace(given, round=failed)


@pytest.mark.parametrize(("used", "grace_s"), [(0, 0.2), (2, 0.2), (3, 0.5)])
def test_a_failure_calls_the_round_back_with_the_grace_that_fits_what_follows(used: int, grace_s: float) -> None:
    given = replace(with_failure(a_run("a b", max=2), 1), restarts_used=used)
    action = decide(given, NOW).action
    assert isinstance(action, CallBack)
    assert (action.recall.cause, action.recall.grace_s) == (Cause.FAILURE, grace_s)
    assert action.recall.reason == "rank 1 on b: Exit 1"


def test_a_round_in_which_nothing_advances_is_called_back() -> None:
    given = a_run("a b", last=a_round("a b", up_at=NOW - 4.0), max=2, hang_timeout_s=3.0)
    assert given.round is not None
    busy = replace(given, round=replace(given.round, progress={0: Progress(7, NOW - 2.0)}))
    assert decide(busy, NOW).wake_at == NOW + 1.0
    known = replace(given, best_step=7)
    action = decide(known, NOW).action
    assert isinstance(action, CallBack) and action.recall.cause is Cause.HANG
    starting = replace(known, round=replace(given.round, up_at=None))
    assert decide(starting, NOW).action == Stay(), "ranks that have not all started cannot advance"


def test_where_no_rank_ever_told_a_step_no_hang_is_seen_and_that_is_said_once() -> None:
    early = a_run("a b", last=a_round("a b", up_at=NOW - 2.0), max=2, hang_timeout_s=3.0)
    assert decide(early, NOW).wake_at == NOW + 1.0
    later, made = settle(early, NOW + 1.0)
    assert [one.reason for one in made if isinstance(one.action, TellUnwatched)] == [
        "no rank has called muster.progress(step) in 3 s: a hang would not be noticed"
    ]
    later, made = settle(transitions.renew(later, dict.fromkeys(later.members, NOW + 99.0)), NOW + 99.0)
    assert [one.action for one in made] == [Stay()], "neither called back nor told again"


# Resizing


def test_a_lower_target_calls_back_and_names_the_highest_ranks() -> None:
    given = replace(a_run("a b c d", max=4), target=2)
    action = decide(given, NOW).action
    assert isinstance(action, CallBack) and action.recall.cause is Cause.SHRINK
    assert action.recall.leavers == {an_id("c"), an_id("d")} and action.recall.leaver_grace_s == 15.0


def test_a_lower_target_takes_the_names_given_first() -> None:
    given = replace(a_run("a b c d", max=4), target=2, removals=("a",))
    action = decide(given, NOW).action
    assert isinstance(action, CallBack) and action.recall.leavers == {an_id("a"), an_id("d")}


@pytest.mark.parametrize(
    ("spares", "joined_ago_s", "grows"),
    [("c", 0.1, False), ("c", 0.5, True), ("c d", 0.1, True)],
)
def test_newcomers_below_target_are_gathered_for_a_moment(spares: str, joined_ago_s: float, grows: bool) -> None:
    given = a_run("a b", max=4)
    given = with_members(given, *(a_member(name, joined_at=NOW - joined_ago_s) for name in spares.split()))
    decision = decide(given, NOW)
    assert isinstance(decision.action, CallBack) is grows
    if not grows:
        assert decision.reason == "growing from 2 to 3 of 4: gathering more"


def test_a_world_with_a_finished_member_does_not_grow() -> None:
    given = a_run("a b", "c", max=3)
    assert given.round is not None
    given = replace(given, round=replace(given.round, finished=frozenset({an_id("a")})))
    assert decide(given, NOW).action == Stay()


def test_growth_asks_an_old_spare_for_its_health_first() -> None:
    given = with_members(a_run("a b", max=3), a_member("c", checks_health=True))
    assert decide(given, NOW).action == CheckHealth((an_id("c"),))
    asked = carry_out(given, CheckHealth((an_id("c"),)), NOW)
    assert decide(asked, NOW).action == Stay()


def test_surplus_members_are_dismissed() -> None:
    given = replace(a_run("a b", "c d", max=4, target=2, spares=1), surplus=frozenset({an_id("c")}))
    assert decide(given, NOW).action == Dismiss((an_id("c"),))


# Closing: what did it cost?


def test_a_recalled_round_is_waited_out_until_everyone_is_gone() -> None:
    given = recalled(a_run("a b", "c", max=2), gone="a")
    decision = decide(given, NOW)
    assert decision.action == Stay()
    assert decision.reason == "waiting until the ranks of round 0 on b are gone"
    assert released(all_gone(given)) == ["a", "b"]


def test_one_that_is_lost_counts_as_gone_when_its_fence_has_passed() -> None:
    given = lost(recalled(a_run("a b", "c", max=2), gone="a"), "b")
    assert given.round is not None and given.round.fences == {an_id("b"): NOW + 2.5}
    alive = with_members(given, *(replace(m, lease_until=NOW + 9) for m in given.members.values()))
    assert decide(alive, NOW + 2.4).action == Stay()
    assert released(alive, NOW + 2.5) == ["a", "c"]


def test_a_silent_member_is_fenced_from_when_it_was_last_heard() -> None:
    given = recalled(a_run("a b", max=2))
    given = with_members(given, replace(given.members[an_id("b")], lease_until=NOW))
    assert decide(given, NOW).action == Lose((an_id("b"),))
    after = carry_out(given, Lose((an_id("b"),)), NOW)
    assert after.round is not None and after.round.fences == {an_id("b"): NOW + 0.5}
    assert after.round.losses[0].at == NOW - 2.0 and "silent for 2.0 s" in after.round.losses[0].why


def judged(given: Run, now: float) -> RoundCost:
    return judge(given, now)


FAILED_AT = NOW - 0.1


def closing(cause: Cause = Cause.FAILURE, **known: object) -> Run:
    """Rank 0 failed at FAILED_AT and everyone has been heard since."""
    given = all_gone(recalled(with_failure(a_run("a b", "c", max=2), 0, FAILED_AT), cause, FAILED_AT))
    assert given.round is not None
    return replace(given, round=replace(given.round, **known))  # type: ignore[arg-type]


def a_loss(at: float) -> Loss:
    return Loss(an_id("b"), "b", at, "its connection closed")


@pytest.mark.parametrize(
    ("given", "now", "charged"),
    [
        (closing(), FAILED_AT + 0.3, True),
        (closing(losses=(a_loss(FAILED_AT + 0.2),)), FAILED_AT + 0.3, False),
        (closing(losses=(a_loss(FAILED_AT + 0.4),)), FAILED_AT + 0.5, True),
        (closing(losses=(a_loss(runs.UNSEEN),)), FAILED_AT + 9.0, False),
        (closing(first_stopped_at=FAILED_AT - 0.1), FAILED_AT + 0.3, False),
        (closing(first_stopped_at=FAILED_AT + 0.1), FAILED_AT + 0.3, True),
        (closing(Cause.GROW), FAILED_AT + 0.3, False),
        (closing(Cause.SHRINK), FAILED_AT + 0.3, False),
    ],
)
def test_a_failure_costs_a_restart_unless_the_membership_changed(given: Run, now: float, charged: bool) -> None:
    verdict = judged(given, now)
    assert (verdict.until, verdict.charged) == (None, charged)
    assert (verdict.first is not None) is charged


def test_a_failure_is_held_for_the_blame_window() -> None:
    verdict = judged(closing(), NOW)
    assert verdict.until == pytest.approx(FAILED_AT + 0.3) and not verdict.charged


def test_a_failure_is_held_until_everyone_has_been_heard_since() -> None:
    quiet = closing()
    quiet = with_members(quiet, replace(quiet.members[an_id("b")], lease_until=FAILED_AT - 0.5 + 2.0))
    early = judged(quiet, FAILED_AT + 0.3)
    assert early.until == pytest.approx(FAILED_AT - 0.5 + 1.0), "by then it should have renewed"
    assert early.why == "b silent: lost, or slow?"
    late = judged(quiet, FAILED_AT + 0.6)
    assert late.until == pytest.approx(FAILED_AT + 1.5), "now its lease decides"


def test_with_the_budget_spent_a_failure_ends_the_run_and_says_whose_it_was() -> None:
    given = replace(closing(), restarts_used=3)
    assert given.round is not None
    end = an_exit(0, 137, "a", signal="SIGKILL", stderr_tail=("CUDA error",))
    given = replace(given, round=replace(given.round, exits={0: end}))
    action = decide(given, NOW + 1.0).action
    assert isinstance(action, Finish) and action.outcome.first_failure == end
    assert action.outcome.message == (
        "Signal SIGKILL (rank 0); last output: CUDA error; worker a, round 0; 3 of 3 restarts used"
        "; its last stderr lines:\n  CUDA error"
    )


IMPORTS = (
    "Traceback (most recent call last):",
    '  File "train.py", line 1, in <module>',
    "ModuleNotFoundError: no numpi",
)


@pytest.mark.parametrize(
    ("known", "code", "tail", "ends"),
    [
        ({"hopeless": IMPORTS[-1]}, 1, IMPORTS, True),
        ({"hopeless": "SyntaxError: '(' was never closed"}, 1, ("SyntaxError: '(' was never closed",), True),
        ({"hopeless": "train.py: error: no --data"}, 2, ("usage: …", "train.py: error: no --data"), True),
        ({"hopeless": "muster-node: cannot run trian"}, 127, ("muster-node: cannot run trian",), True),
        ({}, 1, IMPORTS, False),
        ({"hopeless": "ImportError: another"}, 1, IMPORTS, False),
        ({"hopeless": "ValueError: no"}, 1, ("ValueError: no",), False),
        ({"hopeless": IMPORTS[-1], "best_step": 3}, 1, IMPORTS, False),
    ],
)
def test_a_program_that_cannot_work_is_not_tried_again(
    known: dict[str, Any], code: int, tail: tuple[str, ...], ends: bool
) -> None:
    given = replace(without(closing(), "c"), **known)
    assert given.round is not None
    end = an_exit(0, code, "a", stderr_tail=tail)
    given = replace(given, round=replace(given.round, exits={0: end}, number=1), next_round=2)
    action = decide(given, NOW + 1.0).action
    if not ends:
        assert isinstance(action, Release)
        return
    assert isinstance(action, Finish) and action.outcome.reason == "cannot_start"
    assert action.outcome.message == (
        f"exited with code {code} (rank 0); last output: {tail[-1]}; worker a, round 1 before the first step, "
        "as in the round before: another would end the same way"
    )


def test_a_round_that_cannot_work_is_remembered_for_the_next_one() -> None:
    given = closing()
    assert given.round is not None
    end = an_exit(0, 1, "a", stderr_tail=IMPORTS)
    after, _ = settle(replace(given, round=replace(given.round, exits={0: end})), NOW + 1.0)
    assert after.hopeless == IMPORTS[-1] and record(RunId("r"), 1, after).hopeless == IMPORTS[-1]


def test_one_worker_that_lacks_a_module_is_replaced_before_the_run_is_given_up() -> None:
    given = replace(closing(), hopeless=IMPORTS[-1], blamed="a", blamed_times=1)
    assert given.round is not None
    end = an_exit(0, 1, "a", stderr_tail=IMPORTS)
    given = replace(given, round=replace(given.round, exits={0: end}, number=1), next_round=2)
    assert released(given, NOW + 1.0) == ["c", "b"]
    assert isinstance(decide(replace(given, blamed="b"), NOW + 1.0).action, Finish), "others lack it, too"


def hung(**known: object) -> Run:
    given = all_gone(recalled(a_run("a b", "c", max=2), Cause.HANG))
    assert given.round is not None
    ends = {
        0: an_exit(0, 134, "a", hung=True, step=8, idle_s=4.0, waiting=True, stack="torch.py:1 in wait"),
        1: an_exit(1, 134, "b", hung=True, step=8, idle_s=3.5, stack="train.py:7 in step"),
    }
    return replace(given, round=replace(given.round, exits=ends, **known))  # type: ignore[arg-type]


def test_the_rank_that_stopped_first_is_the_one_that_does_not_wait_for_others() -> None:
    verdict = judged(hung(), NOW)
    assert verdict.charged and verdict.first is not None and verdict.first.rank == 1


def test_a_hang_over_a_member_that_was_gone_costs_nothing() -> None:
    assert judged(hung(losses=(a_loss(NOW - 1.0),)), NOW) == RoundCost()


def test_a_hang_is_judged_when_all_stacks_are_here() -> None:
    assert judged(recalled(a_run("a b", max=2), Cause.HANG), NOW).until == math.inf


def test_rounds_without_progress_end_the_run() -> None:
    given = replace(closing(), stale_rounds=1)
    given = replace(given, settings=replace(given.settings, no_progress_rounds=2))
    action = decide(given, NOW + 1.0).action
    assert isinstance(action, Finish) and action.outcome.reason == "no_progress"
    grown = replace(all_gone(recalled(a_run("a b", max=2), Cause.GROW)), settings=given.settings, stale_rounds=9)
    assert released(grown) == ["a", "b"], "a resize is nobody's fault"


# Forming again


def test_a_spare_takes_the_lost_rank_at_once() -> None:
    given = all_gone(recalled(lost(a_run("a b c", "d", max=3), "b")))
    assert released(given) == ["a", "d", "c"]


def test_without_a_spare_the_last_call_is_waited_out_and_then_the_world_shrinks() -> None:
    given = all_gone(recalled(lost(a_run("a b c", min=2, max=3), "b")))
    assert decide(given, NOW).reason == "2 workers are here; last call for 1 more"
    assert decide(given, NOW).wake_at == NOW + 2.0
    awake = with_members(given, *(replace(m, lease_until=NOW + 9) for m in given.members.values()))
    assert released(awake, NOW + 2.0) == ["a", "c"]


def test_those_that_come_back_above_min_get_a_last_call_of_their_own() -> None:
    given = all_gone(recalled(lost(a_run("a b c", min=2, max=3), "b"), at=NOW - 60.0))
    assert isinstance(decide(replace(given, min_reached_at=NOW - 1.0), NOW).action, Stay)
    assert released(replace(given, min_reached_at=NOW - 2.0)) == ["a", "c"]


@pytest.mark.parametrize(("spares", "goes"), [("", False), ("d", True)])
def test_leavers_stay_only_while_spares_are_short(spares: str, goes: bool) -> None:
    given = replace(a_run("a b c", spares, max=3, spares=1), target=2)
    given = all_gone(recalled(given, Cause.SHRINK, leavers=frozenset({an_id("a")})))
    assert released(given) == ["b", "c"]
    after, _ = settle(given, NOW)
    leaver = after.members[an_id("a")]
    assert leaver.role is (Role.LEAVING if goes else Role.SPARE) and not after.surplus
    assert all(member.role is Role.SPARE for name, member in after.members.items() if name == an_id("d"))


def test_leavers_stay_where_the_target_was_raised_again() -> None:
    given = all_gone(recalled(a_run("a b c", max=3), Cause.SHRINK, leavers=frozenset({an_id("a")})))
    assert released(given) == ["a", "b", "c"]


def test_a_leaver_keeps_its_place_where_another_was_lost_meanwhile() -> None:
    given = replace(a_run("a b c", min=2, max=3), target=2)
    given = all_gone(recalled(given, Cause.SHRINK, leavers=frozenset({an_id("c")})))
    assert released(without(given, "a")) == ["b", "c"]


def test_a_worker_that_fails_first_twice_is_swapped_and_parked() -> None:
    given = replace(closing(), blamed="a", blamed_times=1)
    decision = decide(given, NOW + 1.0)
    assert isinstance(decision.action, Release) and decision.action.charged
    assert [seat.name for seat in decision.action.round.seats] == ["c", "b"]
    after = carry_out(given, decision.action, NOW + 1.0)
    assert after.members[an_id("a")].role is Role.PARKED
    assert after.members[an_id("a")].note.startswith("its ranks failed first twice")


def test_a_worker_that_fails_first_twice_stays_where_no_spare_is() -> None:
    given = replace(without(closing(), "c"), blamed="a", blamed_times=1)
    assert released(given, NOW + 1.0) == ["a", "b"]


def test_a_failure_that_costs_a_restart_is_counted_when_the_next_round_is_out() -> None:
    after, decisions = settle(closing(), NOW + 1.0)
    assert after.restarts_used == 1 and after.blamed == "a" and seated(after) == ["a", "b"]
    assert all(decision.reason for decision in decisions)


def test_a_new_round_waits_while_a_later_one_may_still_be_presented() -> None:
    given = replace(all_gone(recalled(a_run("a b", max=2))), not_before=NOW + 1.0)
    assert decide(given, NOW).wake_at == NOW + 1.0
    assert released(given, NOW + 1.0) == ["a", "b"]


def test_a_spare_that_has_to_show_its_health_is_asked_before_it_is_seated() -> None:
    given = all_gone(recalled(lost(a_run("a b", max=2), "b")))
    given = with_members(given, a_member("c", checks_health=True))
    assert decide(given, NOW).action == CheckHealth((an_id("c"),))
    well = with_members(given, a_member("c", checks_health=True, fit_for=1))
    assert released(well) == ["a", "c"]


# Recovering


def restored_round() -> Round:
    return a_round("a b", 4)


@pytest.mark.parametrize(
    ("here", "now", "action"),
    [
        ("a b", NOW, GiveUpOn(())),
        ("a", NOW, Stay()),
        ("a", NOW + 5.0, GiveUpOn((restored_round().seats[1],))),
    ],
)
def test_members_of_a_restored_round_are_awaited(here: str, now: float, action: object) -> None:
    given = a_run(here, last=restored_round(), max=2)
    given = replace(given, recovery_until=NOW + 5.0)
    given = with_members(given, *(replace(m, lease_until=now + 1) for m in given.members.values()))
    assert decide(given, now).action == action


def test_one_whose_guard_says_that_it_is_gone_is_not_awaited() -> None:
    given = a_run("a", last=replace(restored_round(), gone=frozenset({an_id("b")})), max=2)
    given = replace(given, recovery_until=NOW + 5.0)
    assert decide(given, NOW).action == GiveUpOn((restored_round().seats[1],))


# Ended


def ended(*, acknowledged: bool) -> Run:
    given = a_run("a b", max=2)
    given = with_members(given, *(replace(m, acknowledged=acknowledged) for m in given.members.values()))
    return replace(given, outcome=RunOutcome(OutcomeState.SUCCEEDED, "succeeded", "done"))


def test_farewell_is_said_when_everyone_has_the_outcome() -> None:
    assert decide(ended(acknowledged=True), NOW).action == Farewell()
    waiting = decide(ended(acknowledged=False), NOW)
    assert (waiting.action, waiting.reason) == (Stay(), "ended; a, b still stopping ranks")


def test_nothing_follows_a_farewell_but_leases_that_run_out() -> None:
    said = carry_out(ended(acknowledged=True), Farewell(), NOW)
    assert decide(said, NOW).action == Stay()
    assert isinstance(decide(said, NOW + 2.0).action, Lose)


def test_a_cancel_ends_the_run() -> None:
    order = RunOutcome(OutcomeState.CANCELLED, "cancelled", "enough")
    action = decide(replace(a_run("a b", max=2), ordered=order), NOW).action
    assert isinstance(action, Finish)
    assert (action.outcome.state, action.outcome.message) == (OutcomeState.CANCELLED, "enough")


# Over ----------------------------------------------------------------------------------------------


def test_a_round_is_over_when_all_its_members_are_gone_and_not_before() -> None:
    running = a_run("a b")
    assert not over(running, 0, NOW), "it trains"
    called_back = recalled(running, gone="a")
    assert not over(called_back, 0, NOW), "nobody has confirmed that b is gone"
    assert over(all_gone(called_back), 0, NOW)
    assert not over(all_gone(called_back), 1, NOW), "a later one has not begun, so it is not over"
    fenced = lost(called_back, "b")
    assert fenced.round is not None
    fence = fenced.round.fences[an_id("b")]
    assert not over(fenced, 0, fence - 0.01)
    assert over(fenced, 0, fence)


def test_a_round_that_another_has_followed_is_over() -> None:
    later = a_run("a b", last=a_round("a b", number=4))
    assert over(later, 3, NOW)
    assert not over(later, 4, NOW)
    assert not over(a_run(), 0, NOW)


def test_a_round_whose_run_has_ended_is_over_when_its_ranks_are_gone() -> None:
    outcome = RunOutcome(OutcomeState.CANCELLED, "cancelled", "somebody cancelled it", 0)
    ended = replace(a_run("a b"), outcome=outcome)
    assert not over(ended, 0, NOW)
    assert over(all_gone(ended), 0, NOW)


def test_ranks_that_wait_for_imports_say_so_until_they_run() -> None:
    given = a_run("a b", last=a_round("a b", up_at=None), max=2)
    given = transitions.does(transitions.does(given, an_id("a"), "importing torch"), an_id("b"), "importing torch")
    assert decide(given, NOW).reason == "round 0: 2 workers start, importing torch on a, b"
    given = transitions.up(given, an_id("a"), 0, NOW)
    assert decide(given, NOW).reason == "round 0: 2 workers start, importing torch on b"
    assert decide(transitions.up(given, an_id("b"), 0, NOW), NOW).reason == "round 0: 2 workers train"


def test_ranks_that_do_not_run_yet_do_not_train() -> None:
    assert decide(a_run("a b", last=a_round("a b", up_at=None), max=2), NOW).reason == "round 0: 2 workers start"
    assert decide(a_run("a", last=a_round("a", up_at=None), max=2, min=1), NOW).reason.startswith("round 0: 1 ")

"""Workers whose GPUs are with somebody else: who goes, who stays, who comes back, and when nothing is left of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from muster.core.world import lending, records, sizes, transitions, views
from muster.core.world import run as runs
from muster.core.world.decisions import decide
from muster.core.world.run import CallBack, CheckHealth, Dismiss, Finish, Release, Run, Stay
from muster.types.state import Held, Holding
from muster.types.world import Cause, Progress, Role, Round, RunId, Seat, TakenBack, unknown_seat
from tests.core.builders import (
    NOW,
    a_member,
    a_recall,
    a_round,
    a_run,
    a_seat,
    all_gone,
    an_exit,
    an_id,
    recalled,
    seated,
    settle,
    with_members,
    without,
)

WITH_P2 = "GPU 5 is with p2"


def lend(given: Run, names: str, target: int, now: float = NOW) -> Run:
    return transitions.reconfigure(given, given.settings, target, now, dict.fromkeys(names.split(), WITH_P2))


def called_back(given: Run, now: float = NOW) -> CallBack | None:
    action = decide(given, now).action
    return action if isinstance(action, CallBack) else None


def formed_without(given: Run, now: float = NOW) -> Run:
    """The run after the round was called back and everyone is out of it."""
    given, _ = settle(given, now)
    return settle(all_gone(given), now)[0]


# Lending


def test_a_worker_that_lends_its_gpus_is_called_back_as_planned_and_the_reason_says_who_has_them() -> None:
    back = called_back(lend(a_run("a b c", max=3), "b", 2))
    assert back is not None and back.recall.cause is Cause.SHRINK
    assert back.recall.reason == f"b lends its GPUs: {WITH_P2}"
    assert back.recall.leavers == {an_id("b")}


def test_exactly_the_lent_ones_go_and_the_others_keep_their_order() -> None:
    given = formed_without(lend(a_run("a b c d e", "x", max=5), "b d", 3))
    assert seated(given) == ["a", "c", "e"]
    assert {given.members[an_id(name)].role for name in "bdx"} == {Role.SPARE}
    assert not given.surplus


def test_whoever_has_to_go_beside_the_lent_ones_is_named() -> None:
    back = called_back(lend(a_run("a b c d", max=4), "b", 2))
    assert back is not None and back.recall.leavers == {an_id("b"), an_id("d")}
    assert back.recall.reason == f"b lends its GPUs: {WITH_P2}; target is 2, the world has 4: d leaves"


def test_where_the_target_stays_a_spare_takes_the_place() -> None:
    assert seated(formed_without(lend(a_run("a b c", "x", max=3), "b", 3))) == ["a", "x", "c"]


def test_where_the_target_stays_and_nobody_is_spare_no_last_call_is_made_for_who_is_lent() -> None:
    assert seated(formed_without(lend(a_run("a b c", max=3), "b", 3))) == ["a", "c"]


def test_one_that_is_lost_meanwhile_still_has_its_last_call() -> None:
    given, _ = settle(lend(a_run("a b c d", max=4), "b", 3), NOW)
    given, made = settle(all_gone(runs.lose(given, an_id("c"), NOW, "its connection closed")), NOW)
    assert made[-1].reason == "2 workers are here; last call for 1 more"


def test_a_spare_that_is_lent_calls_nobody_back() -> None:
    given = lend(a_run("a b", "x", max=2), "x", 2)
    decision = decide(given, NOW)
    assert decision.action == Stay()
    assert decision.reason == f"round 0: 2 workers train; x lends its GPUs: {WITH_P2}"
    assert lending.vacated(given, "x", NOW)


def test_a_spare_that_is_lent_takes_no_lost_rank() -> None:
    given = lend(a_run("a b", "x", min=1, max=2, last_call_s=0.0), "x", 2)
    given = formed_without(runs.lose(given, an_id("b"), NOW, "its connection closed"))
    assert seated(given) == ["a"]


def test_as_a_last_resort_nobody_is_seated_that_is_lent() -> None:
    given = with_members(
        recalled(a_run("a b", min=2, max=2)), a_member("x", role=Role.PARKED, note="its ranks failed first twice, in")
    )
    assert isinstance(decide(all_gone(without(given, "b")), NOW).action, Release)
    given = lend(given, "x", 2)
    decision = decide(all_gone(without(given, "b")), NOW)
    assert isinstance(decision.action, Stay) and "; lent: x" in decision.reason


def test_below_the_minimum_the_lent_ones_are_named() -> None:
    given = lend(a_run("a b c", min=2, max=3), "c", 2)
    given = formed_without(runs.lose(given, an_id("b"), NOW, "its connection closed"))
    assert decide(given, NOW).reason == "1 of at least 2 workers: 1 missing; left: b; lent: c"


def test_one_that_is_lent_is_never_sent_home() -> None:
    given = formed_without(lend(a_run("a b c d", max=4), "a b", 2))
    assert seated(given) == ["c", "d"] and not given.surplus
    more = formed_without(lend(a_run("a b c d", max=4), "a", 2))
    assert "d" not in {member.name for member in more.members.values() if member.role is not Role.LEAVING}
    assert more.members[an_id("a")].role is Role.SPARE


def test_one_that_was_to_be_sent_home_is_not_once_it_is_lent() -> None:
    given = replace(a_run("a b", "x", max=2), surplus=frozenset({an_id("x")}))
    assert isinstance(decide(given, NOW).action, Dismiss)
    assert isinstance(decide(lend(given, "x", 2), NOW).action, Stay)


def test_the_first_round_waits_for_nobody_that_is_lent() -> None:
    given = lend(a_run(waiting="a b c", max=3, spares=0, target=3), "b", 2)
    assert seated(settle(given, NOW)[0]) == ["a", "c"]
    kept = lend(a_run(waiting="a b c", max=3, spares=0, target=3), "b", 3)
    assert seated(settle(kept, NOW)[0]) == ["a", "c"]


def test_a_recall_that_is_on_its_way_takes_the_new_target_with_it() -> None:
    given, _ = settle(lend(a_run("a b c d", max=4), "b", 3), NOW)
    other = lend(given, "c", 3)
    assert seated(settle(all_gone(other), NOW)[0]) == ["a", "b", "d"]
    nobody = lend(given, "", 4)
    assert seated(settle(all_gone(nobody), NOW)[0]) == ["a", "b", "c", "d"]


def test_with_segments_the_one_with_a_lent_worker_goes_as_a_whole() -> None:
    last = Round(0, tuple(a_seat(rank, name, domain=f"d{rank // 2}") for rank, name in enumerate("abcdef")))
    people = [
        a_member(seat.name, domain=seat.domain, role=Role.ACTIVE, rank=seat.rank, infra_rank=seat.rank)
        for seat in last.seats
    ]
    given = with_members(a_run(last=last, min=2, max=6, segment=2), *people)
    back = called_back(lend(given, "c", 4))
    assert back is not None and back.recall.leavers == {an_id("c")}
    assert seated(formed_without(lend(given, "c", 4))) == ["a", "b", "e", "f"]
    back = called_back(lend(given, "c", 2))
    assert back is not None and back.recall.leavers == {an_id("c"), an_id("e"), an_id("f")}
    assert seated(formed_without(lend(given, "c", 2))) == ["a", "b"]


def test_the_order_to_lend_changes_nothing_where_it_is_known() -> None:
    given = lend(a_run("a b", max=2), "b", 1)
    assert lend(given, "b", 1) is given
    assert transitions.reconfigure(given, given.settings, 1, NOW) is given, "as it was"
    assert transitions.reconfigure(given, given.settings, 1, NOW, {}).lent == {}


# Coming back


def test_one_that_comes_back_is_seated_at_once() -> None:
    given = formed_without(lend(a_run("a b c", max=3, scale_debounce_s=60.0), "b", 2))
    back = called_back(lend(given, "", 3))
    assert back is not None and back.recall.cause is Cause.GROW
    assert seated(formed_without(lend(given, "", 3))) == ["a", "c", "b"]


def test_one_that_comes_back_goes_before_a_newcomer() -> None:
    given = formed_without(lend(a_run("a b c", max=3), "b", 2))
    given = with_members(given, a_member("n", joined_at=NOW))
    assert seated(formed_without(lend(given, "", 3))) == ["a", "c", "b"]


def test_only_one_that_comes_back_has_to_show_its_health() -> None:
    given = formed_without(lend(a_run("a b", max=2), "b", 1))
    given = with_members(given, replace(given.members[an_id("b")], checks_health=True))
    assert isinstance(decide(given, NOW).action, Stay)
    assert decide(lend(given, "", 2), NOW).action == CheckHealth((an_id("b"),))


# Sizes


def failed(given: Run) -> Run:
    """Its first rank failed in a round without progress, everyone has been heard since, and nobody is left of it."""
    assert given.round is not None
    closed = replace(
        given.round,
        recall=a_recall(Cause.FAILURE, NOW - 1.0),
        exits={0: an_exit(0, worker="a")},
        first_failed_at=NOW - 1.0,
        first_failed_rank=0,
    )
    return all_gone(replace(given, round=closed))


def test_a_size_that_needs_lent_workers_is_not_gone_back_to_and_the_failure_costs_a_restart() -> None:
    given = failed(formed_without(lend(a_run("a b c", max=3), "b", 2)))
    assert given.proven == 3
    after, made = settle(given, NOW)
    assert after.taken_back is None and after.restarts_used == 1
    assert seated(after) == ["a", "c"] and isinstance(made[0].action, Release)
    spent = replace(given, restarts_used=3)
    assert isinstance(decide(spent, NOW).action, Finish)


def test_a_size_that_needs_no_lent_worker_is_gone_back_to() -> None:
    given = formed_without(lend(a_run("a b c", "x", max=3), "b", 2))
    after, _ = settle(failed(given), NOW)
    assert after.taken_back is not None and after.taken_back.size == 3 and after.restarts_used == 0


def test_to_lend_asks_for_no_size_again_that_did_not_work() -> None:
    back = TakenBack(6, 3, "it did not")
    given = replace(a_run("a b c", "x y z", max=6), taken_back=back)
    assert lend(given, "z", 5).aim == 3 and lend(given, "z", 5).taken_back == replace(back, target=5)
    assert lend(lend(given, "z", 5), "", 6).aim == 3
    assert lend(given, "a x y z", 2).aim == 2
    assert sizes.asked(given, 5).aim == 5, "somebody asks for it"


def test_a_size_that_worked_before_is_not_forgotten_by_lending() -> None:
    given = formed_without(lend(a_run("a b c", max=3), "b", 2))
    assert given.round is not None
    works = replace(given, round=replace(given.round, progress={0: Progress(7, NOW)}))
    again = formed_without(lend(works, "", 3))
    assert (again.proven, again.best_step) == (2, 7)


# What others see


def test_a_lent_worker_is_shown_with_who_has_its_gpus() -> None:
    given = lend(a_run("a b", "x", max=2), "b x", 1)
    shown = {one["name"]: one for one in views.view(RunId("r"), 1, given, "", NOW)["members"]}
    assert (shown["x"]["role"], shown["x"]["note"]) == ("lent", WITH_P2)
    assert (shown["b"]["role"], shown["b"]["note"]) == (Role.ACTIVE, WITH_P2), "it still has a rank"
    assert views.view(RunId("r"), 1, given, "", NOW)["spares"] == 0
    assert (shown["a"]["role"], shown["a"]["note"]) == (Role.ACTIVE, "")


def test_what_is_kept_of_a_run_tells_who_is_lent_and_older_records_tell_nothing() -> None:
    kept = records.write(records.record(RunId("r"), 1, lend(a_run("a b", "x", max=2), "x", 2)))
    assert records.read(kept).lent == {"x": WITH_P2}
    del kept["lent"]
    assert records.read(kept).lent == {}


def test_a_record_adds_to_those_that_are_lent_and_takes_nobody_away() -> None:
    given = lend(a_run("a b", "x", max=2), "x", 2)
    assert transitions.lent_too(given, {"x": "other", "b": "p3"}).lent == {"x": WITH_P2, "b": "p3"}
    assert transitions.lent_too(given, {}) is given


def test_what_has_changed_is_told() -> None:
    given = lend(a_run("a b c", max=3), "b", 2)
    assert lending.changes({}, given) == f"b lends its GPUs: {WITH_P2}"
    assert lending.changes({"a": "", "b": ""}, given) == "a has its GPUs again"
    assert lending.changes({"b": ""}, given) == ""


# Whether nothing is left


def seated_and(given: Run, **known: Any) -> Run:
    assert given.round is not None
    return replace(given, round=replace(given.round, **known))


def a_large(*seats: Seat) -> Run:
    return replace(a_run("a", "w"), round=replace(a_round("a"), seats=seats))


LENT: Mapping[str, str] = {"w": WITH_P2}
OUT = a_run("a b", "w", max=3)
IN = a_run("a w", max=3)


@pytest.mark.parametrize(
    ("given", "vacated"),
    [
        (OUT, True),
        (IN, False),
        (recalled(IN, Cause.SHRINK), False),
        (recalled(IN, Cause.SHRINK, gone="a"), False),
        (recalled(IN, Cause.SHRINK, gone="w"), True),
        (recalled(OUT, Cause.LOSS), True),
        (seated_and(IN, finished=frozenset({an_id("w")})), False),
        (seated_and(without(IN, "w"), fences={an_id("w"): NOW + 1.0}), False),
        (seated_and(without(IN, "w"), fences={an_id("w"): NOW}), True),
        (without(IN, "w"), False),
        (a_run(waiting="a w"), True),
        (a_run(waiting="a"), False),
        (replace(OUT, not_before=NOW + 1.0), False),
        (replace(OUT, not_before=NOW), True),
        (a_large(a_seat(0, "a"), unknown_seat(1)), False),
        (a_large(a_seat(0, "a"), a_seat(1, "b")), True),
    ],
)
def test_a_worker_is_vacated_when_no_rank_of_it_can_run(given: Run, vacated: bool) -> None:
    assert lending.vacated(replace(given, lent=LENT), "w", NOW) is vacated
    assert not lending.vacated(given, "w", NOW), "it is not lent"


def test_a_run_that_is_not_open_tells_nothing() -> None:
    assert not lending.vacated(None, "w", NOW)


def test_one_of_the_same_name_that_came_since_does_not_vouch_for_the_one_before() -> None:
    given = replace(IN, lent=LENT, members={})
    given = with_members(given, replace(a_member("w"), member_id=an_id("another")))
    assert not lending.vacated(given, "w", NOW)


@pytest.mark.parametrize("role", Role)
def test_a_lent_member_gets_no_rank_whatever_its_role(role: Role) -> None:
    given = replace(with_members(a_run("a", min=1, max=2), a_member("w", role=role)), lent=LENT)
    assert seated(settle(given, NOW)[0]) == ["a"]


# Ending


def holding(*steps: tuple[int, int, int]) -> Holding:
    """Rank, ranks, round of what is kept of some step."""
    return Holding(tuple(Held(rank, ranks, number, 5, 1) for rank, ranks, number in steps))


def test_a_lent_worker_may_end_once_the_others_train_without_it_and_have_kept_a_step() -> None:
    given = lend(a_run("a b", max=2), "b", 1)
    assert not lending.dispensable(given, "b", NOW), "it trains"
    given = formed_without(given)
    assert not lending.dispensable(given, "b", NOW), "the others do not run yet"
    assert given.round is not None
    number = given.round.number
    given = transitions.up(given, an_id("a"), number, NOW)
    assert lending.dispensable(given, "b", NOW), "nobody keeps anything"
    kept = replace(given, holdings={an_id("a"): holding((0, 2, 0)), an_id("b"): holding((1, 2, 0))})
    assert not lending.dispensable(kept, "b", NOW), "what it has may be needed to go on"
    kept = replace(kept, holdings={**kept.holdings, an_id("a"): holding((0, 1, number))})
    assert lending.dispensable(kept, "b", NOW)
    assert not lending.dispensable(kept, "a", NOW), "it is not lent"


def test_a_lent_worker_that_has_not_joined_may_end() -> None:
    assert lending.dispensable(lend(a_run("a", min=1, max=2), "b", 1), "b", NOW)

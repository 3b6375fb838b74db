"""Forming, mending and resizing the world, rule by rule, on virtual time."""

from __future__ import annotations

import pytest

from muster.core.member.orders import Order
from muster.types.frames import ErrorFrame, Frame, LearnedFrame, ModulesFrame
from muster.types.world import OutcomeState, Role
from tests.simulator.fleet import SimulatedFleet
from tests.simulator.worlds import a_training, a_world, by_role, codes, everyone_leaves, told

# The first round


def _code(answer: Frame) -> str:
    assert isinstance(answer, ErrorFrame)
    return answer.code


def test_the_first_round_forms_at_once_when_target_and_spares_are_here() -> None:
    fleet = a_world("a b c d", min=1, max=4, spares=1)
    assert fleet.until("training", lambda: fleet.trains(0, 3)) < 0.1
    assert by_role(fleet, Role.SPARE) == ["d"]


def test_the_first_round_waits_the_last_call_after_min_was_reached() -> None:
    fleet = a_world("a", min=2, max=4)
    fleet.advance(5.0)
    assert "1 of at least 2 workers: 1 missing" in fleet.coordinator.protocol.at.reason
    fleet.join("b", settings={"min": 2, "max": 4})
    assert fleet.until("training", lambda: fleet.trains(0, 2)) == pytest.approx(2.0, abs=0.1)


def test_below_min_the_reason_says_how_many_are_missing_and_who_left() -> None:
    fleet = a_training("a b", size=2, min=2, max=2)
    fleet.agent("b").kill()
    fleet.advance(5.0)
    assert fleet.coordinator.protocol.at.reason == "1 of at least 2 workers: 1 missing; left: b"


def test_below_min_for_too_long_is_a_failure() -> None:
    fleet = a_training("a b", size=2, min=2, max=2, below_min_timeout_s=30.0)
    fleet.agent("b").kill()
    took = everyone_leaves(fleet, 60.0)
    assert took == pytest.approx(30.0, abs=0.5)
    assert fleet.outcome is not None and fleet.outcome.reason == "below_minimum"
    assert codes(fleet)["a"] == 1


def test_those_that_come_back_above_min_get_a_new_last_call() -> None:
    fleet = a_training("a b c", size=3, min=2, max=3)
    for name in ("a", "b", "c"):
        fleet.agent(name).kill()
    fleet.advance(10.0)
    fleet.join_all("d", "e", settings={"min": 2, "max": 3})
    fleet.advance(1.0)
    fleet.join("f", settings={"min": 2, "max": 3})
    fleet.until("training", lambda: fleet.trains(1))
    assert len(fleet.seats) == 3, "one round of three, not one of two and then another"


def test_the_first_round_is_ordered_by_infra_rank_where_all_have_one() -> None:
    fleet = SimulatedFleet(1)
    for name, infra in (("a", 7), ("b", 3), ("c", 5)):
        fleet.join(name, settings={"min": 3, "max": 3}, infra_rank=infra)
    fleet.until("training", lambda: fleet.trains(0, 3))
    assert fleet.seats == ["b", "c", "a"]


def test_the_first_round_is_ordered_by_natural_name_otherwise() -> None:
    fleet = a_world("w10 w9 w2", min=3, max=3)
    fleet.until("training", lambda: fleet.trains(0, 3))
    assert fleet.seats == ["w2", "w9", "w10"]


# Names, ranks and settings that clash


def test_a_duplicate_infra_rank_is_refused_and_names_both() -> None:
    fleet = SimulatedFleet(1)
    fleet.join("a", settings={"min": 2, "max": 2}, infra_rank=4)
    fleet.advance(0.1)
    second = fleet.join("b", settings={"min": 2, "max": 2}, infra_rank=4)
    fleet.advance(0.1)
    assert second.code == 1
    assert "infra rank 4 is claimed by a (a, pid 1) and b (b, pid 1)" in second.refusal


def test_the_same_name_is_refused_while_the_old_bearer_renews() -> None:
    fleet = a_training("a b", size=2, min=2, max=2)
    twin = fleet.join("a", settings={"min": 2, "max": 2}, machine="elsewhere")
    fleet.advance(2.5)
    assert twin.code == 1 and "the name 'a' is taken" in twin.refusal
    assert fleet.trains(0, 2), "the one that was here is not disturbed"


def test_the_same_name_waits_out_the_lease_of_one_that_lost_its_power() -> None:
    fleet = a_training("a b", size=2, min=2, max=2)
    fleet.agent("b").power_off()
    again = fleet.join("b", settings={"min": 2, "max": 2})
    fleet.advance(0.5)
    assert again.code is None and not again.connection.up, "held"
    fleet.until("training", lambda: fleet.trains(1, 2), within_s=4.0)
    assert fleet.seats == ["a", "b"]


def test_other_settings_are_refused_with_both_values_shown() -> None:
    fleet = a_world("a", min=2, max=3)
    fleet.advance(0.1)
    odd = fleet.join("b", settings={"min": 2, "max": 3, "max_restarts": 7})
    fleet.advance(0.1)
    assert odd.code == 1 and "max_restarts is 3, this member has 7" in odd.refusal


def test_settings_of_a_newer_version_are_ignored() -> None:
    fleet = a_world("a", min=2, max=2)
    fleet.join("b", settings={"min": 2, "max": 2, "frobnicate": 1})
    fleet.until("training", lambda: fleet.trains(0, 2))


# A lost member's rank


def test_a_spare_takes_the_lost_rank_at_once_and_survivors_keep_theirs() -> None:
    fleet = a_training("a b c d", size=3, min=3, max=4, spares=1, max_restarts=0)
    fleet.agent("b").kill()
    assert fleet.until("round 1", lambda: fleet.trains(1, 3)) < 0.4
    assert fleet.seats == ["a", "d", "c"]
    assert fleet.run.restarts_used == 0


@pytest.mark.parametrize(
    ("spares", "chosen"),
    [
        ({"x": ("d2", 3), "y": ("d1", 9)}, "y"),  # same domain first
        ({"x": ("d2", 8), "y": ("d3", 5)}, "y"),  # then the lowest infra rank
    ],
)
def test_which_spare_takes_a_lost_rank(spares: dict[str, tuple[str, int]], chosen: str) -> None:
    fleet = SimulatedFleet(1)
    settings: dict[str, object] = {"min": 2, "max": 4, "target": 2, "spares": 2}
    for name, domain, infra in (("a", "d0", 0), ("b", "d1", 1)):
        fleet.join(name, settings=settings, domain=domain, infra_rank=infra)
    for name, (domain, infra) in spares.items():
        fleet.join(name, settings=settings, domain=domain, infra_rank=infra)
    fleet.until("training", lambda: fleet.trains(0, 2))
    fleet.agent("b").kill()
    fleet.until("round 1", lambda: fleet.trains(1, 2))
    assert fleet.seats == ["a", chosen]


def test_of_equal_spares_the_one_that_waited_longest_takes_the_rank() -> None:
    fleet = a_world("a b", min=2, max=2, spares=2)
    fleet.advance(0.5)
    fleet.join("z", settings={"min": 2, "max": 2, "spares": 2})
    fleet.advance(0.5)
    fleet.join("c", settings={"min": 2, "max": 2, "spares": 2})
    fleet.until("training", lambda: fleet.trains(0, 2))
    fleet.agent("a").kill()
    fleet.until("round 1", lambda: fleet.trains(1, 2))
    assert fleet.seats == ["z", "b"] and by_role(fleet, Role.SPARE) == ["c"]


def test_without_a_spare_the_last_call_ends_and_the_world_shrinks_in_order() -> None:
    fleet = a_training("a b c d", size=4, min=2, max=4)
    fleet.agent("b").kill()
    assert fleet.until("round 1", lambda: fleet.trains(1, 3)) == pytest.approx(2.0, abs=0.1)
    assert fleet.seats == ["a", "c", "d"]


def test_a_replacement_inside_the_last_call_gets_the_lost_rank() -> None:
    fleet = a_training("a b c", size=3, min=2, max=3)
    fleet.agent("b").kill()
    fleet.advance(1.0)
    fleet.join("x", settings={"min": 2, "max": 3})
    assert fleet.until("round 1", lambda: fleet.trains(1, 3)) < 0.1
    assert fleet.seats == ["a", "x", "c"]


# Growing


def test_a_newcomer_to_a_full_world_is_parked_and_disturbs_nothing() -> None:
    fleet = a_training("a b", size=2, min=2, max=2)
    fleet.join("c", settings={"min": 2, "max": 2})
    fleet.advance(5.0)
    assert fleet.trains(0, 2) and by_role(fleet, Role.SPARE) == ["c"] and not told(fleet, "recall")


def test_newcomers_below_target_are_gathered_and_one_round_forms() -> None:
    fleet = a_training("a b", size=2, min=2, max=5)
    fleet.join("c", settings={"min": 2, "max": 5})
    fleet.advance(0.3)
    fleet.join("d", settings={"min": 2, "max": 5})
    assert fleet.until("round 1", lambda: fleet.trains(1)) == pytest.approx(0.25, abs=0.1)
    assert fleet.seats == ["a", "b", "c", "d"] and fleet.run.restarts_used == 0


def test_gathering_ends_early_when_the_target_is_reached() -> None:
    fleet = a_training("a b", size=2, min=2, max=3)
    fleet.join("c", settings={"min": 2, "max": 3})
    assert fleet.until("round 1", lambda: fleet.trains(1, 3)) < 0.3


# set_target


def test_a_higher_target_gathers_spares() -> None:
    fleet = a_training("a b c", size=2, min=2, max=3, target=2, spares=1)
    fleet.set_target(3)
    assert fleet.until("round 1", lambda: fleet.trains(1, 3)) < 0.5
    assert fleet.seats == ["a", "b", "c"]


def test_a_lower_target_sends_the_highest_ranks_home_with_exit_0() -> None:
    fleet = a_training("a b c d", size=4, min=2, max=4)
    fleet.set_target(2)
    fleet.until("round 1", lambda: fleet.trains(1, 2))
    fleet.advance(0.1)
    assert fleet.seats == ["a", "b"]
    assert codes(fleet) == {"a": None, "b": None, "c": 0, "d": 0}
    assert fleet.outcome is None, "a leaver's 0 is never success"


def test_a_lower_target_parks_leavers_while_spares_are_short() -> None:
    fleet = a_training("a b c d", size=3, min=1, max=4, target=3, spares=2, last_call_s=0.5)
    fleet.set_target(1)
    fleet.until("round 1", lambda: fleet.trains(1, 1))
    fleet.advance(0.1)
    stayed = by_role(fleet, Role.SPARE)
    assert "d" in stayed and len(stayed) == 2, "the spare stays, one leaver joins it"
    assert sorted(name for name, code in codes(fleet).items() if code == 0) == sorted({"b", "c"} - set(stayed))


def test_a_lower_target_takes_out_the_names_given() -> None:
    fleet = a_training("a b c", size=3, min=2, max=3)
    fleet.set_target(2, "a")
    fleet.until("round 1", lambda: fleet.trains(1, 2))
    assert fleet.seats == ["b", "c"]


def test_names_given_while_a_round_is_closing_leave_too() -> None:
    fleet = a_training("a b c d", size=4, min=2, max=4)
    fleet.agent("d").kill()
    fleet.advance(0.05)
    fleet.set_target(2, "a")
    fleet.until("round 1", lambda: fleet.trains(1, 2))
    fleet.advance(0.1)
    assert fleet.seats == ["b", "c"] and codes(fleet)["a"] == 0


def test_those_sent_away_stay_when_the_target_is_raised_again_in_time() -> None:
    fleet = a_training("a b c", size=3, min=1, max=3)
    fleet.set_target(2)
    fleet.until("the round is called back", lambda: told(fleet, "recall"))
    fleet.set_target(3)
    fleet.until("round 1", lambda: fleet.trains(1, 3))
    fleet.advance(1.0)
    assert fleet.seats == ["a", "b", "c"] and len(fleet.present) == 3


def test_one_that_was_to_leave_fills_the_place_of_one_that_was_lost_meanwhile() -> None:
    fleet = a_training("a b c", size=3, min=2, max=3, below_min_timeout_s=5.0)
    fleet.set_target(2)
    fleet.agent("a").kill()
    fleet.until("round 1", lambda: fleet.trains(1, 2), within_s=4.0)
    assert fleet.seats == ["b", "c"]


def test_a_target_out_of_bounds_is_refused() -> None:
    fleet = a_training("a b c", size=3, min=2, max=3)
    assert _code(fleet.set_target(4)) == "out_of_bounds"
    assert _code(fleet.set_target(2, "zoe")) == "not_found"


# Segments


def a_segmented_world() -> SimulatedFleet:
    """13 members in domains of 6, 4 and 3; whole segments of 4."""
    fleet = SimulatedFleet(1)
    domains = ["A"] * 6 + ["B"] * 4 + ["C"] * 3
    for infra, domain in enumerate(domains):
        fleet.join(f"w{infra}", settings=SEGMENTED, infra_rank=infra, domain=domain)
    fleet.until("training", lambda: fleet.trains(0, 8))
    return fleet


SEGMENTED: dict[str, object] = {"min": 8, "max": 12, "segment": 4, "spares": 1, "target": 12}


def test_only_whole_segments_of_one_domain_are_active() -> None:
    fleet = a_segmented_world()
    assert fleet.seats == [f"w{i}" for i in (0, 1, 2, 3, 6, 7, 8, 9)]
    assert len(by_role(fleet, Role.SPARE)) == 5


def test_a_spare_replaces_only_within_its_domain() -> None:
    fleet = a_segmented_world()
    fleet.agent("w1").kill()
    fleet.until("round 1", lambda: fleet.trains(1, 8))
    assert fleet.seats == [f"w{i}" for i in (0, 4, 2, 3, 6, 7, 8, 9)]


def test_the_next_whole_segment_takes_the_ranks_of_a_broken_one() -> None:
    fleet = a_segmented_world()
    fleet.set_target(8)
    fleet.join("w13", settings=SEGMENTED, infra_rank=13, domain="C")
    fleet.advance(1.0)
    assert fleet.trains(0, 8)
    fleet.agent("w7").kill()
    fleet.until("round 1", lambda: fleet.trains(1, 8))
    assert fleet.seats == [f"w{i}" for i in (0, 1, 2, 3, 10, 11, 12, 13)]
    assert {"w6", "w8", "w9"} <= set(by_role(fleet, Role.SPARE))


def test_a_broken_segment_without_a_replacement_leaves_the_world_below_min() -> None:
    fleet = a_segmented_world()
    fleet.agent("w7").kill()
    fleet.advance(5.0)
    assert "4 of at least 8 workers in whole segments of 4: 4 missing" in fleet.coordinator.protocol.at.reason
    fleet.join("w13", settings=SEGMENTED, infra_rank=13, domain="B")
    fleet.until("round 1", lambda: fleet.trains(1, 8))
    assert fleet.seats == ["w0", "w1", "w2", "w3", "w6", "w13", "w8", "w9"]


def test_a_member_without_a_domain_is_refused_where_segments_are_asked_for() -> None:
    fleet = SimulatedFleet(1)
    odd = fleet.join("a", settings=SEGMENTED)
    fleet.advance(0.1)
    assert odd.code == 1 and "has no --domain, and segment=4 needs one" in odd.refusal


# Bad nodes


def test_a_member_that_fails_its_first_health_check_is_parked_with_the_reason() -> None:
    fleet = a_world("a", min=1, max=1, last_call_s=0.5, spares=1)
    sick = fleet.join("b", settings={}, checks_health=True, healthy=False)
    fleet.until("training", lambda: fleet.trains(0, 1))
    fleet.advance(0.5)
    assert sick.member_id in fleet.run.members
    member = fleet.run.members[sick.member_id]
    assert member.role is Role.PARKED and "health check failed" in member.note


def test_an_unfit_member_that_got_a_rank_before_it_could_say_so_gives_it_up() -> None:
    fleet = SimulatedFleet(1)
    settings: dict[str, object] = {"min": 1, "max": 1, "spares": 1}
    fleet.join("a", settings=settings, checks_health=True, healthy=False)
    fleet.join("b", settings=settings, checks_health=True)
    fleet.until("b trains", lambda: fleet.trains() and fleet.seats == ["b"])
    assert by_role(fleet, Role.PARKED) == ["a"] and fleet.run.restarts_used == 0


def test_a_spare_shows_that_it_is_well_before_it_is_promoted() -> None:
    fleet = SimulatedFleet(1)
    settings: dict[str, object] = {"min": 2, "max": 2, "spares": 2}
    for name in ("a", "b", "c", "d"):
        fleet.join(name, settings=settings, checks_health=True)
        fleet.advance(0.05)
    fleet.until("training", lambda: fleet.trains(0, 2))
    for name in by_role(fleet, Role.ACTIVE)[:1]:
        fleet.agent(name).kill()
    fleet.until("round 1", lambda: fleet.trains(1, 2))
    first = next(name for name in fleet.seats if name in "cd")
    fleet.agent("d" if first == "c" else "c").healthy = False
    fleet.agent(first).kill()
    fleet.advance(3.0)
    assert (
        "parked" in fleet.coordinator.protocol.at.reason
        and "health check failed" in fleet.coordinator.protocol.at.reason
    )


def test_growth_asks_for_health_before_it_disturbs_the_world() -> None:
    fleet = SimulatedFleet(1)
    settings: dict[str, object] = {"min": 1, "max": 2, "target": 1, "spares": 1}
    for name in ("a", "b"):
        fleet.join(name, settings=settings, checks_health=True)
    fleet.until("training", lambda: fleet.trains(0, 1))
    fleet.agent(by_role(fleet, Role.SPARE)[0]).healthy = False
    fleet.set_target(2)
    fleet.advance(5.0)
    assert fleet.trains(0, 1) and not told(fleet, "recall")


def test_a_worker_whose_ranks_fail_first_twice_is_swapped_and_parked() -> None:
    fleet = a_training("a b c", size=2, min=2, max=2, spares=1)
    fleet.fail("b")
    fleet.until("round 1", lambda: fleet.trains(1, 2))
    assert fleet.seats == ["a", "b"], "once is no pattern"
    fleet.fail("b")
    fleet.until("round 2", lambda: fleet.trains(2, 2))
    assert fleet.seats == ["a", "c"] and by_role(fleet, Role.PARKED) == ["b"]
    assert told(fleet, "parked") == ["b: its ranks failed first twice, in rounds 0 and 1"]


def test_a_bad_worker_keeps_its_place_where_there_is_no_spare() -> None:
    fleet = a_training("a b", size=2, min=2, max=2)
    for number in (1, 2):
        fleet.fail("b")
        fleet.until("the next round", lambda number=number: fleet.trains(number, 2))  # type: ignore[misc]
    assert fleet.seats == ["a", "b"]


def test_a_bad_worker_is_better_than_none() -> None:
    fleet = a_training("a b c", size=2, min=2, max=2, spares=1)
    for number in (1, 2):
        fleet.fail("b")
        fleet.until("the next round", lambda number=number: fleet.trains(number, 2))  # type: ignore[misc]
    fleet.agent("c").kill()
    fleet.until("round 3", lambda: fleet.trains(3, 2))
    assert fleet.seats == ["a", "b"]
    fleet.finish_work()
    everyone_leaves(fleet)
    assert fleet.outcome is not None and fleet.outcome.state is OutcomeState.SUCCEEDED


# What ranks import


def test_what_ranks_import_is_told_to_those_without_a_rank_now_and_later() -> None:
    fleet = a_training("a b c", size=2, min=2, max=3, spares=1)
    heard: dict[str, list[tuple[str, ...]]] = {}

    def listen(name: str) -> None:
        state = fleet.agent(name).state
        hear = state.heard

        def heard_by(frame: Frame, now: float) -> list[Order]:
            if isinstance(frame, ModulesFrame):
                heard.setdefault(name, []).append(frame.modules)
            return hear(frame, now)

        state.heard = heard_by  # type: ignore[method-assign]

    for name in "abc":
        listen(name)
    for modules in (("torch", "late"), ("late", "later", "os")):
        fleet.agent("a").connection.send(LearnedFrame(modules=modules))
        fleet.advance(0.5)
    fleet.join("d", settings={"min": 2, "max": 3})
    listen("d")
    fleet.advance(3.0)
    assert heard.pop("d")[0] == ("torch", "late", "later")
    assert heard == {"c": [("torch", "late"), ("torch", "late", "later")]}

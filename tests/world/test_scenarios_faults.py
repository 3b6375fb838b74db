"""Silence, fences, restarts and blame, on virtual time."""

from __future__ import annotations

import re

import pytest

from muster.types.frames import FinishedFrame, Frame, HelloFrame, StaleFrame
from muster.types.world import LEASE_S, OutcomeState, Role
from tests.simulator.fleet import SimulatedFleet
from tests.simulator.network import DOWN, UP
from tests.simulator.worlds import a_training, by_role, codes, everyone_leaves, told

# Silence and fences


def test_a_closed_connection_is_a_death_seen_at_once() -> None:
    fleet = a_training("a b c", size=2, min=2, max=2, spares=1)
    fleet.agent("b").kill()
    assert fleet.until("the loss is seen", lambda: told(fleet, "lost")) < 0.01


def test_a_silent_member_dies_when_its_lease_runs_out() -> None:
    fleet = a_training("a b c", size=2, min=2, max=2, spares=1)
    fleet.agent("b").power_off()
    assert 0.6 * LEASE_S < fleet.until("the loss is seen", lambda: told(fleet, "lost")) <= LEASE_S


def test_where_agent_and_guard_are_unreachable_the_clock_decides() -> None:
    fleet = a_training("a b c", size=2, min=2, max=2, spares=1)
    fleet.agent("b").power_off()
    fleet.until("the loss is seen", lambda: told(fleet, "lost"))
    assert fleet.until("round 1", lambda: fleet.trains(1, 2)) == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("what", ["kill_both", "kill_worker"])
def test_a_killed_worker_is_replaced_at_once_though_nobody_reports_it(what: str) -> None:
    fleet = a_training("a b c", size=2, min=2, max=2, spares=1)
    fleet.advance(0.1)  # lifelines are made after the welcome
    getattr(fleet.agent("b"), what)()
    assert fleet.until("round 1", lambda: fleet.trains(1, 2)) < 0.1
    assert fleet.seats == ["a", "c"] and told(fleet, "gone") == ["b: all its processes ended"]


def test_a_killed_worker_is_waited_out_for_a_lease_where_its_lifeline_proves_nothing() -> None:
    fleet = SimulatedFleet(1)
    fleet.join_all("a", "b", "c", settings={"min": 2, "max": 2, "spares": 1}, relayed=True)
    fleet.until("round 0", lambda: fleet.trains(0, 2))
    fleet.advance(0.1)
    fleet.agent("b").kill_worker()
    assert fleet.until("round 1", lambda: fleet.trains(1, 2)) == pytest.approx(LEASE_S + 0.5, abs=0.05)


def test_a_worker_that_is_killed_under_a_new_coordinator_is_replaced_at_once() -> None:
    """Its ranks are older than the lifeline to that one."""
    fleet = a_training("a b c", size=2, min=2, max=2, spares=1)
    fleet.crash(back_after_s=0.3)
    fleet.until("the coordinator died", lambda: not fleet.coordinator.alive)
    fleet.until("round 0 goes on", lambda: fleet.trains(0, 2))
    fleet.advance(0.1)
    fleet.agent("b").kill_worker()
    assert fleet.until("round 1", lambda: fleet.trains(1, 2)) < 0.1


def test_a_stopped_member_is_out_of_its_round_and_parks_as_a_spare_when_it_continues() -> None:
    fleet = a_training("a b c", size=2, min=2, max=2, spares=1, max_restarts=0)
    fleet.stop(fleet.agent("b"), for_s=6.0)
    fleet.until("round 1", lambda: fleet.trains(1, 2), within_s=4.0)
    assert fleet.seats == ["a", "c"]
    fleet.until("b is back", lambda: "b" in by_role(fleet, Role.SPARE))
    fleet.advance(1.0)
    assert fleet.trains(1, 2), "its return disturbs nothing"


def test_one_that_was_lost_by_silence_and_is_heard_from_again_was_a_false_alarm() -> None:
    fleet = a_training("a b c", size=2, min=2, max=2, spares=1)
    fleet.cut(fleet.agent("b"), for_s=3.0)
    fleet.until("round 1", lambda: fleet.trains(1, 2), within_s=4.0)
    assert not told(fleet, "false-alarm"), "it may be dead"
    fleet.until("b is back", lambda: "b" in by_role(fleet, Role.SPARE))
    (alarm,) = told(fleet, "false-alarm")
    silent_s = re.fullmatch(r"b: silent for (\d\.\d) s, then heard from again", alarm)
    assert silent_s and 2.9 < float(silent_s[1]) < 5.0
    fleet.advance(5.0)
    assert fleet.run.false_alarms == len(told(fleet, "false-alarm")) == 1


def test_one_whose_guard_gave_it_up_and_that_wakes_was_a_false_alarm() -> None:
    fleet = a_training("a b c", size=2, min=2, max=2, spares=1)
    fleet.stop(fleet.agent("b"), for_s=3.0)
    fleet.until("b is back", lambda: told(fleet, "lost") and "b" in by_role(fleet, Role.SPARE), within_s=9.0)
    assert len(told(fleet, "false-alarm")) == 1


def test_members_that_gave_up_a_silent_coordinator_were_alarmed_in_vain() -> None:
    fleet = a_training("a b c", size=2, min=2, max=2, spares=1)
    fleet.pause(for_s=2.0)
    fleet.until("round 1", lambda: fleet.trains(1, 2), within_s=12.0)
    assert {alarm.partition(":")[0] for alarm in told(fleet, "false-alarm")} == {"a", "b"}


@pytest.mark.parametrize("kill", ["kill", "kill_both", "power_off"])
def test_who_is_really_dead_is_no_false_alarm(kill: str) -> None:
    fleet = a_training("a b c", size=2, min=2, max=2, spares=1)
    getattr(fleet.agent("b"), kill)()
    fleet.until("round 1", lambda: fleet.trains(1, 2))
    fleet.join("b")
    fleet.until("another bears its name", lambda: "b" in by_role(fleet, Role.SPARE), within_s=9.0)
    assert not told(fleet, "false-alarm")


def test_a_stop_shorter_than_the_lease_changes_nothing() -> None:
    fleet = a_training("a b", size=2, min=2, max=2)
    fleet.stop(fleet.agent("b"), for_s=0.6)
    fleet.advance(5.0)
    assert fleet.trains(0, 2) and not told(fleet, "lost")


@pytest.mark.parametrize("directions", [{UP, DOWN}, {UP}, {DOWN}])
def test_the_ranks_of_a_member_that_is_cut_off_end_before_another_round_starts(directions: set[str]) -> None:
    fleet = a_training("a b c", size=2, min=2, max=2, spares=1)
    fleet.cut(fleet.agent("b"), directions=frozenset(directions))
    fleet.until("its ranks end", lambda: not fleet.agent("b").machine.ranks, within_s=2.1)
    fleet.until("round 1", lambda: fleet.trains(1, 2), within_s=3.0)
    assert fleet.seats == ["a", "c"]


def test_one_that_was_cut_off_before_the_release_reached_it_does_not_hold_up_the_next() -> None:
    fleet = SimulatedFleet(1)
    fleet.join_all("a", "b", settings={"min": 2, "max": 2})
    fleet.at_turn(lambda: fleet.cut(fleet.agent("b"), for_s=3.0))
    fleet.until("it is cut off", lambda: not fleet.network.reaches(fleet.agent("b").machine.name))
    assert fleet.until("round 1", lambda: fleet.trains(1, 2), within_s=8.0)


def test_a_stubborn_leaver_that_is_cut_off_ends_its_ranks_with_its_lease() -> None:
    fleet = SimulatedFleet(1)
    fleet.join_all("a", "b", settings={"min": 1, "max": 3})
    fleet.join("c", settings={"min": 1, "max": 3}, stubborn=True)
    fleet.until("round 0", lambda: fleet.trains(0, 3))
    fleet.set_target(2)
    fleet.advance(0.1)
    fleet.cut(fleet.agent("c"))
    assert fleet.until("round 1", lambda: fleet.trains(1, 2)) < 3.0, "not the fifteen seconds of its grace"


def test_a_member_that_is_cut_off_and_stopped_ends_its_ranks_with_its_lease_too() -> None:
    fleet = a_training("a b c", size=2, min=2, max=2, spares=1)
    fleet.cut(fleet.agent("b"))
    fleet.advance(1.2)
    fleet.stop(fleet.agent("b"))
    fleet.until("round 1", lambda: fleet.trains(1, 2), within_s=2.0)


def test_a_release_that_is_read_after_the_lease_starts_nothing() -> None:
    fleet = a_training("a b c", size=2, min=2, max=2, spares=1)
    fleet.fail("a")
    fleet.until("b confirmed its stop", lambda: fleet.run.round and len(fleet.run.round.gone) == 2)
    fleet.stop(fleet.agent("b"), for_s=8.0)
    fleet.until("round 1 is released", lambda: fleet.run.next_round == 2)
    fleet.until("round 2", lambda: fleet.trains(2, 2), within_s=6.0)
    fleet.advance(8.0)
    assert fleet.trains(2, 2) and "b" in by_role(fleet, Role.SPARE)


def test_a_member_whose_guard_ended_its_ranks_gets_no_rank_until_it_says_hello_again() -> None:
    fleet = a_training("a b", size=2, min=1, max=2, last_call_s=0.3)
    fleet.fail("a")
    fleet.stop(fleet.agent("b"), for_s=3.0)
    fleet.until("the guard reports", lambda: told(fleet, "gone"), within_s=3.0)
    fleet.until("round 1", lambda: fleet.trains(1, 1))
    assert fleet.seats == ["a"]


def test_a_loss_is_told_once_also_if_the_guard_is_the_first_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = a_training("a b c", size=2, min=2, max=2, spares=1)
    lost = fleet.agent("b").connection
    with monkeypatch.context() as late:
        late.setattr(lost, "close", lambda: None)
        fleet.agent("b").kill()
    fleet.until("round 1", lambda: fleet.trains(1, 2), within_s=1.0)
    lost.close()
    fleet.advance(1.0)
    assert told(fleet, "lost") == ["b: its guard ended its ranks"]


def test_a_connection_that_breaks_on_one_side_costs_a_round_and_no_restart() -> None:
    fleet = a_training("a b", size=2, min=2, max=2, max_restarts=0)
    fleet.agent("b").reset(guard=False, half=True)
    fleet.until("round 1", lambda: fleet.trains(1, 2), within_s=2.0)
    assert fleet.outcome is None


def test_a_guard_connection_may_break_without_harm() -> None:
    fleet = a_training("a b", size=2, min=2, max=2)
    fleet.agent("b").reset(guard=True, half=False)
    fleet.advance(5.0)
    assert fleet.trains(0, 2)


def test_messages_of_an_older_round_are_answered_with_the_current_one() -> None:
    fleet = a_training("a b c", size=2, min=2, max=2, spares=1)
    fleet.agent("b").kill()
    fleet.until("round 1", lambda: fleet.trains(1, 2))
    heard: list[Frame] = []
    connection = fleet.agent("a").connection
    connection._on_frame = heard.append
    connection.send(FinishedFrame(round=0))
    fleet.advance(0.1)
    assert [frame.round for frame in heard if isinstance(frame, StaleFrame)] == [1]
    assert fleet.run.round is not None and not fleet.run.round.finished


# Restarts and blame


def test_all_failures_of_one_round_are_one_incident() -> None:
    fleet = a_training("a b c", size=3, min=3, max=3)
    for name in ("b", "a", "c"):
        fleet.fail(name, 3)
    fleet.until("round 1", lambda: fleet.trains(1, 3))
    assert fleet.run.restarts_used == 1


def test_the_earliest_failure_is_the_first_even_if_it_is_heard_last() -> None:
    fleet = a_training("a b", size=2, min=2, max=2, max_restarts=0)
    fleet.network.cut(fleet.agent("a").machine.name, frozenset({UP}))
    fleet.fail("a", 5)
    fleet.advance(0.05)
    fleet.fail("b", 6)
    fleet.advance(0.05)
    fleet.network.heal(fleet.agent("a").machine.name)
    everyone_leaves(fleet)
    assert fleet.outcome is not None and fleet.outcome.first_failure is not None


def test_a_failure_followed_by_a_loss_within_the_blame_window_costs_nothing() -> None:
    fleet = a_training("a b c", size=2, min=2, max=2, spares=1, max_restarts=0)
    fleet.fail("a")
    fleet.advance(0.2)
    fleet.agent("b").kill()
    fleet.until("round 1", lambda: fleet.trains(1, 2))
    assert fleet.run.restarts_used == 0


def test_a_failure_followed_by_a_loss_after_the_window_costs_a_restart() -> None:
    fleet = a_training("a b c", size=2, min=2, max=2, spares=1, restart_grace_s=1.0, max_restarts=1)
    fleet.agent("b").machine.ranks[0].stubborn = True
    fleet.fail("a")
    fleet.advance(0.8)
    fleet.agent("b").kill()
    fleet.until("round 1", lambda: fleet.trains(1, 2), within_s=4.0)
    assert fleet.run.restarts_used == 1


def test_a_silent_member_extends_the_hold_until_its_lease_ends() -> None:
    fleet = a_training("a b c", size=2, min=2, max=2, spares=1, max_restarts=0)
    fleet.agent("b").power_off()
    fleet.advance(0.1)
    rank = fleet.agent("a").machine.ranks[0]
    rank.machine.end(rank, 1)
    fleet.advance(0.8)
    assert fleet.outcome is None and "b silent: lost, or slow?" in fleet.coordinator.protocol.at.reason
    fleet.until("round 1", lambda: fleet.trains(1, 2), within_s=3.0)
    assert fleet.run.restarts_used == 0


def test_peers_that_fail_over_a_recall_cost_nothing() -> None:
    fleet = a_training("a b", size=2, min=2, max=3, max_restarts=0, collateral=1.0, seed=5)
    for agent in fleet.present:
        fleet.network.cut(agent.machine.name, frozenset({DOWN}))
    fleet.join("c", settings={})
    fleet.until("the round is called back", lambda: told(fleet, "recall"))
    fleet.network.heal(fleet.agent("a").machine.name)
    fleet.advance(0.4)
    fleet.network.heal(fleet.agent("b").machine.name)
    fleet.until("round 1", lambda: fleet.trains(1, 3))
    assert fleet.run.restarts_used == 0


def test_a_genuine_failure_is_charged_once_everyone_was_heard() -> None:
    fleet = a_training("a b", size=2, min=2, max=2)
    fleet.fail("b")
    assert fleet.until("round 1", lambda: fleet.trains(1, 2)) == pytest.approx(0.3, abs=0.05)
    assert fleet.run.restarts_used == 1


def test_with_the_budget_spent_the_outcome_names_the_failing_rank_and_its_last_words() -> None:
    fleet = a_training("a b c", size=2, min=2, max=2, spares=1, max_restarts=1)
    fleet.fail("b", 3)
    fleet.until("round 1", lambda: fleet.trains(1, 2))
    fleet.fail("b", -9)
    took = everyone_leaves(fleet)
    outcome = fleet.outcome
    assert outcome is not None and (outcome.state, outcome.reason) == (OutcomeState.FAILED, "rank_failed")
    assert outcome.message.startswith("Signal SIGKILL (rank 1); last output: rank 1 gives up")
    assert "worker b, round 1; 1 of 1 restarts used" in outcome.message
    assert codes(fleet) == {"a": 1, "b": 1, "c": 1} and took < 1.0


def test_a_failure_in_the_gap_between_hello_and_welcome_is_not_lost() -> None:
    fleet = a_training("a b", size=2, min=2, max=2)
    fleet.crash(back_after_s=0.0)
    agent = fleet.agent("b")
    hello = agent.connection._hello

    def say_hello_and_fail() -> HelloFrame:
        if agent.machine.ranks:
            fleet.clock.after(0.0, fleet.fail, "b")
        return hello()

    agent.connection._hello = say_hello_and_fail
    fleet.until("round 1", lambda: fleet.trains(1, 2))


def test_a_hang_over_a_member_that_lost_its_power_costs_nothing() -> None:
    fleet = a_training("a b c", size=2, min=2, max=2, spares=1, hang_timeout_s=3.0, lease_s=6.0, max_restarts=0)
    fleet.until("a step is told", lambda: steps_told(fleet))
    fleet.agent("b").power_off()
    fleet.agent("a").machine.ranks[0].hung_at = fleet.clock.now
    fleet.until("the hang is seen", lambda: told(fleet, "recall"), within_s=5.0)
    fleet.until("round 1", lambda: fleet.trains(1, 2), within_s=8.0)


def test_peers_that_fail_over_the_recall_of_a_coordinator_that_died_cost_nothing() -> None:
    fleet = SimulatedFleet(1)
    fleet.join_all("a", "b", "c", settings={"min": 1, "max": 3, "max_restarts": 0}, takes_notice=False)
    fleet.until("round 0", lambda: fleet.trains(0, 3))
    fleet.network.cut(fleet.agent("a").machine.name, frozenset({DOWN}))
    fleet.set_target(2)
    fleet.advance(0.1)
    rank = fleet.agent("a").machine.ranks[0]
    rank.machine.end(rank, 1)
    fleet.crash(back_after_s=0.5)
    fleet.network.heal(fleet.agent("a").machine.name)
    fleet.until("round 1", lambda: fleet.trains(1, 2))


# Hangs and progress


def test_a_hang_is_found_the_rank_that_stopped_first_is_named_and_the_round_restarts() -> None:
    fleet = a_training("a b", size=2, min=2, max=2, hang_timeout_s=5.0)
    fleet.advance(3.0)
    assert fleet.trains(0, 2)
    fleet.hang("b")
    took = fleet.until("round 1", lambda: fleet.trains(1, 2))
    assert 4.4 <= took < 7.0
    assert "rank 1 on b stopped first" in told(fleet, "release")[-1] and fleet.run.restarts_used == 1


def test_a_hang_with_the_budget_spent_is_a_failure_that_names_the_rank() -> None:
    fleet = a_training("a b", size=2, min=2, max=2, hang_timeout_s=4.0, max_restarts=0)
    fleet.until("a step is told", lambda: steps_told(fleet))
    fleet.hang("a")
    everyone_leaves(fleet, 20.0)
    assert fleet.outcome is not None and fleet.outcome.reason == "hang"
    assert fleet.outcome.message.startswith("HangDetected")
    assert "(rank 0); worker a" in fleet.outcome.message


def test_a_hang_is_found_by_a_coordinator_that_came_after_it() -> None:
    fleet = a_training("a b", size=2, min=2, max=2, hang_timeout_s=5.0)
    fleet.until("a step is told", lambda: steps_told(fleet))
    fleet.hang("b")
    fleet.crash(back_after_s=0.5)
    fleet.until("round 1", lambda: fleet.trains(1, 2), within_s=20.0)


def steps_told(fleet: SimulatedFleet) -> bool:
    return fleet.run.round is not None and bool(fleet.run.round.progress)


def test_rounds_without_a_new_highest_step_end_with_no_progress() -> None:
    fleet = a_training("a b", size=2, min=2, max=2, no_progress_rounds=2, max_restarts=9)
    for number in (1, 2, 3):
        for rank in [rank for agent in fleet.present for rank in agent.machine.ranks]:
            rank.hung_at = 0.0
        fleet.fail("a")
        fleet.until("it goes on or ends", lambda number=number: fleet.trains(number, 2) or fleet.outcome)  # type: ignore[misc]
    everyone_leaves(fleet)
    assert fleet.outcome is not None and fleet.outcome.round == 2, "round 0 brought step 0, the next two nothing"
    assert fleet.outcome is not None and fleet.outcome.reason == "no_progress"
    assert set(codes(fleet).values()) == {93}


# Graces


def test_a_script_that_ignores_sigterm_does_not_hold_up_the_next_round() -> None:
    fleet = SimulatedFleet(1)
    fleet.join_all("a", "b", "c", settings={"min": 2, "max": 2, "spares": 1}, stubborn=True)
    fleet.until("round 0", lambda: fleet.trains(0, 2))
    fleet.agent("a").kill()
    assert fleet.until("round 1", lambda: fleet.trains(1, 2)) == pytest.approx(0.2, abs=0.05)


def test_a_stubborn_leaver_gets_its_long_grace() -> None:
    fleet = SimulatedFleet(1)
    fleet.join_all("a", "b", settings={"min": 1, "max": 2}, stubborn=True)
    fleet.until("round 0", lambda: fleet.trains(0, 2))
    fleet.set_target(1)
    assert fleet.until("round 1", lambda: fleet.trains(1, 1)) == pytest.approx(15.0, abs=0.1)


def test_a_closed_connection_gives_back_no_lease_that_was_over() -> None:
    """Stopped while its lease ends, it reads next that the coordinator, which has given it up, hung up on it."""
    fleet = a_training("a b c", size=2, min=2, max=2, spares=1, lease_s=1.5)
    victim = fleet.agent("a")
    fleet.cut(victim, directions=frozenset({UP}))
    fleet.advance(1.0)
    fleet.stop(victim, victim.state.at.lease.over_at(1.5) + 0.15 - fleet.clock.now)
    fleet.until("round 1 trains", lambda: fleet.trains(1))
    assert not victim.machine.ranks


def test_an_outcome_that_is_told_again_is_acknowledged_when_ranks_are_gone() -> None:
    settings: dict[str, object] = {"min": 2, "max": 2, "stop_grace_s": 2.0}
    fleet = SimulatedFleet(1)
    fleet.join("a", settings=settings)
    slow = fleet.join("b", settings=settings, stubborn=True)
    fleet.until("round 0 trains", lambda: fleet.trains(0, 2))
    fleet.cancel()
    fleet.advance(0.3)
    slow.reset(guard=False, half=True)
    fleet.advance(0.5)
    assert slow.machine.ranks and not fleet.run.farewell_said
    everyone_leaves(fleet)


def test_steps_that_stop_coming_are_told_once_without_any_setting() -> None:
    fleet = a_training("a b", size=2, min=2, max=2, no_progress_rounds=9)  # only then do simulated ranks tell steps
    fleet.advance(10.0)
    assert steps_told(fleet) and told(fleet, "stalled") == []
    fleet.hang("a")
    fleet.hang("b")
    took = fleet.until("the warning", lambda: told(fleet, "stalled"), 60.0)
    assert took == pytest.approx(50.0, abs=1.0), "a hundred steps of half a second"
    fleet.advance(200.0)
    [warning] = told(fleet, "stalled")
    assert re.fullmatch(r"no step for more than (49.9|50) s, usually 0.5 s per step", warning)
    assert fleet.trains(0, 2) and fleet.run.stall is not None, "it only warns"
    fleet.fail("b", 3)
    fleet.until("round 1", lambda: fleet.trains(1, 2))
    fleet.until("steps again", lambda: told(fleet, "steps-again"))
    fleet.advance(60.0)
    assert len(told(fleet, "stalled")) == len(told(fleet, "steps-again")) == 1


def test_a_stall_is_reported_again_by_a_coordinator_that_came_back() -> None:
    fleet = a_training("a b", size=2, min=2, max=2, no_progress_rounds=9)
    fleet.advance(10.0)
    fleet.hang("a")
    fleet.hang("b")
    fleet.until("the warning", lambda: told(fleet, "stalled"), 60.0)
    fleet.crash(back_after_s=0.3)
    fleet.until("the coordinator died", lambda: not fleet.coordinator.alive)
    fleet.until("the coordinator is back", lambda: fleet.coordinator.alive and fleet.coordinator.leading is not None)
    fleet.until("the warning again", lambda: told(fleet, "stalled"), 10.0)
    fleet.advance(200.0)
    assert len(told(fleet, "stalled")) == 1 and fleet.trains(0, 2)


def test_a_hang_just_before_the_coordinator_dies_is_reported_by_the_next_coordinator() -> None:
    fleet = a_training("a b", size=2, min=2, max=2, no_progress_rounds=9)
    fleet.advance(10.0)
    fleet.hang("a")
    fleet.hang("b")
    fleet.crash(back_after_s=5.0)
    fleet.advance(10.0)
    assert told(fleet, "stalled") == []
    took = fleet.until("the warning", lambda: told(fleet, "stalled"), 60.0)
    assert took == pytest.approx(40.0, abs=2.0), "50 s after the last step"

"""How runs end, and how they outlive their coordinator, on virtual time."""

from __future__ import annotations

from dataclasses import replace

import pytest

from muster.types.frames import ErrorFrame, Frame, HelloFrame, Introduction, Presented, RunRecord
from muster.types.world import OutcomeState, Role, RunId, Settings
from muster.world.protocol import RunProtocol
from tests.core.builders import NOW, a_round, an_id
from tests.simulator.fleet import SimulatedFleet
from tests.simulator.worker import SimulatedWorker
from tests.simulator.worlds import a_training, by_role, codes, everyone_leaves, told

# Success


def _code(answer: Frame) -> str:
    assert isinstance(answer, ErrorFrame)
    return answer.code


def test_everyone_leaves_with_0_when_all_active_members_are_done() -> None:
    fleet = a_training("a b c d", size=2, min=2, max=2, spares=2)
    fleet.finish_work()
    fleet.until("the outcome", lambda: fleet.outcome)
    assert everyone_leaves(fleet) < 0.1, "spares do not outstay the last active member"
    assert codes(fleet) == dict.fromkeys("abcd", 0)
    assert fleet.outcome is not None and fleet.outcome.state is OutcomeState.SUCCEEDED


def test_a_parked_member_leaves_with_0_too() -> None:
    fleet = a_training("a b c", size=2, min=2, max=2, spares=1)
    for number in (1, 2):
        fleet.fail("b")
        fleet.until("the next round", lambda number=number: fleet.trains(number, 2))  # type: ignore[misc]
    assert by_role(fleet, Role.PARKED) == ["b"]
    fleet.finish_work()
    everyone_leaves(fleet)
    assert codes(fleet) == dict.fromkeys("abc", 0)


def test_an_early_finisher_runs_again_when_a_peer_fails() -> None:
    fleet = a_training("a b", size=2, min=2, max=2)
    fleet.finish(fleet.agent("a"))
    fleet.advance(1.0)
    assert "1 done" in fleet.coordinator.protocol.at.reason
    fleet.fail("b")
    fleet.until("round 1", lambda: fleet.trains(1, 2))
    assert fleet.agent("a").machine.ranks, "its ranks run again"


def test_an_early_finisher_that_dies_is_not_missed() -> None:
    fleet = a_training("a b", size=2, min=2, max=2)
    fleet.finish(fleet.agent("a"))
    fleet.advance(0.1)
    fleet.agent("a").kill()
    fleet.advance(3.0)
    assert not told(fleet, "recall")
    fleet.finish(fleet.agent("b"))
    everyone_leaves(fleet)
    assert fleet.outcome is not None and fleet.outcome.state is OutcomeState.SUCCEEDED


def test_a_round_that_is_done_when_it_is_called_back_is_a_success() -> None:
    fleet = SimulatedFleet(1)
    fleet.join_all("a", "b", settings={"min": 2, "max": 3}, takes_notice=False)
    fleet.until("round 0", lambda: fleet.trains(0, 2))
    fleet.network.cut(fleet.agent("a").machine.name, frozenset({"down"}))
    fleet.network.cut(fleet.agent("b").machine.name, frozenset({"down"}))
    fleet.join("c", settings={})
    fleet.until("the round is called back", lambda: told(fleet, "recall"))
    fleet.finish(fleet.agent("a"))
    fleet.finish(fleet.agent("b"))
    fleet.until("the outcome", lambda: fleet.outcome, within_s=1.0)
    assert fleet.outcome is not None and fleet.outcome.state is OutcomeState.SUCCEEDED


def test_a_leavers_0_is_never_success() -> None:
    fleet = a_training("a b", size=2, min=1, max=2)
    fleet.agent("b").leave()
    fleet.advance(0.001)
    fleet.finish(fleet.agent("b"))
    fleet.finish(fleet.agent("a"))
    fleet.until("it goes on", lambda: fleet.trains(1) or fleet.outcome)
    assert fleet.outcome is None or fleet.outcome.state is not OutcomeState.SUCCEEDED


def test_a_late_joiner_learns_the_outcome_and_leaves_with_it() -> None:
    fleet = a_training("a", size=1, min=1, max=1)
    fleet.finish_work()
    everyone_leaves(fleet)
    late = fleet.join("b", settings={"min": 1, "max": 1})
    fleet.advance(0.1)
    assert late.code == 0


def test_one_that_waits_for_its_name_learns_the_outcome_too() -> None:
    fleet = a_training("a b", size=1, min=1, max=1, spares=1)
    fleet.agent("b").power_off()
    waiting = fleet.join("b", settings={"min": 1, "max": 1, "spares": 1})
    fleet.advance(0.2)
    fleet.finish_work()
    fleet.until("it leaves", lambda: waiting.code is not None, within_s=4.0)
    assert waiting.code == 0


# The order of the end


def test_the_outcome_is_kept_before_anyone_is_told() -> None:
    fleet = a_training("a b", size=2, min=2, max=2)
    kept: list[bool] = []
    watch = fleet.coordinator.on_saved

    def on_saved(record: RunRecord) -> None:
        assert watch is not None
        watch(record)
        if record.outcome is not None:
            kept.append(all(agent.outcome is None for agent in fleet.agents))

    fleet.coordinator.on_saved = on_saved
    fleet.finish_work()
    everyone_leaves(fleet)
    assert kept == [True]


def test_agents_stay_until_everyone_has_stopped() -> None:
    fleet = SimulatedFleet(1)
    fleet.join("a", settings={"min": 2, "max": 2, "farewell_s": 60.0})
    fleet.join("b", settings={"min": 2, "max": 2, "farewell_s": 60.0}, stubborn=True)
    fleet.until("round 0", lambda: fleet.trains(0, 2))
    fleet.cancel()
    fleet.advance(14.0)
    assert codes(fleet) == {"a": None, "b": None}, "b has not stopped yet"
    assert everyone_leaves(fleet, 5.0) == pytest.approx(1.0, abs=0.1)


def test_an_agent_without_a_farewell_leaves_after_a_while() -> None:
    fleet = a_training("a b", size=2, min=2, max=2)
    fleet.cut(fleet.agent("b"))
    fleet.cancel()
    fleet.until("a leaves", lambda: fleet.agent("a").code is not None, within_s=3.2)


# Failure and cancel


def test_a_failure_ends_everyone_within_a_second_with_the_same_reason() -> None:
    fleet = a_training("a b c", size=2, min=2, max=2, spares=1, max_restarts=0)
    fleet.fail("b", 3)
    fleet.until("the outcome", lambda: fleet.outcome)
    assert everyone_leaves(fleet) < 1.0
    assert codes(fleet) == dict.fromkeys("abc", 1)
    assert {agent.outcome.message for agent in fleet.agents if agent.outcome} == {
        "exited with code 3 (rank 1); last output: rank 1 gives up; worker b, round 0; 0 of 0 restarts used; "
        "its last stderr lines:\n  rank 1 gives up"
    }


def test_a_cancel_ends_everyone_and_nothing_comes_after_it() -> None:
    fleet = a_training("a b c", size=2, min=2, max=2, spares=1)
    fleet.cancel("enough of this")
    everyone_leaves(fleet)
    assert fleet.outcome is not None and fleet.outcome.state is OutcomeState.CANCELLED
    assert fleet.outcome.message == "enough of this" and codes(fleet) == dict.fromkeys("abc", 1)
    assert _code(fleet.set_target(2)) == "terminal_state"


def test_a_sigterm_is_a_leave_and_the_job_goes_on() -> None:
    fleet = a_training("a b c", size=2, min=2, max=2, spares=1, max_restarts=0)
    fleet.agent("a").leave()
    fleet.until("round 1", lambda: fleet.trains(1, 2))
    assert codes(fleet)["a"] == 143 and fleet.seats == ["c", "b"]
    assert fleet.run.restarts_used == 0


# A coordinator that dies


@pytest.mark.parametrize("keep_record", [True, False])
def test_the_same_round_goes_on_under_the_next_coordinator_and_no_rank_restarts(keep_record: bool) -> None:
    fleet = a_training("a b c", size=2, min=2, max=2, spares=1)
    before = [rank for agent in fleet.agents for rank in agent.machine.ranks]
    epoch = fleet.coordinator.protocol.at.epoch
    fleet.crash(keep_record=keep_record, back_after_s=1.0)
    fleet.advance(3.0)
    assert fleet.trains(0, 2) and fleet.coordinator.protocol.at.epoch == epoch + 1
    assert [rank for agent in fleet.agents for rank in agent.machine.ranks] == before
    assert by_role(fleet, Role.SPARE) == ["c"]


def test_a_reconnect_to_the_same_coordinator_is_no_new_epoch() -> None:
    fleet = a_training("a b", size=2, min=2, max=2)
    fleet.agent("b").reset(guard=False, half=False)
    fleet.until("round 1", lambda: fleet.trains(1, 2))
    assert fleet.coordinator.protocol.at.epoch == 1


def test_exits_while_there_is_no_coordinator_are_not_lost() -> None:
    fleet = a_training("a b", size=2, min=2, max=2)
    fleet.crash()
    fleet.advance(0.5)
    fleet.finish_work()
    fleet.advance(1.0)
    fleet.restart()
    everyone_leaves(fleet)
    assert fleet.outcome is not None and fleet.outcome.state is OutcomeState.SUCCEEDED
    assert fleet.run.next_round == 1


def test_a_member_that_does_not_come_back_is_lost_after_the_recovery_time() -> None:
    fleet = a_training("a b c", size=2, min=2, max=2, spares=1, max_restarts=0)
    fleet.crash()
    fleet.agent("b").power_off()
    fleet.advance(0.5)
    rank = fleet.agent("a").machine.ranks[0]
    rank.machine.end(rank, 1)
    fleet.restart()
    assert fleet.until("round 1", lambda: fleet.trains(1, 2)) == pytest.approx(5.0, abs=0.1)
    assert fleet.seats == ["a", "c"] and fleet.run.restarts_used == 0


def test_a_guard_tells_the_next_coordinator_at_once_that_its_agent_is_gone() -> None:
    fleet = a_training("a b c", size=2, min=2, max=2, spares=1)
    fleet.crash()
    fleet.agent("b").kill()
    fleet.advance(0.5)
    fleet.restart()
    assert fleet.until("round 1", lambda: fleet.trains(1, 2)) < 1.0


def test_the_target_and_the_restarts_used_outlive_the_coordinator_and_its_record() -> None:
    fleet = a_training("a b c", size=2, min=1, max=3, target=2, spares=1)
    fleet.fail("a")
    fleet.until("round 1", lambda: fleet.trains(1, 2))
    fleet.agent("c").kill()
    fleet.advance(0.1)
    fleet.set_target(3)
    fleet.advance(0.1)
    fleet.crash(keep_record=False, back_after_s=0.2)
    fleet.advance(1.0)
    assert fleet.trains(1, 2) and (fleet.run.target, fleet.run.restarts_used) == (3, 1)


def test_a_coordinator_that_told_only_some_of_a_new_round_is_finished_by_the_next() -> None:
    fleet = a_training("a b c d", size=3, min=3, max=3, spares=1)
    fleet.coordinator.crash_mid_send = 1
    fleet.agent("b").kill()
    fleet.until("it dies", lambda: not fleet.coordinator.alive)
    fleet.advance(0.1)
    fleet.restart()
    fleet.until("round 1", lambda: fleet.trains(1, 3), within_s=2.0)
    assert fleet.seats == ["a", "d", "c"]


def test_the_highest_round_presented_wins_and_those_who_came_before_hear_of_it() -> None:
    fleet = a_training("a b c d", size=3, min=3, max=3, spares=1, lease_s=2.0)
    fleet.coordinator.crash_mid_send = 1
    fleet.agent("b").kill()
    fleet.until("it dies", lambda: not fleet.coordinator.alive)
    fleet.advance(0.01)
    knowing = [agent for agent in fleet.present if agent.record and agent.record.round == 1]
    assert len(knowing) == 1, "one member was told of round 1"
    fleet.network.cut(knowing[0].machine.name)
    fleet.coordinator.saved = None
    fleet.restart()
    fleet.advance(0.6)
    assert fleet.run.round is not None and fleet.run.round.number == 0
    fleet.network.heal(knowing[0].machine.name)
    fleet.until("round 1", lambda: fleet.trains(1, 3), within_s=4.0)


def test_an_outcome_that_a_member_knows_is_adopted() -> None:
    fleet = SimulatedFleet(1)
    fleet.join_all("a", "b", settings={"min": 2, "max": 2}, stubborn=True)
    fleet.until("round 0", lambda: fleet.trains(0, 2))
    fleet.cancel("enough")
    fleet.advance(0.1)
    fleet.crash(back_after_s=1.0)
    fleet.coordinator.saved = None
    everyone_leaves(fleet, 30.0)
    assert fleet.outcome is not None and fleet.outcome.message == "enough"


def test_an_outcome_that_was_kept_but_told_to_nobody_is_told_by_the_next() -> None:
    fleet = a_training("a b c", size=2, min=2, max=2, spares=1)
    fleet.coordinator.crash_mid_send = 0
    fleet.finish_work()
    fleet.until("it dies", lambda: not fleet.coordinator.alive)
    fleet.advance(0.5)
    fleet.restart()
    everyone_leaves(fleet)
    assert codes(fleet) == dict.fromkeys("abc", 0)


def test_agents_give_up_on_a_coordinator_that_stays_dead() -> None:
    fleet = a_training("a b", size=2, min=2, max=2, orphan_s=20.0)
    fleet.crash()
    fleet.advance(15.0)
    assert all(agent.machine.ranks for agent in fleet.agents), "ranks go on meanwhile"
    everyone_leaves(fleet, 10.0)
    assert codes(fleet) == {"a": 75, "b": 75}


# A coordinator that is silent


def test_ranks_end_after_one_lease_of_silence_and_the_world_forms_again() -> None:
    fleet = a_training("a b c", size=2, min=2, max=2, spares=1, max_restarts=0)
    fleet.pause(for_s=4.0)
    fleet.until("ranks end", lambda: not fleet.census.alive, within_s=2.1)
    fleet.until("training", lambda: fleet.trains(1, 2), within_s=12.0)
    assert fleet.outcome is None


def test_a_short_silence_of_the_coordinator_is_nobodys_fault() -> None:
    fleet = a_training("a b c", size=2, min=2, max=2, spares=1)
    fleet.pause(for_s=0.6)
    fleet.advance(6.0)
    assert fleet.trains(0, 2) and not told(fleet, "lost")


def test_a_partition_of_the_coordinator_never_trains_twice() -> None:
    fleet = a_training("a b c d", size=2, min=2, max=2, spares=2)
    away = [fleet.agent(name) for name in ("a", "b")]
    for agent in away:
        fleet.cut(agent, for_s=10.0)
    fleet.until("the others go on", lambda: fleet.trains(1, 2), within_s=4.0)
    fleet.advance(10.0)
    assert sorted(fleet.seats) == ["c", "d"] and by_role(fleet, Role.SPARE) == ["a", "b"]
    assert not any(agent.machine.ranks for agent in away)


def test_a_refused_agent_takes_its_ranks_along() -> None:
    fleet = a_training("a b c", size=2, min=2, max=2, spares=1)
    old: SimulatedWorker = fleet.agent("b")
    fleet.cut(old, for_s=8.0)
    fleet.until("round 1", lambda: fleet.trains(1, 2))
    fleet.join("b", settings={"min": 2, "max": 2, "spares": 1}, machine="elsewhere")
    fleet.until("the old one is refused", lambda: old.code is not None, within_s=15.0)
    assert old.code == 1 and "the name 'b' is taken" in old.refusal and not old.machine.ranks


# An older control plane's workers


class _Deaf:
    peer = "nowhere"

    def send_raw(self, data: bytes) -> None: ...

    def refuse(self, code: str, message: str) -> None:
        raise AssertionError(message)


def test_a_control_plane_that_learns_of_a_longer_lease_from_a_worker_goes_by_it() -> None:
    """Its record of the run was not written; ranks of workers that are not back yet may run for ten seconds more."""
    older = RunProtocol(RunId("run"), settings=Settings(min=2, max=2, lease_s=10.0), directed=True)
    assert older.at.run is not None
    older.at.run = replace(older.at.run, round=a_round("a b"), next_round=1)
    upgraded = RunProtocol(RunId("run"), settings=Settings(min=2, max=2), directed=True)
    shown = Presented(record=older.at.moment.record, round=0, running=True, up=True)
    hello = HelloFrame(kind="agent", run_id=RunId("run"), member=Introduction(an_id("a"), "a"), present=shown)
    upgraded.greet(_Deaf(), hello, NOW)
    upgraded.settle(NOW)
    run = upgraded.run
    assert run is not None and run.settings.lease_s == 10.0
    assert run.recovery_until == run.not_before == NOW + 10.5
    upgraded.orders.reconfigure(Settings(min=2, max=3), 2, NOW)
    assert upgraded.run is not None and upgraded.run.settings == replace(run.settings, max=3)

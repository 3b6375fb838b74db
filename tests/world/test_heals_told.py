"""When a coordinator tells of heals, on virtual time."""

from __future__ import annotations

import re

from muster.types.frames import RenewFrame
from muster.types.run_event import JOURNAL, Kind, RunEvent
from tests.simulator.fleet import SimulatedFleet
from tests.simulator.worlds import a_training, told
from tests.world.test_kept_state import World

BOTH = r"ranks run after \S+ m?s, next step after \S+ m?s; back at step \d+, (no|\d+) steps? redone"


def a_counting(names: str, size: int, **settings: float) -> SimulatedFleet:
    """Its ranks tell steps, and are heard to be up."""
    fleet = a_training(names, size=size, hang_timeout_s=60.0, **settings)
    fleet.advance(1.0)
    return fleet


def heal(fleet: SimulatedFleet) -> str:
    """What is told of it, once."""
    fleet.until("the heal is told", lambda: told(fleet, "healed"), within_s=5.0)
    fleet.advance(16.0)
    (text,) = told(fleet, "healed")
    return str(text)


def test_a_killed_worker_with_a_spare_beside_it() -> None:
    fleet = a_counting("a b c", 2, min=2, max=2, spares=1)
    fleet.agent("b").kill_worker()
    assert re.fullmatch(rf"b lost; c has rank 1; {BOTH}", heal(fleet))


def test_a_silent_worker_is_lost_since_it_was_last_heard() -> None:
    fleet = a_counting("a b c", 2, min=2, max=2, spares=1)
    fleet.agent("b").power_off()
    assert re.fullmatch(rf"b lost; c has rank 1; {BOTH}", heal(fleet))


def test_nobody_left_to_take_the_rank() -> None:
    fleet = a_counting("a b", 2, min=1, max=2)
    fleet.agent("b").kill_worker()
    assert re.fullmatch(rf"b lost; goes on with 1 worker; {BOTH}", heal(fleet))


def test_a_rank_that_fails() -> None:
    fleet = a_counting("a b", 2, min=2, max=2)
    fleet.fail("b")
    assert re.fullmatch(rf"rank 1 on b: .+; 2 workers train again; {BOTH}", heal(fleet))


def test_a_resize_is_none() -> None:
    fleet = a_counting("a b c", 2, min=1, max=3, spares=1)
    fleet.set_target(1)
    fleet.until("one trains", lambda: fleet.trains(1, 1), within_s=30.0)
    fleet.advance(16.0)
    assert not told(fleet, "healed")


def test_a_new_coordinator_tells_no_time_that_it_did_not_see() -> None:
    fleet = a_counting("a b c", 2, min=2, max=2, spares=1)
    fleet.crash(back_after_s=0.3)
    fleet.until("the coordinator died", lambda: not fleet.coordinator.alive)
    fleet.agent("b").kill_worker()
    fleet.until("round 1", lambda: fleet.trains(1, 2), within_s=20.0)
    fleet.advance(16.0)
    (text,) = told(fleet, "healed")
    assert re.fullmatch(r"b lost; c has rank 1(; back at step \d+, (no|\d+) steps? redone)?", str(text)), text


def crashed_while_healing(*, other_machine: bool = False) -> SimulatedFleet:
    """Return a fleet whose coordinator died and came back when the ranks of a heal's round ran without a step."""
    fleet = a_counting("a b c", 2, min=2, max=2, spares=1)
    fleet.agent("b").kill_worker()
    fleet.until("round 1 runs", lambda: is_out(fleet) and ran(fleet))
    fleet.advance(0.05)  # the coordinator writes the record
    assert not told(fleet, "healed")
    if other_machine:
        fleet.first.clock_name = "the clock of another machine"
    fleet.crash(back_after_s=0.3)
    fleet.until("the coordinator died", lambda: not fleet.coordinator.alive)
    fleet.until("the coordinator is back", lambda: fleet.coordinator.alive and fleet.coordinator.leading is not None)
    return fleet


def is_out(fleet: SimulatedFleet) -> bool:
    return fleet.run.round is not None and fleet.run.round.number == 1


def ran(fleet: SimulatedFleet) -> bool:
    current = fleet.run.round
    return current is not None and current.ran_at is not None


def test_a_heal_outlives_its_coordinator() -> None:
    fleet = crashed_while_healing()
    assert re.fullmatch(rf"b lost; c has rank 1; {BOTH}", heal(fleet))
    current = fleet.run.round
    assert current is not None and current.ranks_run_s is not None and current.next_step_s is not None
    assert current.number == 1 and 0 < current.ranks_run_s < current.next_step_s < fleet.clock.now


def test_a_heal_that_was_reported_is_not_reported_again() -> None:
    fleet = crashed_while_healing()
    heal(fleet)
    fleet.crash(back_after_s=0.3)
    fleet.advance(20.0)
    assert fleet.coordinator.lives == 3 and fleet.trains(1, 2) and not told(fleet, "healed")


def test_a_coordinator_on_another_machine_reports_the_heal_without_times() -> None:
    fleet = crashed_while_healing(other_machine=True)
    assert re.fullmatch(r"b lost; c has rank 1(; back at step \d+, (no|\d+) steps? redone)?", heal(fleet))


def test_ranks_that_began_to_run_while_there_was_no_coordinator_have_no_time() -> None:
    fleet = a_counting("a b c", 2, min=2, max=2, spares=1)
    fleet.agent("b").kill_worker()
    fleet.until("round 1", lambda: is_out(fleet))
    assert not ran(fleet)
    fleet.coordinator.crash()
    fleet.clock.after(0.8, fleet.first.start)
    fleet.advance(0.9)
    assert re.fullmatch(r"b lost; c has rank 1(; back at step \d+, (no|\d+) steps? redone)?", heal(fleet))


def test_what_programs_need_of_a_heal_is_in_the_journal() -> None:
    assert JOURNAL[Kind.HEALED] == ("Healed", "Normal")
    entry = RunEvent(1.0, Kind.HEALED, "a lost", 3, {"step": 7}).journaled()
    assert entry is not None and (entry.data, entry.round) == ({"step": 7}, 3)


def test_what_ranks_wait_for_is_one_of_a_few_words() -> None:
    world = World()
    assert world.protocol.run is not None
    for doing, known in (("importing torch", "importing torch"), ("\x1b[2J", ""), ("", "")):
        world.says("a", RenewFrame(epoch=1, round=0, doing=doing))
        assert world.protocol.run is not None
        assert [one.doing for one in world.protocol.run.members.values() if one.name == "a"] == [known]

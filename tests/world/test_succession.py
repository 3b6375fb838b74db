"""The coordinator's machine may be lost: one of the others goes on, never two, and what was told stays true."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from muster.core.succession import ballot, electorate, leadership
from tests.simulator import histories, succession
from tests.simulator.network import BOTH, COORDINATOR
from tests.simulator.succession import SuccessionFleet
from tests.world.test_planted_faults import finds

SOME = 100
TEN_THOUSAND = 10_000
CHUNKS = 8
PLANTED = 600
RARE = (28, 85, 103, 507)  # have found what few others do


def a_run(*names: str, seed: int = 1, **settings: object) -> SuccessionFleet:
    """The first one is on the machine of the coordinator, and all can do without that."""
    fleet = SuccessionFleet(seed)
    given = {"min": len(names) - 1, "max": len(names) - 1, "spares": 1, **settings}
    for index, name in enumerate(names):
        made = fleet.join(name, machine=COORDINATOR if index == 0 else None, settings=given)
        fleet.first.beside = made.member_id if index == 0 else fleet.first.beside
    fleet.until("round 0 trains", lambda: fleet.trains(0))
    fleet.until("electors", lambda: len(groups_of(fleet)) == 1 and len(groups_of(fleet)[0]) == len(names))
    fleet.advance(1.0)  # until they have kept it
    return fleet


def groups_of(fleet: SuccessionFleet) -> tuple[tuple[object, ...], ...]:
    post = fleet.coordinator.post
    return post.state.leadership.groups if post is not None and post.state.leadership is not None else ()


@pytest.mark.parametrize("silently", [False, True])
def test_the_machine_of_the_coordinator_is_lost_and_costs_one_round(silently: bool) -> None:
    fleet = a_run("a", "b", "c", "d")
    fleet.lose_leader(silently=silently)
    fleet.until("round 1 trains", lambda: fleet.trains(1, 3), 6.0)
    assert fleet.coordinator.machine != COORDINATOR
    assert sorted(fleet.seats) == ["b", "c", "d"]
    fleet.finish_work()
    fleet.until("everyone is out", lambda: not fleet.present)
    assert {agent.code for agent in fleet.agents if agent.name != "a"} == {0}


def test_the_process_of_the_coordinator_alone_dies_and_no_rank_notices() -> None:
    fleet = a_run("a", "b", "c", "d")
    fleet.crash_leader(back_after_s=60.0)
    fleet.until("somebody leads", lambda: fleet.coordinator.machine != COORDINATOR and fleet.trains(0, 3), 5.0)
    fleet.advance(10.0)
    assert fleet.trains(0, 3)


@pytest.mark.parametrize("silently", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_the_coordinator_is_lost_when_the_first_agent_has_the_record_that_makes_a_successor_possible(
    seed: int, silently: bool
) -> None:
    # The earlier electors had no majority without the coordinator, so their votes are not needed.
    fleet = SuccessionFleet(seed)
    for name in "abc":
        fleet.join(name, settings={"min": 2, "max": 2, "spares": 1})
    fleet.until("an agent has that record", lambda: has_successor(fleet))
    fleet.lose_leader(silently=silently)
    fleet.until("an agent leads", lambda: fleet.coordinator is not fleet.first, 10.0)
    fleet.until("the run trains", lambda: fleet.trains(size=2), 10.0)


def has_successor(fleet: SuccessionFleet) -> bool:
    """Return True if the newest group in the record of an agent can do without the coordinator."""
    records = [
        listener.post.state.ballot.record
        for listener in fleet.network.listeners.values()
        if listener is not fleet.first and listener.post is not None
    ]
    return any(
        record is not None
        and record.electorate.leader is not None
        and electorate.can_do_without(record.electorate.groups[-1:], record.electorate.leader)
        for record in records
    )


def test_one_successor_after_another() -> None:
    fleet = a_run("a", "b", "c", "d", "e", "f", min=2, max=6, spares=0)
    for number in (1, 2, 3):
        fleet.lose_leader(silently=number == 2)
        fleet.until(f"round {number} trains", lambda number=number: fleet.trains(number), 10.0)  # type: ignore[misc]
        fleet.advance(5.0)
    assert len(fleet.seats) == 3


def test_a_coordinator_that_stands_still_steps_down_when_it_goes_on() -> None:
    fleet = a_run("a", "b", "c", "d")
    first = fleet.first
    fleet.pause_leader(5.0)
    fleet.until("another leads", lambda: fleet.coordinator is not first and fleet.trains(), 10.0)
    fleet.until("the first knows it", lambda: first.leading is None, 10.0)
    fleet.advance(5.0)
    assert fleet.trains() and fleet.coordinator is not first


def test_a_coordinator_cut_off_from_the_majority_says_nothing_more() -> None:
    fleet = a_run("a", "b", "c", "d")
    first = fleet.first
    fleet.cut_leader(60.0, BOTH)
    fleet.until("it steps down", lambda: first.leading is None, 5.0)
    fleet.until("the others go on", lambda: fleet.trains(1, 3), 10.0)


def test_without_a_majority_nobody_guesses() -> None:
    fleet = a_run("a", "b", min=1, max=1, spares=1)
    fleet.lose_leader(silently=True)
    fleet.advance(30.0)
    assert fleet.coordinator is fleet.first and fleet.first.leading is None
    b = fleet.agent("b")
    assert b.alive and not b.connection.up


def test_a_coordinator_with_one_worker_elsewhere_can_do_without_it() -> None:
    fleet = a_run("a", "b", min=1, max=1, spares=1)
    fleet.agent("b").power_off()
    fleet.advance(5.0)
    assert fleet.trains(size=1) and fleet.coordinator is fleet.first


def test_two_of_three_that_are_killed_at_once_do_not_stop_the_third() -> None:
    """They are known to be dead, so nobody else leads."""
    fleet = a_run("a", "b", "c", min=1, max=2, spares=1)
    for name in ("b", "c"):
        fleet.agent(name).kill_both()
    fleet.until("a trains alone", lambda: fleet.trains(size=1), 30.0)
    assert fleet.coordinator is fleet.first


def test_two_of_three_that_fall_silent_at_once_stop_the_third() -> None:
    """They may go on together, for all that is known."""
    fleet = a_run("a", "b", "c", min=1, max=2, spares=1)
    for name in ("b", "c"):
        fleet.agent(name).power_off()
    fleet.advance(30.0)
    assert fleet.first.leading is None and not any(fleet.census.alive.values())


def test_a_member_that_comes_late_is_shown_the_successor() -> None:
    fleet = a_run("a", "b", "c", "d")
    fleet.crash_leader(back_after_s=0.5)
    fleet.until("somebody leads", lambda: fleet.coordinator is not fleet.first and fleet.trains(), 5.0)
    fleet.until("the first is back", lambda: fleet.first.alive, 5.0)
    late = fleet.join("late", settings={"min": 3, "max": 3, "spares": 1})
    fleet.until("it has joined", lambda: late.connection.up, 5.0)
    assert late.member_id in fleet.run.members


def test_the_first_one_back_from_a_crash_leads_again_if_it_is_needed() -> None:
    fleet = a_run("a", "b", min=1, max=1, spares=1)
    fleet.crash_leader(back_after_s=1.0)
    fleet.until("it leads again", lambda: fleet.first.alive and fleet.trains(0, 1), 5.0)


# Random histories -------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_histories_have_one_leader(chunk: int) -> None:
    play(range(chunk, SOME, CHUNKS))


@pytest.mark.soak
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_ten_thousand_random_histories_have_one_leader(chunk: int) -> None:
    play(range(SOME + chunk, SOME + TEN_THOUSAND, CHUNKS))


def test_one_that_has_given_a_worker_up_is_not_taken_for_dead() -> None:
    """The worker's clock was a little slower than the coordinator's: it gave its ranks another lease."""
    play([7312])


def play(seeds: Iterable[int]) -> None:
    for seed in seeds:
        try:
            succession.play(seed)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {error}\n\n{histories.story(seed, succession.play)}") from error


def test_histories_of_succession_are_not_all_alike() -> None:
    endings = [succession.play(seed) for seed in range(20)]
    assert {"stranded", "succeeded after 1 terms", "succeeded after 2 terms"} <= set(endings)


FAULTS = {
    "a voice is given while the leader may be alive": (
        *(ballot.Ballot, "vote", "if not self.is_free(now):", "if False:"),
        "speaks in term|starts while round|with other seats",
    ),
    "a leader speaks whatever others have promised": (
        *(leadership.Leadership, "is_sure", "electorate.is_enough(self.groups, self.promising(now))", "True"),
        "speaks in term|starts while round|with other seats",
    ),
    "a record is told before others have kept it": (
        *(leadership.Leadership, "may_speak", "self.is_kept(self._needed) and", ""),
        "speaks in term|starts while round|with other seats|outcome changed",
    ),
    "one with an older record is elected": (
        *(ballot.Ballot, "vote", "if frame.last < self.last:", "if False:"),
        "speaks in term|starts while round|with other seats|outcome changed",
    ),
    "electors that can elect a successor are replaced in one revision": (
        *(leadership.Leadership, "widen", "electorate.can_do_without((current,), self._me)", "False"),
        "speaks in term|starts while round|with other seats|outcome changed",
    ),
    "the end of an elector counts whatever it has promised": (
        *(leadership.Leadership, "died", "self._promises(elector_id, now) and", ""),
        "speaks in term|starts while round|with other seats|outcome changed",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_histories_find_a_planted_fault_of_succession(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    finds(FAULTS[fault], monkeypatch, succession.play, [*RARE, *range(PLANTED)])

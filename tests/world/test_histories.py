"""Thousands of random histories: no promise of the world is broken in any of them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from random import Random

import pytest

from muster.core.world import transitions
from muster.types.frames import AskFrame
from muster.types.world import MemberId, OutcomeState
from tests.simulator import histories
from tests.simulator.clock import VirtualClock
from tests.simulator.coordinator import SimulatedCoordinator
from tests.simulator.invariants import Broken, Checker
from tests.simulator.machine import Census, Machine, SimulatedRank
from tests.simulator.network import Network
from tests.simulator.worlds import a_training

SOME = 300
TEN_THOUSAND = 10_000
CHUNKS = 8


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_histories_keep_every_promise(chunk: int) -> None:
    play(range(chunk, SOME, CHUNKS))


@pytest.mark.soak
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_ten_thousand_random_histories_keep_every_promise(chunk: int) -> None:
    play(range(SOME + chunk, SOME + TEN_THOUSAND, CHUNKS))


def play(seeds: Iterable[int]) -> None:
    for seed in seeds:
        try:
            histories.play(seed)
        except Exception as error:
            told = histories.story(seed)
            raise AssertionError(f"seed {seed} (python -m tests.simulator {seed}): {error}\n\n{told}") from error


def test_a_history_is_a_function_of_its_seed() -> None:
    for seed in range(10):
        assert histories.story(seed) == histories.story(seed)


def test_histories_are_not_all_alike() -> None:
    endings = [histories.play(seed) for seed in range(60)]
    assert {ending.state for ending in endings} >= set(OutcomeState)
    assert {1, 2, 3} <= {ending.rounds for ending in endings}


def test_a_history_can_be_replayed_from_the_command_line() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "tests.simulator", "7"], capture_output=True, text=True, timeout=60, check=True
    )
    assert shown.stdout == histories.story(7) + "\n"


class _Nobody:
    def rank_started(self, rank: SimulatedRank) -> None: ...

    def rank_ended(self, rank: SimulatedRank, status: int) -> None: ...


def test_the_checker_notices_two_rounds_at_once() -> None:
    clock, census = VirtualClock(), Census()
    checker = Checker(clock, census, SimulatedCoordinator(clock, Network(clock, Random(1))))
    machine = Machine("here", clock, census, _Nobody())
    machine.start(SimulatedRank(0, 0, MemberId("m0"), machine, 0.0))
    with pytest.raises(Broken, match="a rank of round 1 starts while round 0 trains"):
        checker.rank_started(SimulatedRank(1, 0, MemberId("m1"), machine, 0.0))


def test_the_checker_notices_a_number_that_is_used_again() -> None:
    clock, census = VirtualClock(), Census()
    checker = Checker(clock, census, SimulatedCoordinator(clock, Network(clock, Random(1))))
    machine = Machine("here", clock, census, _Nobody())
    checker.rank_started(SimulatedRank(0, 0, MemberId("m0"), machine, 0.0))
    with pytest.raises(Broken, match="started on two members"):
        checker.rank_started(SimulatedRank(0, 0, MemberId("m1"), machine, 0.0))


def test_the_checker_notices_a_guard_that_lies() -> None:
    fleet = a_training("a b c", size=2, min=2, max=2, spares=1)
    victim = fleet.agent("b")
    fleet.cut(victim)
    fleet.coordinator.protocol.at.run = transitions.guard_cleared(fleet.run, victim.member_id, 0, fleet.clock.now)
    fleet.coordinator.ask(AskFrame(ask="show"))
    with pytest.raises(Broken, match="starts while round 0 trains"):
        fleet.until("round 1", lambda: fleet.trains(1))

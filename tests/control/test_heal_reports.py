"""What a user reads of heals and resizes, with real processes: both times, and nothing that has not happened yet."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from muster import DistributedTraining, TrainingFailed
from muster.types.event import HEALED, TARGET_REACHED, Event
from tests.fleet import PROGRAMS, eventually
from tests.plane import Plane, fresh

SLOW_S = 3.0
CRASH = """
import os, sys, time, muster
for step in range(1, 6):
    {tell}
    time.sleep(0.2)
sys.exit(3)
"""


def named(training: DistributedTraining, reason: str) -> list[Event]:
    return [event for event in training.events() if event.reason == reason]


def steps(training: DistributedTraining) -> list[int]:
    return [rank.step for rank in fresh(training).ranks if rank.step is not None]


def slow(plane: Plane, name: str) -> DistributedTraining:
    """Two workers and a spare, whose ranks take seconds before the first step of a later round."""
    script = str(PROGRAMS / "slow_start.py")
    training = plane.train(name, script=script, args=[str(SLOW_S)], world=(2, 2, 3), spares=1)
    training.wait_until_target_world(timeout=60)
    eventually(lambda: len(steps(training)) == 2, "both ranks make steps", 60)
    eventually(lambda: fresh(training).training.status.spares.ready, "a spare is there", 60)
    return training


@pytest.mark.scenario
def test_a_heal_is_reported_with_the_next_step_and_until_then_as_under_way(plane: Plane) -> None:
    training = slow(plane, "healed")
    victim = next(rank.worker for rank in training.ranks if rank.rank == 1)
    plane.kill_worker(victim)

    def why() -> str:
        reached = fresh(training).training.status.condition("TargetReached")
        assert reached is not None
        assert named(training, HEALED) == [] or reached.status == "True"
        return reached.message if reached.status == "False" else ""

    eventually(lambda: f"healing: {victim} lost" in why() and "no step yet" in why(), "the heal is under way", 60)
    eventually(lambda: named(training, HEALED), "the heal is reported", 60)
    (heal,) = named(training, HEALED)
    assert heal.data["nextStepSeconds"] > SLOW_S > heal.data["ranksRunSeconds"] > 0, heal
    assert "ranks run after" in heal.message and "next step after" in heal.message
    training.wait_until_target_world(timeout=60)
    reached = named(training, TARGET_REACHED)[-1]
    assert reached.data["nextStepSeconds"] > SLOW_S > reached.data["ranksRunSeconds"], reached
    described = plane.muster("describe", "healed")
    assert described.wait() == 0
    both = r"ranks run after \S+ m?s, next step after \d+\.\d s"
    for line in (rf"Round: +1; {both}", rf"TargetReached is True .*{both}", rf"Healed: {victim} lost; .*{both}"):
        assert re.search(line, described.text), described.text


def test_a_resize_is_reported_with_both_times(plane: Plane) -> None:
    slow(plane, "resized")
    said = plane.muster("scale", "resized", "3", "--wait", "--timeout", "60s")
    told = said.expect(r"3 of 3 workers ready; ranks run after (\S+) (m?s), next step after (\d+\.\d) s")
    assert float(told[3]) > SLOW_S


@pytest.mark.parametrize("tell", ["muster.progress(step)", "pass"])
def test_a_crash_that_repeats_is_never_reported_as_healed(plane: Plane, tmp_path: Path, tell: str) -> None:
    script = tmp_path / "crash.py"
    script.write_text(CRASH.format(tell=tell))
    training = plane.train("crashing", script=str(script), world=(1, 1, 1), max_restarts=3)
    with pytest.raises(TrainingFailed):
        training.wait(timeout=120)
    assert training.phase == "failed" and len(named(training, "RoundReleased")) == 4
    assert named(training, HEALED) == []


@pytest.mark.parametrize("role", [pytest.param("active", marks=pytest.mark.scenario), "spare"])
def test_a_killed_worker_is_shown_as_dead_and_never_as_a_spare(plane: Plane, role: str) -> None:
    training = slow(plane, "killed")
    victim = next(one.name for one in training.training.status.workers if one.role == role)
    plane.kill_worker(victim)
    eventually(lambda: roles(training).get(victim) != role, "its role has changed", 60)
    seen = set()

    def replaced() -> bool:
        seen.add(roles(training).get(victim))
        return "spare" in roles(training).values() and roles(training)[victim] == "dead"

    eventually(replaced, "it is replaced", 60)
    assert seen == {"dead"}, seen
    described = plane.muster("describe", "killed")
    assert described.wait() == 0 and re.search(rf"{victim} dead for \S+ on .*: exit code -9", described.text)


def roles(training: DistributedTraining) -> dict[str, str]:
    return {one.name: one.role for one in fresh(training).training.status.workers}

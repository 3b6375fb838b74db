"""One line more in a script: it goes on from memory at the step at which the world was lost, as if nothing had been."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.fleet import Fleet, eventually
from tests.frameworks.jobs import PATIENCE_S, Job

pytestmark = [pytest.mark.frameworks, pytest.mark.xdist_group("frameworks")]

EXAMPLES = Path(__file__).parents[2] / "examples"
each = pytest.mark.parametrize("example", ["hf_trainer", "lightning_trainer", "accelerate_loop"])


class Kept(Job):
    """An example on two workers and a spare."""

    def __init__(self, fleet: Fleet, example: str, steps: int, pause: float = 0.1) -> None:
        self.output = fleet.folder / "output"
        words = ("--folder", str(self.output), "--steps", str(steps), "--pause", str(pause), "--overhead", "1")
        super().__init__(fleet, str(EXAMPLES / f"{example}.py"), *words)

    def pass_step(self, step: int) -> None:
        try:
            eventually(lambda: f" step {step}\n" in self.text, f"step {step}", PATIENCE_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.text[-6000:]}") from None

    def begun(self) -> list[int]:
        return sorted(int(step) for step in re.findall(r"of 2 begins at step (\d+)", self.text))

    def told(self) -> list[str]:
        """At its end: where it is, and what it has learnt."""
        self.finish()
        return re.findall(r"(?:losses|ends at step) .*", self.text)


@each
def test_it_goes_on_at_the_step_that_was_lost_and_ends_as_if_nothing_had_been(fleet: Fleet, example: str) -> None:
    run = Kept(fleet, example, steps=50)
    run.start()
    run.pass_step(12)
    run.lose_agent()
    run.pass_step(18)
    run.spare("d")
    lost = int(re.findall(r" step (\d+)\n", run.text)[-1])
    run.lose_worker()
    disturbed = run.told()
    first, second, third = run.begun()[::2]
    assert first == 0 and 8 <= second <= 18 and lost - 4 <= third, run.text[-6000:]
    shutil.rmtree(run.output, ignore_errors=True)

    fleet.run_id = "quiet"
    quiet = Kept(fleet, example, steps=50, pause=0.0)
    for name in "xy":
        quiet.join(name)
    assert quiet.told()[len(disturbed) :] == disturbed


@each
def test_it_goes_on_from_memory_with_three_and_again_with_two(fleet: Fleet, example: str) -> None:
    run = Kept(fleet, example, steps=45)
    run.start("--nnodes", "2:3", "--target", "2", "--spares", "1")
    run.pass_step(12)
    fleet.order("set-target", target=3)
    eventually(lambda: run.text.count("of 3 begins at step") == 3, "three have begun", PATIENCE_S)
    run.pass_step(24)
    fleet.order("set-target", target=2)
    run.finish()
    [grown] = set(re.findall(r"of 3 begins at step (\d+)", run.text))
    first, shrunk = run.begun()[::2]
    assert first == 0 and 8 <= int(grown) <= 24 and 20 <= shrunk < 45
    assert "ends at step 45" in run.text


@each
def test_alone_it_does_what_it_did_and_goes_on_from_its_own_checkpoint(fleet: Fleet, example: str) -> None:
    run = Kept(fleet, example, steps=50)
    first = fleet.start(sys.executable, *run.program)
    assert first.wait(PATIENCE_S) == 0, first.text
    run = Kept(fleet, example, steps=60)
    again = fleet.start(sys.executable, *run.program)
    assert again.wait(PATIENCE_S) == 0, again.text
    assert "rank 0 of 1 begins at step 50" in again.text and "ends at step 60" in again.text
    assert "muster" not in again.text.replace(str(EXAMPLES.parent), ""), "nothing to say"

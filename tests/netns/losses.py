"""Machines are lost at random, again and again: is the world whole each time, and is nothing left at the end?

usage: python -m tests.netns.losses [--losses 200] [--seed 7] [--spare-the-coordinator]
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.netns import fenced_log
from tests.netns.faults import DEAF, KILLED, MUTE, POWER, Loss, cable_for, still_for
from tests.netns.fleet import MachineFleet, a_machine_fleet
from tests.netns.machines import why_not

WORKERS, SPARES = 3, 1
_OFTEN_S, _LONG_S = 2.0, 8.0


@dataclass
class Tally:
    """`after_s`: of each loss that cost a round, from the loss to its ranks at work."""

    lost: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    after_s: list[float] = field(default_factory=list)
    leaders: int = 0
    rounds: int = 0

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {name}" for name, count in sorted(self.lost.items()))
        took = sorted(self.after_s) or [0.0]
        times = f"the next round at work after {took[len(took) // 2]:.2f} s (half of them), {took[-1]:.2f} s (all)"
        lost = f"{self.lost.total()} losses ({kinds}), {self.leaders} of them with the coordinator"
        return f"{lost}; {self.rounds} rounds; {times}; {len(self.broken)} broken"


def some_loss(rng: random.Random) -> tuple[str, Loss]:
    """Of the kinds that there are; how long it lasts is near a lease more often than far from it."""
    seconds = rng.uniform(0.2, _OFTEN_S) if rng.random() < 0.6 else rng.uniform(_OFTEN_S, _LONG_S)
    kinds: dict[str, Callable[[], Loss]] = {
        "killed whole": lambda: KILLED,
        "power": lambda: POWER,
        "cable": lambda: cable_for(seconds),
        "deaf": lambda: _lasting(DEAF, seconds),
        "mute": lambda: _lasting(MUTE, seconds),
        "still": lambda: still_for(seconds),
    }
    name = rng.choice(sorted(kinds))
    return name, kinds[name]()


def _lasting(loss: Loss, seconds: float) -> Loss:
    return Loss(loss.strike, loss.mend, seconds)


def random_losses(
    fleet: MachineFleet, *, seed: int, losses: int, coordinator_too: bool = True, say: Callable[[str], None] = print
) -> Tally:
    """Stops at the first thing that is broken: what follows would say nothing."""
    rng = random.Random(seed)
    tally = Tally()
    fleet.begin()
    view = fleet.whole()
    for turn in range(losses):
        machine = rng.randrange(0 if coordinator_too else 1, fleet.machines.count)
        name, loss = some_loss(rng)
        leads = fleet.leader(view) == machine
        tally.lost[name] += 1
        tally.leaders += leads
        what = f"{turn + 1:3d} {name} {loss.lasts_s or 0:.1f} s, {fleet.names[machine]}{', leads' if leads else ''}"
        try:
            view = _lose(fleet, loss, machine, view, tally)
        except AssertionError as error:
            tally.broken.append(f"{what}: {error}")
        else:
            say(f"{what}: round {view['round']}, {_last(tally.after_s)}")
        if tally.broken:
            return tally
    tally.rounds = view["round"]
    try:
        fleet.finish()
    except AssertionError as error:
        tally.broken.append(f"at the end: {error}")
    return tally


def _lose(fleet: MachineFleet, loss: Loss, machine: int, view: dict[str, Any], tally: Tally) -> dict[str, Any]:
    """And take it back; what is seen when all is well again."""
    before, victim = view["round"], fleet.names[machine]
    active = victim in {member["name"] for member in view["members"] if member["rank"] is not None}
    struck = fleet.strike(loss, machine)
    if loss.lasts_s is None:
        fleet.trains("the others train", lambda n, workers: victim not in workers and (n > before or not active))
    time.sleep(max(0.0, struck + (loss.lasts_s or 0.0) - time.monotonic()))
    fleet.mend(loss, machine)
    after = fleet.whole()
    marks = fleet.marks()
    tally.broken += fenced_log.problems(marks, fleet.thawed)
    began = [fenced_log.beginning(marks, number) for number in range(before + 1, after["round"] + 1)]
    tally.after_s += [at - struck for at in began if at is not None and at > struck][:1]
    return after


def _last(after_s: list[float]) -> str:
    return f"last round that it cost at work after {after_s[-1]:.2f} s" if after_s else "no round yet"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--losses", type=int, default=200)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--spare-the-coordinator", action="store_true")
    given = parser.parse_args()
    if problem := why_not():
        print(problem, file=sys.stderr)
        return 2
    coordinator_too = not given.spare_the_coordinator
    with (
        tempfile.TemporaryDirectory(prefix="muster-losses-") as folder,
        a_machine_fleet(Path(folder), workers=WORKERS, spares=SPARES, any_may_lead=coordinator_too) as fleet,
    ):
        tally = random_losses(fleet, seed=given.seed, losses=given.losses, coordinator_too=coordinator_too)
    print("\n".join([*tally.broken, str(tally)]))
    return 1 if tally.broken else 0


if __name__ == "__main__":
    sys.exit(main())

"""How is a machine lost, and how does it come back? By power, by cable, in one direction, or it stands still."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tests.netns.machines import Machines

_LONG_S = 30.0
Deed = Callable[[Machines, int], None]


@dataclass(frozen=True)
class Loss:
    """`lasts_s`: how long; None: for as long as it takes until the others go on, or cannot.

    `silent`: nothing is closed, and nobody else on the machine can tell of it, either.
    `stands_still`: its ranks are there when it goes on, and leave a last mark before their guard has ended them.
    """

    strike: Deed
    mend: Deed
    lasts_s: float | None = None
    silent: bool = True
    stands_still: bool = False

    def is_longer_than(self, seconds: float) -> bool:
        return self.lasts_s is None or self.lasts_s > seconds


def power_off(machines: Machines, machine: int) -> None:
    machines.power_off(machine)


def boot(machines: Machines, machine: int) -> None:
    machines.power_on(machine)


def kill(machines: Machines, machine: int) -> None:
    machines.kill(machine)


def pull(machines: Machines, machine: int) -> None:
    machines.link(machine, up=False)


def put_back(machines: Machines, machine: int) -> None:
    machines.link(machine, up=True)


def deafen(machines: Machines, machine: int) -> None:
    machines.one_way(machine, "in")


def silence(machines: Machines, machine: int) -> None:
    machines.one_way(machine, "out")


def both_ways(machines: Machines, machine: int) -> None:
    machines.one_way(machine, None)


def freeze(machines: Machines, machine: int) -> None:
    machines.freeze(machine)


def thaw(machines: Machines, machine: int) -> None:
    machines.thaw(machine)


# Everything on it dies in one instant, but its kernel lives and closes what they had open.
KILLED = Loss(kill, boot, silent=False)
POWER = Loss(power_off, boot)
CABLE = Loss(pull, put_back)
DEAF = Loss(deafen, both_ways)
MUTE = Loss(silence, both_ways)


def cable_for(seconds: float) -> Loss:
    return Loss(pull, put_back, seconds)


def still_for(seconds: float) -> Loss:
    return Loss(freeze, thaw, seconds, stands_still=True)


LOSSES: dict[str, Loss] = {
    "killed whole": KILLED,
    "power": POWER,
    "cable": CABLE,
    "cable for 1 s": cable_for(1),
    "cable for 5 s": cable_for(5),
    "cable for 60 s": cable_for(60),
    "what comes to it": DEAF,
    "what it says": MUTE,
    "stands still for 30 s": still_for(30),
}
# For tests: what takes a minute is left to `make soak`.
EACH = [
    pytest.param(name, marks=pytest.mark.soak if loss.lasts_s and loss.lasts_s > _LONG_S else ())
    for name, loss in LOSSES.items()
]

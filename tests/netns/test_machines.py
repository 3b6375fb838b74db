"""Are machines what tests take them for: joined, lost as told, and removed whatever happened?"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleet import eventually, gone
from tests.netns.machines import Direction, Machines, why_not

pytestmark = [pytest.mark.netns, pytest.mark.skipif(bool(why_not()), reason=why_not())]

# Says what it hears; speaks 100 times a second.
TALKER = """
import select, socket, sys, time
here, there = sys.argv[1:]
wire = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
wire.bind((here, 5000))
while True:
    try:
        wire.sendto(b"", (there, 5000))
    except OSError:
        pass
    if select.select([wire], [], [], 0.01)[0]:
        wire.recv(100)
        print(end=".", flush=True)
"""

OWNER = """
import time
from tests.netns.machines import Machines
with Machines(1) as machines:
    print(machines.address(0), machines.start(0, ["sleep", "600"]).pid, flush=True)
    time.sleep(600)
"""


def an_owner() -> tuple[subprocess.Popen[str], str, int]:
    """Somebody else with a machine, its address, and a process there."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert owner.stdout is not None
    address, pid = owner.stdout.readline().split()
    return owner, address, int(pid)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[Machines, list[Path]]]:
    """Two machines that speak with each other, and what each of them has heard."""
    with Machines(2) as machines:
        heard = [tmp_path / f"heard-{machine}" for machine in range(2)]
        for machine, path in enumerate(heard):
            argv = [sys.executable, "-c", TALKER, machines.address(machine), machines.address(1 - machine)]
            with path.open("wb") as file:
                machines.start(machine, argv, stdout=file)
        yield machines, heard


def hears(path: Path) -> None:
    before = path.stat().st_size
    eventually(lambda: path.stat().st_size > before + 5, f"{path.name} grows")


def hears_nothing(path: Path) -> None:
    """What was on its way may still come."""

    def silent() -> bool:
        before = path.stat().st_size
        time.sleep(0.3)
        return path.stat().st_size == before

    eventually(silent, f"{path.name} stays as it is")


def test_a_cable_is_pulled_and_put_back(pair: tuple[Machines, list[Path]]) -> None:
    machines, heard = pair
    for _ in range(2):
        for path in heard:
            hears(path)
        machines.link(1, up=False)
        for path in heard:
            hears_nothing(path)
        assert len(machines.pids(1)) == 1, "its processes go on"
        machines.link(1, up=True)
    hears(heard[0])


@pytest.mark.parametrize(("lost", "deaf"), [("in", 1), ("out", 0)])
def test_one_direction_is_lost_and_the_other_is_not(
    pair: tuple[Machines, list[Path]], lost: Direction, deaf: int
) -> None:
    machines, heard = pair
    hears(heard[0])
    machines.one_way(1, lost)
    hears_nothing(heard[deaf])
    hears(heard[1 - deaf])
    machines.one_way(1, None)
    for path in heard:
        hears(path)


def test_a_machine_that_is_frozen_goes_on_when_it_thaws(pair: tuple[Machines, list[Path]]) -> None:
    machines, heard = pair
    hears(heard[0])
    machines.freeze(1)
    hears_nothing(heard[0])
    machines.thaw(1)
    hears(heard[0])


def test_power_takes_processes_that_have_left_their_parent_too_and_comes_back(
    pair: tuple[Machines, list[Path]],
) -> None:
    machines, heard = pair
    hears(heard[0])
    machines.start(1, ["sh", "-c", "setsid sleep 600 & setsid sh -c 'sleep 600 & sleep 600' & exit"]).wait()
    assert len(machines.pids(1)) > 2
    machines.power_off(1)
    assert machines.pids(1) == []
    assert len(machines.pids(0)) == 1
    machines.power_on(1)
    argv = [sys.executable, "-c", TALKER, machines.address(1), machines.address(0)]
    machines.start(1, argv, stdout=subprocess.DEVNULL)
    hears(heard[0])


def test_a_parent_that_waits_for_a_stopped_child_stands_still() -> None:
    """It waits in the kernel until its child has begun another program, and cannot obey before."""
    with Machines(1) as machines:
        for _ in range(20):
            machines.start(0, ["sh", "-c", "setsid sh -c 'sleep 600 & sleep 600' & sleep 600 & sleep 600"])
        machines.freeze(0)
        machines.kill(0)
        assert machines.pids(0) == []


def test_fleets_are_apart_and_nothing_is_left_of_one_whose_owner_was_killed() -> None:
    owner, address, pid = an_owner()
    try:
        with Machines(1) as other:
            assert other.address(0) != address
            os.kill(pid, 0)  # one with an owner is left alone
    finally:
        owner.kill()
        owner.wait()
    with Machines(1) as next_one:
        assert gone(pid)
        assert len(next_one.pids(0)) == 0


def test_ctrl_c_removes_them() -> None:
    owner, _, pid = an_owner()
    owner.send_signal(signal.SIGINT)
    owner.wait(20)
    assert gone(pid)

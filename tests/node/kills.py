"""Random kills of agents, ranks and spares, and what must hold after each. Used by tests, soak and benchmark."""

from __future__ import annotations

import os
import random
import signal
from dataclasses import dataclass, field
from typing import Any

from tests.fleet import Fleet, Process, eventually

NOOP = ("--no-python", "sleep", "100000")
OPTIONS = ("--nnodes", "3:4", "--target", "4", "--spares", "2", "--max-restarts", "100000", "--last-call-s", "0.5")
FLEET = 6


@dataclass
class Tally:
    broken: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)
    rounds: int = 0
    story: list[str] = field(default_factory=list)


def random_kills(fleet: Fleet, *, seed: int, kills: int, coordinator_too: bool = False) -> Tally:
    """Kill something at random again and again; after each, the world must be whole and its ranks alone."""
    rng = random.Random(seed)
    tally = Tally()
    coordinator = fleet.coordinator()
    nodes: dict[str, Process] = {}
    made = 0

    def refill() -> None:
        nonlocal made
        while len(nodes) < FLEET:
            nodes[f"w{made}"] = fleet.node(f"w{made}", *OPTIONS, program=NOOP)
            made += 1

    refill()
    view = _whole(fleet, -1)
    for _ in range(kills):
        number = view["round"]
        victim = rng.choice(view["members"])
        if coordinator_too and rng.random() < 0.3:
            tally.story.append(f"coordinator in round {number}")
            coordinator.kill()
            coordinator.wait()
            coordinator = fleet.coordinator()
            view = _whole(fleet, number - 1)
            if view["round"] != number:
                tally.broken.append(f"the coordinator's death ended round {number}")
        elif victim["role"] == "active" and rng.random() < 0.4:
            name = victim["name"]
            pids = eventually(lambda n=name, r=number: ranks_of(fleet, n, r), f"ranks of {name}")  # type: ignore[misc]
            tally.story.append(f"rank on {victim['name']} in round {number}")
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
            view = _whole(fleet, number)
        else:
            tally.story.append(f"{victim['role']} {victim['name']} in round {number}")
            nodes.pop(victim["name"]).kill()
            refill()
            view = _whole(fleet, number if victim["role"] == "active" else number - 1, without=victim["name"])
        tally.broken += check(fleet, view)
    tally.rounds = view["round"]
    fleet.order("cancel", why="enough")
    codes = {name: node.wait() for name, node in nodes.items()}
    tally.broken += [f"{name} exited {code} after a cancel" for name, code in codes.items() if code != 1]
    coordinator.kill(signal.SIGTERM)
    coordinator.wait()
    tally.left = fleet.left_over()
    return tally


def _whole(fleet: Fleet, after: int, without: str = "") -> dict[str, Any]:
    """A round later than `after` trains at full size, and everyone is here."""

    def whole(view: dict[str, Any]) -> bool:
        names = {member["name"] for member in view["members"]}
        trains = view["state"] == "training" and view["round"] > after and view["world"] == 4
        return trains and len(names) == FLEET and without not in names

    return fleet.until(f"whole after round {after}", whole)


def check(fleet: Fleet, view: dict[str, Any]) -> list[str]:
    """What is wrong with a settled world; nothing, one hopes."""
    wrong = []
    ranks = sorted(m["rank"] for m in view["members"] if m["role"] == "active")
    if ranks != [0, 1, 2, 3]:
        wrong.append(f"round {view['round']}: ranks {ranks}")
    alive = running(fleet)
    old = [f"{place} in round {number}" for number, place in alive if number < view["round"]]
    if old:
        wrong.append(f"round {view['round']} runs, and so do {old}")
    return wrong


def running(fleet: Fleet) -> list[tuple[int, str]]:
    """(round, worker) of every rank process that is alive."""
    found = []
    for line in fleet.left_over():
        pid, _, command = line.partition(": ")
        if command.startswith("sleep "):
            env = _environ(int(pid))
            if "MUSTER_ROUND" in env:
                found.append((int(env["MUSTER_ROUND"]), env["MUSTER_WORKER"]))
    return found


def ranks_of(fleet: Fleet, worker: str, number: int) -> list[int]:
    pids = []
    for line in fleet.left_over():
        pid, _, command = line.partition(": ")
        if command.startswith("sleep "):
            env = _environ(int(pid))
            if env.get("MUSTER_WORKER") == worker and env.get("MUSTER_ROUND") == str(number):
                pids.append(int(pid))
    return pids


def _environ(pid: int) -> dict[str, str]:
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            pairs = file.read().decode(errors="replace").split("\0")
    except OSError:
        return {}
    return dict(pair.partition("=")[::2] for pair in pairs if "=" in pair)

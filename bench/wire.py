"""What do mutual proof and TLS cost? The same kills and the same connections in clear, with proofs, and in TLS.

python -m bench.wire [--json] [--only PART] [--workers N] [--kills N] [--blocks N] [--connections N]

TLS is spoken between machines only: as root, workers live in a network namespace of their own; else that row is empty.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from bench import report
from bench.report import Figure, p50, p99, spread
from muster.types.frames import Frame, HelloFrame, WelcomeFrame
from muster.types.world import RunId, Settings
from muster.world import opening
from muster.world.connection import Address, Connection
from muster.world.service import Coordinator
from tests.fleet import Fleet, Process

NOOP = ("--no-python", "sleep", "100000")
TOKEN = "a token of the bench, which opens nothing"
OPEN, PROOF, TLS = "no token", "mutual proof", "TLS"
HERE, THERE = "10.213.77.1", "10.213.77.2"
NAMESPACE = f"muster-bench-{os.getpid()}"


class FarFleet(Fleet):
    """Its workers are on another machine, as far as they can see."""

    def start(self, *command: str, **env: str) -> Process:
        away = ("ip", "netns", "exec", NAMESPACE) if "muster.node.cli" in command else ()
        return super().start(*away, *command, **env)


@contextlib.contextmanager
def another_machine() -> Iterator[bool]:
    """A network namespace, if one can be had."""
    link = f"mb{os.getpid()}"
    steps = [
        f"ip netns add {NAMESPACE}",
        f"ip link add {link} type veth peer name eth0 netns {NAMESPACE}",
        f"ip addr add {HERE}/24 dev {link}",
        f"ip link set {link} up",
        f"ip -n {NAMESPACE} addr add {THERE}/24 dev eth0",
        f"ip -n {NAMESPACE} link set eth0 up",
        f"ip -n {NAMESPACE} link set lo up",
    ]
    try:
        yield all(subprocess.run(step.split(), capture_output=True).returncode == 0 for step in steps)
    except FileNotFoundError:
        yield False
    finally:
        with contextlib.suppress(FileNotFoundError):
            subprocess.run(["ip", "netns", "del", NAMESPACE], capture_output=True)


@contextlib.contextmanager
def a_fleet(mode: str) -> Iterator[Fleet]:
    folder = Path(tempfile.mkdtemp(prefix="muster-bench-"))
    fleet = FarFleet(folder) if mode == TLS else Fleet(folder)
    if mode != OPEN:
        fleet.env["MUSTER_RUN_TOKEN"] = TOKEN
    try:
        fleet.coordinator(host=HERE if mode == TLS else "127.0.0.1")
        yield fleet
    finally:
        fleet.close()
        shutil.rmtree(folder, ignore_errors=True)


# A worker is killed -------------------------------------------------------------------------------


def heal(given: argparse.Namespace) -> Iterator[Figure]:
    """Blocks of kills take turns, so that whatever else the machine does is shared by all."""
    with another_machine() as can_leave:
        modes = [OPEN, PROOF, *([TLS] if can_leave else [])]
        taken: dict[str, list[float]] = {mode: [] for mode in modes}
        for _ in range(given.blocks):
            for mode in modes:
                with a_fleet(mode) as fleet:
                    taken[mode] += _kills(fleet, given.workers, given.kills)
    name = f"{given.workers} workers, one agent is killed, one spare → next round released"
    yield from _compared(name, taken)


def _kills(fleet: Fleet, workers: int, kills: int) -> Iterator[float]:
    options = (
        "--nnodes",
        str(workers),
        "--spares",
        "1",
        "--max-restarts",
        "0",
        "--last-call-s",
        "30",
        "--lease-s",
        "10",
    )
    nodes = {f"w{i}": fleet.node(f"w{i}", *options, program=NOOP) for i in range(workers + 1)}
    for turn in range(kills):
        view = fleet.until("settled", lambda v: v["state"] == "training" and v["spares"] == 1, 120)
        number = view["round"]
        time.sleep(0.5)
        active = [member["name"] for member in view["members"] if member["rank"] is not None]
        struck = time.monotonic()
        nodes[active[0]].kill()
        story = fleet.until("it is told", lambda v: v["round"] > number)["story"]  # noqa: B023
        yield next(line["at"] for line in story[::-1] if line["kind"] == "release") - struck
        nodes[f"n{turn}"] = fleet.node(f"n{turn}", *options, program=NOOP)


# A connection is made -----------------------------------------------------------------------------


def connect(given: argparse.Namespace) -> Iterator[Figure]:
    """In one process: what both sides compute, and no start of anybody."""
    for mode in (OPEN, PROOF, TLS):
        with mock.patch.object(opening, "_is_direct", return_value=mode != TLS):
            samples = asyncio.run(_connections(mode, given.connections))
        yield Figure(f"connect → welcome, {mode}, p50", p50(samples) * 1000, "ms", "", True, **_spread(samples))


async def _connections(mode: str, count: int) -> list[float]:
    token = None if mode == OPEN else TOKEN
    coordinator = Coordinator(token=token)
    coordinator.open_run(RunId("run"), Settings())
    address = await coordinator.start("127.0.0.1", 0)
    taken = [await _welcome(address, token) for _ in range(count + 1)]
    await coordinator.stop()
    return taken[1:]  # the first makes the key of the run


async def _welcome(address: Address, token: str | None) -> float:
    loop = asyncio.get_running_loop()
    welcomed: asyncio.Future[float] = loop.create_future()

    def heard(frame: Frame) -> None:
        if isinstance(frame, WelcomeFrame) and not welcomed.done():
            welcomed.set_result(time.perf_counter())

    begun = time.perf_counter()
    connection = Connection(
        lambda: [address], RunId("run"), "control", token=token, hello=lambda local: HelloFrame(), on_frame=heard
    )
    task = loop.create_task(connection.run())
    try:
        return await asyncio.wait_for(welcomed, 30) - begun
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


# Telling ------------------------------------------------------------------------------------------


def _compared(name: str, taken: dict[str, list[float]]) -> Iterator[Figure]:
    clear = p50(taken[OPEN])
    for mode in (OPEN, PROOF, TLS):
        samples = taken.get(mode, [])
        if not samples:
            yield Figure(f"{name}, {mode}, p50", None, "ms", "<= + 10 %", False, note="no network namespace to be had")
            continue
        more = p50(samples) / clear - 1
        goal = "" if mode == OPEN else "<= + 10 %"
        figure = Figure(f"{name}, {mode}, p50", p50(samples) * 1000, "ms", goal, more <= 0.1, **_spread(samples))
        yield figure if mode == OPEN else _noted(figure, f"{more:+.1%}")


def _spread(samples: list[float]) -> dict[str, Any]:
    return {**spread(samples, 1000), "note": f"p99 {p99(samples) * 1000:.3g}"}


def _noted(figure: Figure, note: str) -> Figure:
    return Figure(**{**vars(figure), "note": f"{note}, {figure.note}"})


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--kills", type=int, default=10, help="of each block")
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--connections", type=int, default=200)


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[Figure]]] = {"heal": heal, "connect": connect}

if __name__ == "__main__":
    sys.exit(report.run("bench wire", PARTS, _options))

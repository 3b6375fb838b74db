"""What do mutual proof and TLS cost? The same kills and the same connections in clear, with proofs, and in TLS.

python -m bench.wire [--json] [--only PART] [--workers N] [--kills N] [--connections N]

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
from muster.types.frames import (
    Frame,
    GoneFrame,
    HelloFrame,
    Introduction,
    ProbeFrame,
    RecallFrame,
    ReleaseFrame,
    StoppedFrame,
    WelcomeFrame,
)
from muster.types.world import MemberId, RunId, Settings
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
    """All stand side by side and are struck in turn, so that whatever else the machine does is shared by all."""
    with another_machine() as can_leave, contextlib.ExitStack() as fleets:
        modes = [OPEN, PROOF, *([TLS] if can_leave else [])]
        struck = {mode: Struck(fleets.enter_context(a_fleet(mode)), given.workers) for mode in modes}
        taken: dict[str, list[float]] = {mode: [] for mode in modes}
        for turn in range(given.kills):
            for mode in modes[turn % len(modes) :] + modes[: turn % len(modes)]:
                taken[mode].append(struck[mode].strike())
    name = f"{given.workers} workers, one agent is killed, one spare → next round released"
    yield from _compared(name, taken)


class Struck:
    """A fleet that loses a worker again and again."""

    def __init__(self, fleet: Fleet, workers: int) -> None:
        self._fleet = fleet
        self._workers = workers
        self._nodes: dict[str, Process] = {}
        for _ in range(workers + 1):
            self._add()
        self._settled()

    def _add(self) -> None:
        options = ("--nnodes", str(self._workers), "--spares", "1", "--max-restarts", "0")
        times = ("--last-call-s", "30", "--lease-s", "10")
        name = f"w{len(self._nodes)}"
        self._nodes[name] = self._fleet.node(name, *options, *times, program=NOOP)

    def _settled(self) -> dict[str, Any]:
        return self._fleet.until("settled", lambda v: v["state"] == "training" and v["spares"] == 1, 120)

    def strike(self) -> float:
        """Seconds from the death of one that trains to the release of the next round."""
        view = self._settled()
        active = next(member["name"] for member in view["members"] if member["rank"] is not None)
        struck = time.monotonic()
        self._nodes[active].kill()
        story = self._fleet.until("it is told", lambda v: v["round"] > view["round"])["story"]
        self._add()
        self._settled()
        time.sleep(0.5)  # the new one has warmed up
        return float(next(line["at"] for line in story[::-1] if line["kind"] == "release") - struck)


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


# What the same costs without processes -------------------------------------------------------------


def frames(given: argparse.Namespace) -> Iterator[Figure]:
    """The frames of a loss, both sides in one process: CPU time, which a busy machine changes little."""
    spent: dict[str, list[float]] = {}
    for mode in (OPEN, PROOF, TLS):
        with mock.patch.object(opening, "_is_direct", return_value=mode != TLS):
            spent[mode] = asyncio.run(_losses(mode, given.workers, given.losses))
    for mode, samples in spent.items():
        more = f"{(p50(samples) - p50(spent[OPEN])) * 1000:+.2f} ms, "
        told = {**_spread(samples), "note": more + _spread(samples)["note"]}
        name = f"{given.workers} workers, one is lost → all have the next round, CPU of both sides, {mode}, p50"
        yield Figure(name, p50(samples) * 1000, "ms", "", True, **told)


class Played:
    """An agent and its guard: one connection each, and nothing below."""

    def __init__(self, address: Address, token: str | None, index: int, settings: dict[str, object]) -> None:
        who = Introduction(MemberId(f"m{index}"), f"w{index}", store_port=1)
        hello = HelloFrame(member=who, settings=settings)
        run_id = RunId("run")
        self._id = who.member_id
        self.round = -1
        self.gone = False
        self._agent = Connection(
            lambda: [address], run_id, "agent", token=token, hello=lambda local: hello, on_frame=self._hear
        )
        self._guard = Connection(
            lambda: [address], run_id, "guard", token=token, hello=lambda local: hello, on_frame=self._probed
        )
        self._tasks = [asyncio.create_task(one.run()) for one in (self._agent, self._guard)]

    @property
    def ready(self) -> bool:
        return self._agent.up and self._guard.up

    def _hear(self, frame: Frame) -> None:
        if isinstance(frame, ReleaseFrame) and frame.record.place_of(self._id) is not None:
            self.round = frame.record.round
        elif isinstance(frame, RecallFrame):
            self._agent.send(StoppedFrame(round=frame.round, store_port=1))

    def _probed(self, frame: Frame) -> None:
        if isinstance(frame, ProbeFrame) and self.gone:
            self._guard.send(GoneFrame(round=self.round))

    def die(self) -> None:
        self.gone = True
        self._tasks[0].cancel()

    def leave(self) -> None:
        for task in self._tasks:
            task.cancel()


async def _losses(mode: str, workers: int, losses: int) -> list[float]:
    token = None if mode == OPEN else TOKEN
    coordinator = Coordinator(token=token)
    address = await coordinator.start("127.0.0.1", 0)
    settings: dict[str, object] = {"min": workers, "max": workers, "spares": 1, "lease_s": 60.0, "max_restarts": 0}
    members = [Played(address, token, index, settings) for index in range(workers + 1)]
    spent = []
    for turn in range(losses):
        async with asyncio.timeout(30):
            await _until(lambda: all(one.ready for one in members))
            await _until(lambda: sum(one.round == turn for one in members) == workers)  # noqa: B023
            await asyncio.sleep(0.02)
            lost = next(one for one in members if one.round == turn)
            began = time.process_time()
            lost.die()
            await _until(lambda: sum(one.round == turn + 1 for one in members) == workers)  # noqa: B023
            spent.append(time.process_time() - began)
        lost.leave()
        members.remove(lost)
        members.append(Played(address, token, workers + 1 + turn, settings))
    for one in members:
        one.leave()
    await coordinator.stop()
    return spent


async def _until(look: Callable[[], bool]) -> None:
    while not look():
        await asyncio.sleep(0)


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
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--losses", type=int, default=200)
    parser.add_argument("--connections", type=int, default=200)


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[Figure]]] = {
    "heal": heal,
    "frames": frames,
    "connect": connect,
}

if __name__ == "__main__":
    sys.exit(report.run("bench wire", PARTS, _options))

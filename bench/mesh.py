"""How long after its key is written does `mesh_wait` return? What does a hostile server cost? And a probe of all pairs?

    python -m bench.mesh [--json] [--only wait] [--only hostile] [--only probe]

Peers of the first: a loop that looks every 2 s, as one writes it by hand, in the same run at the same server.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import muster
from bench import report
from bench.report import Figure, below, p50, p99
from muster.core.member.state import MemberState
from muster.mesh.probe import Prober, Row
from muster.types.frames import Frame, ReleaseFrame
from muster.types.world import MemberId, RunId, Settings
from muster.world.membership import MemberIdentity, Membership
from muster.world.service import Coordinator
from tests.mesh import servers
from tests.mesh.hostile import BEHAVIOURS, hostile
from tests.mesh.servers import Server, ask

POLL_S = 2.0
MARGIN_S = 0.5


# Waiting -----------------------------------------------------------------------------------------


def wait(given: argparse.Namespace) -> Iterator[Figure]:
    """From just before the key is sent to the server, to the return of a wait that began some time before.

    What the server takes to write it, an etcd on disk, is part of that; the note tells it apart.
    """
    with _places() as places:
        for name, place in places.items():
            if place is None:
                yield below(f"key written → mesh_wait returns, {name}, p99", None, 100, "ms", note=servers.NO_ETCD)
                continue
            timed = [_delay(place, f"ours-{turn}", _mesh_wait) for turn in range(given.repeat)]
            ours, writes = [delay for delay, _ in timed], [write for _, write in timed]
            theirs = [_delay(place, f"poll-{turn}", _poll)[0] for turn in range(given.repeat_polls)]
            peers = {f"a poll every {POLL_S:g} s, mean of {len(theirs)}": sum(theirs) / len(theirs) * 1000}
            note = f"p50 {p50(ours) * 1000:.1f} ms, {len(ours)} waits; the write itself p99 {p99(writes) * 1000:.1f} ms"
            yield below(
                f"key written → mesh_wait returns, {name}, p99", p99(ours) * 1000, 100, "ms", peers=peers, note=note
            )


@contextlib.contextmanager
def _places() -> Iterator[dict[str, Server | None]]:
    """A real etcd, and our own server in a process of its own, as workers see it."""
    folder = Path(tempfile.mkdtemp(prefix="muster-bench-"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        etcd = stack.enter_context(servers.etcd(folder)) if servers.ETCD else None
        embedded = stack.enter_context(_embedded())
        yield {"etcd": etcd, "embedded": embedded}


class _Apart:
    """The embedded server alone in a process."""

    CODE = (
        "import asyncio\n"
        "from muster.mesh.serving import KeyServer\n"
        "async def main():\n"
        "    print(await KeyServer().start(), flush=True)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )

    def start(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", self.CODE], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()

    def stop(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextlib.contextmanager
def _embedded() -> Iterator[_Apart]:
    server = _Apart()
    server.start()
    try:
        yield server
    finally:
        server.stop()


def _delay(place: Server, node: str, waits: Callable[[Server, str], None]) -> tuple[float, float]:
    """The key comes at any moment of a poll's period, so that neither side can be in step with it."""
    marks: list[float] = []

    def write() -> None:
        marks.append(time.perf_counter())
        ask(place.address, "PUT", f"muster/mesh-ready/{node}", value="now")
        marks.append(time.perf_counter())

    timer = threading.Timer(0.1 + random.random() * POLL_S, write)
    timer.start()
    waits(place, node)
    returned = time.perf_counter()
    timer.join()
    sent, answered = marks
    return returned - sent, answered - sent


def _mesh_wait(place: Server, node: str) -> None:
    os.environ |= {"NODE_NAME": node, "MUSTER_MESH_ENDPOINT": place.address}
    with contextlib.redirect_stderr(None):
        muster.mesh_wait(30)
    assert muster.mesh_status() == "ready"


def _poll(place: Server, node: str) -> None:
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException):
            if ask(place.address, "GET", f"muster/mesh-ready/{node}").status == 200:
                return
        time.sleep(POLL_S)


# Hostile servers ---------------------------------------------------------------------------------


def hostility(given: argparse.Namespace) -> Iterator[Figure]:
    """How far from its timeout a wait comes back. It must not raise, and nobody is ever ready."""
    off: dict[str, float] = {}
    for behaviour in BEHAVIOURS:
        with hostile(behaviour) as server, contextlib.redirect_stderr(None):
            os.environ |= {"NODE_NAME": "node-1", "MUSTER_MESH_ENDPOINT": server.address}
            begun = time.perf_counter()
            muster.mesh_wait(given.timeout_s)
            off[behaviour.__name__] = abs(time.perf_counter() - begun - given.timeout_s)
            assert muster.mesh_status() == "timeout", behaviour.__name__
    worst = max(off, key=lambda name: off[name])
    note = f"{len(off)} kinds of server, timeout {given.timeout_s:g} s, worst: {worst}"
    yield below("hostile server: distance from the timeout, worst", off[worst], MARGIN_S, "s", note=note)


# Probing -----------------------------------------------------------------------------------------


def probing(given: argparse.Namespace) -> Iterator[Figure]:
    """All members in this one process, on one core: each probes all others, over loopback, both ways."""
    count = given.members
    ways = count * (count - 1)
    times = [asyncio.run(_probe_all(count)) for _ in range(given.repeat_probes)]
    streams = asyncio.run(_connect_all(count))
    note = f"{ways} ways, {ways / p50(times):.0f}/s, worst {max(times):.3g} s of {len(times)}"
    peers = {"the same with asyncio streams, s": streams}
    yield below(f"{count} members, all pairs probed on loopback, p50", p50(times), 1.0, "s", peers=peers, note=note)
    gated, plain = (asyncio.run(_form(count, gate)) for gate in (60.0, None))
    yield below(
        f"{count} members join, all pairs are probed, ranks released",
        gated,
        1.5,
        "s",
        peers={"without a gate, s": plain},
        note="coordinator and members in one process",
    )


async def _probe_all(count: int) -> float:
    left, over = count * (count - 1), asyncio.Event()

    def found(rows: list[Row]) -> None:
        nonlocal left
        left -= sum(rtt is not None for _, rtt, _ in rows)
        if not left:
            over.set()

    probers = {f"m{index}": Prober("run", f"m{index}", found) for index in range(count)}
    paths = {}
    for name, prober in probers.items():
        listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        paths[name] = [listener.getsockname()]
        prober.serve(listener)
    began = time.perf_counter()
    for prober in probers.values():
        prober.follow(paths)
    await over.wait()
    took = time.perf_counter() - began
    for prober in probers.values():
        prober.close()
    return took


async def _connect_all(count: int) -> float:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(await reader.readline())
        writer.close()

    async def member(index: int) -> None:
        for place, server in enumerate(listening):
            if place != index:
                reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
                writer.write(b"hello\n")
                await reader.readline()
                writer.close()

    listening = [await asyncio.start_server(answer, "127.0.0.1", 0, backlog=4096) for _ in range(count)]
    began = time.perf_counter()
    await asyncio.gather(*(member(index) for index in range(count)))
    took = time.perf_counter() - began
    for server in listening:
        server.close()
    return took


async def _form(count: int, gate_timeout_s: float | None) -> float:
    """From the first hello to the release that reached the last member."""
    coordinator = Coordinator()
    address = await coordinator.start("127.0.0.1", 0)
    released, over = 0, asyncio.Event()

    def hear(frame: Frame) -> None:
        nonlocal released
        released += isinstance(frame, ReleaseFrame)
        if released == count:
            over.set()

    settings: dict[str, object] = {"min": count, "max": count, "lease_s": 30.0}
    if gate_timeout_s is not None:
        settings["gate_timeout_s"] = gate_timeout_s
    members = []
    for index in range(count):
        mine = MemberIdentity(lambda: [address], RunId("bench"), MemberId(f"m{index}"), f"w{index}", settings)
        state = MemberState(mine.member_id, mine.run_id, Settings.parse(settings), asyncio.get_running_loop().time())
        members.append(Membership(mine, state, lambda order: None, on_frame=hear))
    began = time.perf_counter()
    tasks = [asyncio.ensure_future(member.run()) for member in members]
    await over.wait()
    took = time.perf_counter() - began
    for task, member in zip(tasks, members, strict=True):
        task.cancel()
        member.close()
    await asyncio.gather(*tasks, return_exceptions=True)
    await coordinator.stop()
    return took


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeat", type=int, default=100, help="waits per server")
    parser.add_argument("--repeat-polls", type=int, default=10, help="waits of the peer per server")
    parser.add_argument("--timeout-s", type=float, default=2.0, help="of a wait for a hostile server (2)")
    parser.add_argument("--members", type=int, default=64, help="members that probe each other")
    parser.add_argument("--repeat-probes", type=int, default=5, help="how often all pairs are probed")


PARTS = {"wait": wait, "hostile": hostility, "probe": probing}

if __name__ == "__main__":
    sys.exit(report.run("bench mesh", PARTS, _options))

"""Does a busy machine cost false alarms? Workers train under the default lease while all is as busy as it can be.

Busy means: two endless loops for each core, 200 watchers of 1,000 trainings in a control plane, and writers that change
those as fast as it lets them. Nobody is lost, so every loss by silence is a false alarm.

python -m bench.alarms [--json] [--seconds N] [--workers N]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from bench import load, report
from bench.report import Figure, below, p50, p99
from muster.daemon import options, plane
from muster.ports import Write
from muster.store.sqlite import SqliteStore
from muster.types.frames import Frame, RenewFrame
from muster.types.training import Metadata, Resources, Spec, Training
from muster.types.world import LEASE_S
from muster.world.frames_out import Peer
from muster.world.protocol import RunProtocol
from tests.fleet import eventually
from tests.plane import Plane, fresh, reasons

ROOT = Path(__file__).parents[1]
TRAININGS, WATCHERS, WRITERS = 1_000, 200, 16
GAPS = "gaps.json"  # in the home of the control plane, written when it ends: run → member → seconds between renewals
TRAININGS_PATH = "/v1/namespaces/default/trainings"


def alarms(given: argparse.Namespace) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as folder:
        made = Plane(Path(folder))
        try:
            yield from _measured(made, given)
        finally:
            made.close()


def _measured(made: Plane, given: argparse.Namespace) -> Iterator[Figure]:
    made.home.mkdir()
    asyncio.run(_fill(made.home / "muster.db"))
    serving = (sys.executable, "-m", "bench.alarms", "serve", "--home", str(made.home))
    made.daemon = made.start(*serving, PYTHONPATH=str(ROOT))
    made.daemon.expect(r"muster serves on (\S+)")
    training = made.train("demo", world=(given.workers, given.workers, given.workers), spares=1)
    training.wait_until_target_world(timeout=120)
    eventually(lambda: fresh(training).training.status.spares.ready == 1, "a spare stands by", 60)
    with _busy(made) as writes:
        time.sleep(given.seconds)
    told, counted = reasons(training), _counted(made)
    round_now = fresh(training).training.status.round
    made.daemon.kill(signal.SIGTERM)
    made.daemon.wait()
    gaps = json.loads((made.home / GAPS).read_text())[training.training.uid]
    every = [gap for one in gaps.values() for gap in one]
    lost = told.count("WorkerLost")
    about = f"in {given.seconds:g} s; {lost} workers lost, round {round_now}, {writes() / given.seconds:.0f} writes/s"
    yield Figure("false alarms under full load", float(counted), "", "0", counted == lost == round_now == 0, note=about)
    worst = ", ".join(f"{max(one):.2f}" for one in gaps.values() if one)
    note = f"p50 {p50(every):.3f} s, p99 {p99(every):.3f} s of {len(every)}; the worst of each member: {worst}"
    yield below("silence between two renewals, worst", max(every), LEASE_S, "s", note=note)


def _counted(made: Plane) -> int:
    """What the metrics say."""
    asked = urllib.request.Request(f"{made.url}/metrics", headers={"Authorization": f"Bearer {made.api_token}"})
    with urllib.request.urlopen(asked, timeout=60) as answer:
        text = answer.read().decode()
    line = next(line for line in text.splitlines() if line.startswith("muster_false_alarms_total "))
    return int(float(line.split()[1]))


async def _fill(path: Path) -> None:
    """Trainings that wait for GPUs which are not there."""
    store = SqliteStore.open(path, synchronous="NORMAL")
    spec = Spec(script="train.py", resources=Resources(gpus=1), spares=1)
    now = datetime.now(UTC)
    for index in range(TRAININGS):
        about = Metadata(f"t{index:05}", uid=f"uid-{index}", generation=1, creation_timestamp=now)
        await store.write(Write(put=Training(about, spec), expect=0))
    await store.close()


# The load ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def _busy(made: Plane) -> Iterator[Callable[[], int]]:
    port, loops = made.url.rpartition(":")[2], 2 * (os.cpu_count() or 1)
    crowd: list[subprocess.Popen[str]] = []
    counts = made.folder / "writes"
    try:
        crowd += [_spinning() for _ in range(loops)]
        crowd += [_helper("watch", port, made.api_token), _helper("write", port, made.api_token, str(counts))]
        yield lambda: int(counts.read_text() or 0) if counts.exists() else 0
    finally:
        ended = [process.args for process in crowd if process.poll() is not None]
        for process in crowd:
            process.terminate()
            process.wait()
    assert not ended, f"the load has ended: {ended}"


def _spinning() -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", "while True: pass"], text=True)


def _helper(what: str, port: str, token: str, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "bench.alarms", what, port, *words]
    made = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert made.stdin is not None and made.stdout is not None
    made.stdin.write(f"{token}\n")
    made.stdin.flush()
    assert made.stdout.readline() == "ready\n"
    return made


def watch(port: int) -> None:
    """Streams of all changes, read and thrown away."""
    token, select = sys.stdin.readline().strip(), selectors.DefaultSelector()
    for _ in range(WATCHERS):
        sock = socket.create_connection(("127.0.0.1", port))
        sock.sendall(load.request("GET", "/v1/watch", token))
        select.register(sock, selectors.EVENT_READ, sock)
    print("ready", flush=True)
    while True:
        for key, _ in select.select():
            if not key.data.recv(1 << 20):
                select.unregister(key.data)
                key.data.close()  # too slow for it: another takes its place
                sock = socket.create_connection(("127.0.0.1", port))
                sock.sendall(load.request("GET", "/v1/watch", token))
                select.register(sock, selectors.EVENT_READ, sock)


def write(port: int, counts: Path) -> None:
    """Changes of one training after the other, as fast as they are taken."""
    token, done = sys.stdin.readline().strip(), 0
    print("ready", flush=True)

    def patch(count: int) -> bytes:
        body = json.dumps({"metadata": {"annotations": {"count": str(count)}}}).encode()
        path = f"{TRAININGS_PATH}/t{count % TRAININGS:05}"
        return load.request("PATCH", path, token, body, "application/merge-patch+json")

    while True:
        done += load.drive(port, patch, connections=WRITERS, seconds=1.0).answers
        counts.write_text(str(done))


# The control plane, which notes when it hears of whom --------------------------------------------


def serve() -> int:
    heard: dict[tuple[str, int], float] = {}
    gaps: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    hear = RunProtocol.hear

    def noted(self: RunProtocol, peer: Peer, frame: Frame, now: float) -> None:
        if isinstance(frame, RenewFrame):
            who, at = (self.run_id, id(peer)), time.monotonic()
            if who in heard:
                gaps[self.run_id][str(id(peer))].append(round(at - heard[who], 4))
            heard[who] = at
        hear(self, peer, frame, now)

    RunProtocol.hear = noted  # type: ignore[method-assign]
    told = options.read(sys.argv[2:])
    try:
        return plane.run(told)
    finally:
        (told.home / GAPS).write_text(json.dumps(gaps))


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=3600.0, help="how long (3600)")
    parser.add_argument("--workers", type=int, default=4, help="that train together (4)")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["serve", *_]:
            sys.exit(serve())
        case ["watch", port]:
            watch(int(port))
        case ["write", port, counts]:
            write(int(port), Path(counts))
        case _:
            sys.exit(report.run("bench alarms", {"alarms": alarms}, _options))

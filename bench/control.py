"""How fast and how small is the control plane? With torchrun and, where they install, torchx and Kubeflow beside us.

python -m bench.control [--json] [--only PART] [--repeat N]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import muster
from bench import load, programs, report
from bench.report import Figure, below, p50, p99, spread
from muster import WorldSize
from muster.clock import SystemClock
from muster.control.loop import Loop
from muster.ports import Filter, Write
from muster.store.sqlite import SqliteStore
from muster.types.training import Metadata, Outcome, Spec, Status, Training, Uid
from tests.fleet import eventually, family, kill_all
from tests.plane import Plane, fresh
from tests.simulator.control import SimulatedBackend, SimulatedWorlds

PEERS = Path(sys.executable).parents[1] / "peers"
WATCHERS = 200
PAGE = 500
TRIVIAL = """
import os
import torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
"""


@contextlib.contextmanager
def a_plane(**env: str) -> Iterator[Plane]:
    folder = Path(tempfile.mkdtemp(prefix="muster-bench-"))
    plane = Plane(folder)
    plane.serve(**env)
    try:
        yield plane
    finally:
        plane.close()
        shutil.rmtree(folder, ignore_errors=True)


# Waits -------------------------------------------------------------------------------------------


def waits(given: argparse.Namespace) -> Iterator[Figure]:
    """From the moment that a status names as the end to the moment at which a wait returns, while 200 others poll.

    The others wait for the same training from one process over raw sockets, so that each change wakes all of them.
    """
    delays: list[float] = []
    with a_plane() as plane:
        for turn in range(3 * given.repeat):
            training = plane.train(f"t{turn}", "wait", world=(1, 1, 1))
            path = f"/v1/namespaces/default/trainings/t{turn}"
            crowd = subprocess.Popen(
                [sys.executable, "-m", "bench.load", plane.url.rpartition(":")[2], path, str(WATCHERS)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            assert crowd.stdin is not None and crowd.stdout is not None
            crowd.stdin.write(f"{plane.api_token}\n")
            crowd.stdin.flush()
            assert crowd.stdout.readline() == "holding\n"
            training.wait_until_target_world(timeout=30)
            threading.Timer(0.2, plane.go).start()
            training.wait(timeout=60)
            returned = time.time()
            finished = training.training.status.finished_at
            assert finished is not None
            delays.append(returned - finished.timestamp())
            assert crowd.poll() is None, "the others are gone"
            crowd.kill()
            crowd.communicate()
            (plane.notes / "go").unlink()
    note = f"p50 {p50(delays) * 1000:.1f} ms, {len(delays)} changes"
    yield below(f"state change → wait returns, {WATCHERS} watchers, p99", p99(delays) * 1000, 50, "ms", note=note)


# Starting and scaling ----------------------------------------------------------------------------


def start(given: argparse.Namespace) -> Iterator[Figure]:
    """A rank notes when it starts; the clock is the machine's own, so both sides agree on it."""
    first: list[float] = []
    grown: list[float] = []
    with a_plane() as plane:
        script = programs.write(plane.folder)["wait"]
        for turn in range(given.repeat):
            notes = plane.folder / f"notes-{turn}"
            notes.mkdir()
            begun = time.monotonic()
            training = plane.train(f"t{turn}", script=script, args=[str(notes)], world=(1, 1, 2))
            eventually(lambda n=notes: programs.marks(n, "start"), "the rank starts")  # type: ignore[misc]
            first.append(programs.marks(notes, "start")[0][0] - begun)
            training.wait_until_target_world(timeout=30)
            begun = time.monotonic()
            training.scale(target=2)
            eventually(
                lambda n=notes: [mark for mark in programs.marks(n, "start") if mark[1] == 1],  # type: ignore[misc]
                "the new rank runs",
            )
            grown.append(next(at for at, rank, _ in programs.marks(notes, "start") if rank == 1) - begun)
            (notes / "go").touch()
            training.result(timeout=30)
    yield below("submit → first line of a rank, warm control plane, p50", p50(first) * 1000, 300, "ms")
    yield below("scale +1 → new rank runs, p50", p50(grown) * 1000, 500, "ms")


# Throughput --------------------------------------------------------------------------------------

NO_SUCH_GPUS = 64  # GPUs of a worker: more than any machine has, so that the trainings stay pending


def throughput(given: argparse.Namespace) -> Iterator[Figure]:
    with a_plane() as plane:
        port, token = int(plane.url.rpartition(":")[2]), plane.api_token
        trainings = "/v1/namespaces/default/trainings"
        for index in range(50):
            plane.train(f"t{index}", world=(1, 1, 1), resources={"gpus": NO_SUCH_GPUS}, force=True)
        reading = load.request("GET", f"{trainings}/t0", token)
        reads = load.drive(port, lambda _: reading, connections=16, seconds=given.seconds)

        def patch(count: int) -> bytes:
            body = json.dumps({"metadata": {"annotations": {"count": str(count)}}}).encode()
            return load.request("PATCH", f"{trainings}/t{count % 50}", token, body, "application/merge-patch+json")

        writes = load.drive(port, patch, connections=50, seconds=given.seconds)
    limit = "one Python process: parsing, routing and, for a write, one group commit with fsync"
    yield _at_least("durable writes over HTTP", writes, 500, limit)
    yield _at_least("reads over HTTP", reads, 1500, limit)


def _at_least(name: str, tally: load.Tally, goal: float, limit: str) -> Figure:
    note = f"p99 {p99(tally.latencies_s) * 1000:.1f} ms, {tally.errors} errors; limited by {limit}"
    ok = tally.per_s >= goal and tally.errors == 0
    return Figure(name, tally.per_s, "/s", f"≥ {goal:g}/s", ok, note=note)


# Ten thousand ------------------------------------------------------------------------------------


def many(given: argparse.Namespace) -> Iterator[Figure]:
    """Read pages of 500 from a real server, then reconcile a tenth of its trainings on a simulated backend."""
    stored, running = given.trainings, max(1, given.trainings // 10)
    folder = Path(tempfile.mkdtemp(prefix="muster-bench-"))
    plane = Plane(folder)
    try:
        plane.home.mkdir()
        asyncio.run(_fill(plane.home / "muster.db", stored, 0))
        plane.serve()
        port, token = int(plane.url.rpartition(":")[2]), plane.api_token
        page = load.request("GET", f"/v1/namespaces/default/trainings?limit={PAGE}", token)
        tally = load.drive(port, lambda _: page, connections=1, seconds=given.seconds)
    finally:
        plane.close()
    yield below(f"a page of {PAGE} of {stored} trainings, p99", p99(tally.latencies_s) * 1000, 100, "ms")
    took = asyncio.run(_reconcile_all(folder / "many.db", stored, running))
    shutil.rmtree(folder, ignore_errors=True)
    yield below(f"reconcile {running} running of {stored} until all have their target", took, 5, "s")


async def _fill(path: Path, ended: int, running: int) -> None:
    store = SqliteStore.open(path, synchronous="NORMAL")
    for start in range(0, ended + running, 500):
        batch = [_one(index, index >= ended) for index in range(start, min(start + 500, ended + running))]
        await asyncio.gather(*(store.write(Write(put=training, expect=0)) for training in batch))
    await store.close()


def _one(index: int, running: bool) -> Training:
    now = datetime.now(UTC)
    metadata = Metadata(f"t{index:05}", uid=f"uid-{index}", generation=1, creation_timestamp=now)
    spec = Spec(script="train.py", world_size=WorldSize(2, 2, 4), spares=1)
    if running:
        return Training(metadata, spec)
    done = Outcome("succeeded", "succeeded", "all 2 ranks of round 0 exited 0", None, now)
    return Training(metadata, spec, Status(1, "succeeded", rank_exits=(), outcome=done, finished_at=now))


async def _reconcile_all(path: Path, stored: int, running: int) -> float:
    await _fill(path, stored - running, running)
    clock = SystemClock()
    store = SqliteStore.open(path)
    loop: Loop

    def settled(uid: Uid) -> None:
        loop.run_changed(uid)

    worlds = SimulatedWorlds(clock, settled)
    backend = SimulatedBackend(clock, changed=worlds.worker_changed)
    loop = Loop(store, {"local": backend}, worlds, clock)
    begun = time.perf_counter()
    loop.start()
    await loop.idle()
    took = time.perf_counter() - begun
    ready = sum(item.training.status.holds("TargetReached") for item in store.page(Filter(phase="ready")).items)
    assert ready == running, f"only {ready} of {running} have their target"
    await loop.stop()
    await store.close()
    return took


# Coming back -------------------------------------------------------------------------------------


def comeback(given: argparse.Namespace) -> Iterator[Figure]:
    """SIGKILL, start again, and the time until every worker is back on the run and a request is answered."""
    took: list[float] = []
    with a_plane() as plane:
        training = plane.train("demo", world=(4, 4, 4), spares=0)
        training.wait_until_target_world(timeout=60)
        for turn in range(given.repeat):
            assert plane.daemon is not None
            plane.daemon.kill()
            plane.daemon.wait()
            begun = time.monotonic()
            plane.serve()
            eventually(lambda t=turn: _recoveries(training) > t, "the round is taken over")  # type: ignore[misc]
            took.append(time.monotonic() - begun)
    yield below("control plane SIGKILL → serving, 4 workers adopted, p50", p50(took), 1.0, "s")


def _recoveries(training: muster.DistributedTraining) -> int:
    return sum(event.reason == "RoundRecovered" and "goes on" in event.message for event in training.events())


# Losing a worker ---------------------------------------------------------------------------------


def loss(given: argparse.Namespace) -> Iterator[Figure]:
    """SIGKILL to all of a worker, or to its agent alone, and the time until both ranks of the next round run."""
    for what, doomed in (("every process of one worker", family), ("only one worker's agent", lambda pid: [pid])):
        took: list[float] = []
        with a_plane() as plane:
            training = plane.train("demo", world=(2, 2, 2), spares=1)
            for turn in range(given.repeat_losses):
                training.wait_until_target_world(timeout=60)
                plane.started(turn, 2)
                eventually(lambda: fresh(training).training.status.spares.ready == 1, "a spare stands by")  # noqa: B023
                victim = max(training.ranks, key=lambda rank: rank.rank).worker
                pids = doomed(plane.worker_pids()[victim])
                begun = time.monotonic()
                kill_all(pids)
                plane.started(turn + 1, 2)
                took.append(time.monotonic() - begun)
        name = f"2 workers, 1 spare; killed: {what} → ranks of the next round run, p50"
        yield below(name, p50(took), 1.0, "s", **spread(took))


# Size --------------------------------------------------------------------------------------------


def size(given: argparse.Namespace) -> Iterator[Figure]:
    def timed(*command: str, **env: str) -> float:
        best = []
        for _ in range(given.repeat):
            begun = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True, env={**os.environ, **env})
            best.append(time.perf_counter() - begun)
        return p50(best) * 1000

    yield below("import muster, p50", timed(sys.executable, "-c", "import muster"), 150, "ms")
    with a_plane() as plane:
        cli = str(Path(sys.executable).parent / "muster")
        yield below("muster ps, p50", timed(cli, "ps", MUSTER_HOME=str(plane.home)), 300, "ms")
        assert plane.daemon is not None
        status = Path(f"/proc/{plane.daemon.pid}/status").read_text()
        resident = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
        yield below("memory of an idle control plane", resident / 1024, 150, "MB")


# A trivial job -----------------------------------------------------------------------------------


def job(given: argparse.Namespace) -> Iterator[Figure]:
    """Two ranks form a group and end; from the order to the end, everything included but installing."""
    peers: dict[str, object] = {}
    with a_plane() as plane:
        script = plane.folder / "trivial.py"
        script.write_text(TRIVIAL)
        ours = []
        for turn in range(given.repeat_torch):
            begun = time.monotonic()
            plane.train(f"t{turn}", script=str(script), world=(1, 1, 1), procs_per_worker=2).result(timeout=120)
            ours.append(time.monotonic() - begun)
        if not given.no_peers:
            peers = _job_of_peers(script, given.repeat_torch)
    yield Figure(
        "submit → finished, trivial two-rank job, p50", p50(ours), "s", "peers", _best(peers) > p50(ours), peers
    )


def _job_of_peers(script: Path, repeat: int) -> dict[str, object]:
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script))
    return {
        "torchrun": p50([_timed(*torchrun) for _ in range(repeat)]),
        "torchx local": _torchx(script, repeat),
        "Kubeflow local process": _kubeflow(),
    }


def _best(peers: dict[str, object]) -> float:
    return min((value for value in peers.values() if isinstance(value, float)), default=float("inf"))


def _timed(*command: str, **env: str) -> float:
    begun = time.monotonic()
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, **env})
    return time.monotonic() - begun


def _torchx(script: Path, repeat: int) -> object:
    """torchx runs its own torchrun; it is installed apart from us, for this bench only."""
    if not (PEERS / "torchx").exists():
        return "not installed"
    launch = "from torchx.cli.main import main; main()"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # it looks for torchrun there
    words = ("run", "--scheduler", "local_cwd", "--wait", "dist.ddp", "-j", "1x2", "--script", str(script))
    try:
        took = [_timed(sys.executable, "-c", launch, *words, PYTHONPATH=str(PEERS), PATH=path) for _ in range(repeat)]
    except subprocess.CalledProcessError as error:
        return f"fails ({error.stderr.decode(errors='replace').strip().splitlines()[-1:]})"
    return p50(took)


def _kubeflow() -> object:
    if not (PEERS / "kubeflow").exists():
        return "not installed"
    # It makes an environment of its own for the job, and installs torch there.
    code = (
        "from kubeflow.trainer import TrainerClient, CustomTrainer, LocalProcessBackendConfig\n"
        "def f():\n    import torch.distributed as d; d.init_process_group('gloo'); d.barrier()\n"
        "c = TrainerClient(backend_config=LocalProcessBackendConfig())\n"
        "t = CustomTrainer(func=f, num_nodes=1, packages_to_install=['torch==2.13.0'])\n"
        "n = c.train(runtime=c.get_runtime('torch-distributed'), trainer=t)\n"
        "c.wait_for_job_status(n, timeout=170)\n"
    )
    with tempfile.TemporaryDirectory(prefix="muster-bench-") as folder:
        script = Path(folder) / "job.py"  # it reads the function's source from its file
        script.write_text(code)
        return _kubeflow_job(script)


def _kubeflow_job(script: Path) -> object:
    try:
        return _timed("timeout", "180", sys.executable, str(script), PYTHONPATH=str(PEERS))
    except subprocess.CalledProcessError as error:
        return f"fails ({error.stderr.decode(errors='replace').strip().splitlines()[-1:]})"


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeat", type=int, default=10, help="samples of the quick parts")
    parser.add_argument("--repeat-losses", type=int, default=10, help="workers that are killed")
    parser.add_argument("--repeat-torch", type=int, default=3, help="samples of parts with torch")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long each load lasts")
    parser.add_argument("--trainings", type=int, default=10_000, help="trainings in the store of the part `many`")
    parser.add_argument("--no-peers", action="store_true", help="run the part `job` without other launchers")


PARTS = {
    "waits": waits,
    "start": start,
    "throughput": throughput,
    "many": many,
    "comeback": comeback,
    "loss": loss,
    "size": size,
    "job": job,
}

if __name__ == "__main__":
    sys.exit(report.run("bench control", PARTS, _options))

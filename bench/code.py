"""How long does code take on its way? Packed and sent, fetched by many workers at once, and run in a cluster.

python -m bench.code [--json] [--only PART] [--repeat N] [--workers N]

Pods are processes of a test kubelet on a real API server: what a container costs beyond that is not in it.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from bench import report
from bench.kube import _cluster
from bench.report import Figure, below, p50, p99, spread
from muster import package
from muster.sdk import flows, shipping
from muster.sdk.shipping import Packed
from tests.fleet import eventually
from tests.kube.kubelet import TestKubelet
from tests.plane import Plane

FETCH = """
import sys
from pathlib import Path
from muster.node import cli, fetching
digest, url, token, folder = sys.argv[1:]
print("ready", flush=True)
sys.stdin.readline()
cli._behind_others(lambda: fetching.code(digest, url, token, Path(folder)))
"""


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    made = Path(tempfile.mkdtemp(prefix="muster-bench-"))
    before = os.environ.get("MUSTER_HOME")
    os.environ["MUSTER_HOME"] = str(made / "mine")
    try:
        yield made
    finally:
        os.environ.pop("MUSTER_HOME")
        if before is not None:
            os.environ["MUSTER_HOME"] = before
        shutil.rmtree(made, ignore_errors=True)


@contextlib.contextmanager
def _plane(folder: Path) -> Iterator[Plane]:
    (folder / "plane").mkdir()
    with contextlib.closing(Plane(folder / "plane")) as plane:
        plane.serve()
        yield plane


def _project(folder: Path, files: int, size: int) -> Path:
    """Files of a size, half of which can be packed smaller, in a repository."""
    project = folder / "project"
    each = size // files
    for number in range(files):
        path = project / f"pkg{number % 100}" / f"module{number}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(os.urandom(each // 2) + b"x = 1\n" * (each // 12))
    subprocess.run(["git", "init", "-q", str(project)], check=True)
    return project


def send(given: argparse.Namespace) -> Iterator[Figure]:
    """Collect, pack and send; then once more without a change."""
    first, again = [], []
    with _folder() as folder, _plane(folder) as plane:
        project = _project(folder, given.files, given.mib << 20)
        for turn in range(given.repeat):
            (project / "turn.py").write_text(f"turn = {turn}\n")
            first.append(_sent(plane, project)[0])
            again.append(_sent(plane, project)[0])
        _, packed = _sent(plane, project)
    note = f"{given.files} files, {given.mib} MiB, {package.shown(packed.size)} packed"
    yield below("a package, packed and sent, p50", p50(first), 3.0, "s", note=note, **spread(first))
    yield below("the same again, unchanged, p50", p50(again), 0.3, "s", **spread(again))


def _start_fetching(words: list[str]) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", FETCH, *words]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _sent(plane: Plane, project: Path) -> tuple[float, Packed]:
    began = time.perf_counter()
    packed = shipping.pack(shipping.collect(project), Path(os.environ["MUSTER_HOME"]) / "cache")
    plane.client.run(flows.send_package("default", packed))
    return time.perf_counter() - began, packed


def fetch(given: argparse.Namespace) -> Iterator[Figure]:
    """Many processes fetch, check and unpack it at once, while somebody asks whether the control plane is well."""
    with _folder() as folder, _plane(folder) as plane:
        _, packed = _sent(plane, _project(folder, max(1, given.files // 20), given.mib << 20))
        training = plane.client.train(command=["sleep", "1000"], name="sent", package=packed.digest)
        training.wait_until_min_world(timeout=60)
        token = _token(next(iter(plane.worker_pids().values())))
        url = f"{plane.url}/packages/default/sent"
        workers = []
        for number in range(given.workers):
            words = [packed.digest, url, token, str(folder / f"code-{number}")]
            workers.append(_start_fetching(words))
        for worker in workers:
            assert worker.stdout is not None and worker.stdout.readline() == "ready\n"
        with _asking(plane.url) as took:
            began = time.perf_counter()
            for worker in workers:
                assert worker.stdin is not None
                worker.stdin.write("go\n")
                worker.stdin.close()
            codes = [worker.wait() for worker in workers]
            whole = time.perf_counter() - began
        assert codes == [0] * given.workers, codes
        training.delete()
    sizes = f"{given.mib} MiB, {package.shown(packed.size)} packed"
    note = f"{given.workers} processes of one machine, {sizes}, checked and unpacked"
    yield below(f"{given.workers} workers have their code", whole, 10.0, "s", note=note)
    yield below(
        "/healthz meanwhile, p99", p99(took) * 1000, 50, "ms", note=f"p50 {p50(took) * 1000:.1f} ms", samples=len(took)
    )


def _token(pid: int) -> str:
    """Of the run, as its worker was given it."""
    for word in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
        if word.startswith(b"MUSTER_RUN_TOKEN="):
            return word.partition(b"=")[2].decode()
    raise AssertionError("the worker has no token")


@contextlib.contextmanager
def _asking(url: str) -> Iterator[list[float]]:
    took: list[float] = []
    over = threading.Event()

    def ask() -> None:
        while not over.wait(0.02):
            began = time.perf_counter()
            urllib.request.urlopen(f"{url}/healthz", timeout=30).read()
            took.append(time.perf_counter() - began)

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        yield took
    finally:
        over.set()
        asking.join()


def cluster(given: argparse.Namespace) -> Iterator[Figure]:
    """From starting `muster run` to the first line of rank 0 on its terminal."""
    took = []
    with _folder() as folder, _cluster() as (made, plane), contextlib.closing(TestKubelet(made)):
        project = _project(folder, 100, 1 << 20)
        for turn in range(given.repeat):
            (project / "train.py").write_text(f"print('the first line of {turn}', flush=True)\n")
            where = ("env", "-C", str(project), f"MUSTER_URL=http://{plane.proxy.address('api')}")
            muster = str(Path(sys.executable).parent / "muster")
            began = time.perf_counter()
            run = plane.start(*where, f"MUSTER_TOKEN={plane.token}", muster, "run", "train.py", "-n", plane.namespace)
            eventually(lambda run=run, turn=turn: f"the first line of {turn}" in run.text, "it runs")  # type: ignore[misc]
            took.append(time.perf_counter() - began)
            assert run.wait() == 0, run.text
    note = "1 MiB of code; Pods are processes of a test kubelet"
    yield below(
        "muster run against a cluster → first line of rank 0, p50", p50(took), 3.0, "s", note=note, **spread(took)
    )


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeat", type=int, default=5, help="packages that are sent, and runs in the cluster (5)")
    parser.add_argument("--workers", type=int, default=64, help="processes of the part `fetch` (64)")
    parser.add_argument("--files", type=int, default=10_000, help="files of a package; `fetch` has a twentieth (10000)")
    parser.add_argument("--mib", type=int, default=50, help="size of a package, in MiB (50)")


if __name__ == "__main__":
    sys.exit(report.run(__doc__ or "", {"send": send, "fetch": fetch, "cluster": cluster}, options))

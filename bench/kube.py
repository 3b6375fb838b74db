"""How fast is the control plane on Kubernetes, on a real API server?

    python -m bench.kube [--json] [--only apply] [--only scale] [--only loss] [--only many] [--trainings 1000] …

Peers, in the same run on the same server: a Job and a Deployment of the cluster's own controllers.
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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2

from bench import losses, report
from bench.report import Figure, Goal, below, p50, p99
from tests.kube import network
from tests.kube.api import Json
from tests.kube.cluster import Cluster
from tests.kube.kubelet import TestKubelet
from tests.kube.plane import KubePlane

GROUP = "/apis/muster.dev/v1alpha1"


@contextlib.contextmanager
def _cluster() -> Iterator[tuple[Cluster, KubePlane]]:
    network.isolate()
    folder = Path(tempfile.mkdtemp(prefix="muster-bench-"))
    (folder / "plane").mkdir()
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        cluster = Cluster(folder / "cluster")
        stack.callback(cluster.close)
        plane = KubePlane(folder / "plane", cluster, cluster.new_namespace())
        stack.callback(plane.close)
        plane.serve()
        yield cluster, plane


def _until(plane: KubePlane, name: str, look: Any) -> None:
    path = f"{GROUP}/namespaces/{plane.namespace}/trainings/{name}"
    plane.cluster.until(path, lambda item: item and look(item.get("status") or {}), name, 60)


# Apply -------------------------------------------------------------------------------------------


def apply(given: argparse.Namespace) -> Iterator[Figure]:
    """From starting kubectl to the status that says that both ranks run; ranks are processes of a test kubelet."""
    with _cluster() as (cluster, plane), contextlib.closing(TestKubelet(cluster)):
        ours = []
        for turn in range(given.repeat):
            name = f"demo-{turn}"
            text = plane.manifest(name)
            began = time.perf_counter()
            plane.kubectl("apply", "-f", "-", input=text)
            _until(plane, name, lambda status: (status.get("worldSize") or {}).get("ready") == 2)
            ours.append(time.perf_counter() - began)
            plane.kubectl("delete", "training", name)
        job = [_job(plane, turn) for turn in range(given.repeat)]
        bare = [_kubectl_alone(plane) for _ in range(given.repeat)]
    peers = {"a Job's two Pods running, s": p50(job), "kubectl alone, s": p50(bare)}
    note = f"worst of {len(ours)}: {max(ours):.2f} s"
    yield below("kubectl apply → ranks running, 2 workers, p50", p50(ours), 2.0, "s", peers=peers, note=note)


def _job(plane: KubePlane, turn: int) -> float:
    container = {"name": "c", "image": "any", "command": ["/bin/sleep", "60"]}
    spec = {"parallelism": 2, "completions": 2}
    job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": f"job-{turn}"}}
    text = json.dumps(
        {**job, "spec": {**spec, "template": {"spec": {"restartPolicy": "Never", "containers": [container]}}}}
    )
    began = time.perf_counter()
    plane.kubectl("apply", "-f", "-", input=text)
    while True:
        found = plane.cluster.api(
            "GET", f"/api/v1/namespaces/{plane.namespace}/pods", labelSelector=f"job-name=job-{turn}"
        )
        if sum(pod["status"].get("phase") == "Running" for pod in found["items"]) == 2:
            took = time.perf_counter() - began
            plane.kubectl("delete", "job", f"job-{turn}", "--wait=false")
            return took
        time.sleep(0.01)


def _kubectl_alone(plane: KubePlane) -> float:
    began = time.perf_counter()
    plane.kubectl("get", "trainings")
    return time.perf_counter() - began


# Scale -------------------------------------------------------------------------------------------


def scale(given: argparse.Namespace) -> Iterator[Figure]:
    """From the new target being stored, as a watch shows it, to the new Pod, as a watch shows it."""
    with _cluster() as (cluster, plane), _ready_pods(cluster):
        names = [f"s{index}" for index in range(given.scales + 1)]
        for name in names:
            cluster.api("POST", f"{GROUP}/namespaces/{plane.namespace}/trainings", _training(name, 1, 4))
        _count_pods(plane, len(names))
        seen = _Seen(plane)
        whole, inner = [], []
        first, *names = names  # kubectl then knows what kinds there are, and need not ask each time
        plane.kubectl("scale", f"training/{first}", "--replicas=2")
        for name in names:
            began = time.perf_counter()
            plane.kubectl("scale", f"training/{name}", "--replicas=2")
            pod = seen.at(f"pod {name}-1")
            whole.append(pod - began)
            inner.append(pod - seen.at(f"target {name} 2"))
        peer = _scale_deployment(plane, given.repeat)
    peers = {"a Deployment, command → Pod, p50 ms": p50(peer) * 1000}
    note = f"p50 {p50(inner) * 1000:.0f} ms, {len(inner)} scalings"
    yield below("kubectl scale → Pod created, from the stored target, p99", p99(inner) * 1000, 200, "ms", note=note)
    note = f"p50 {p50(whole) * 1000:.0f} ms; kubectl's own start is part of it"
    yield below("the same from starting kubectl, p99", p99(whole) * 1000, 200, "ms", peers=peers, note=note)


class _Seen:
    """When a watch first showed a Pod, or a training's target; nothing is looked up after the fact."""

    def __init__(self, plane: KubePlane) -> None:
        self._times: dict[str, float] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._news = threading.Condition()
        spaces = f"namespaces/{plane.namespace}"
        for path in (f"{GROUP}/{spaces}/trainings", f"/api/v1/{spaces}/pods"):
            plane.cluster.background.call(self._begin(plane, path))

    async def _begin(self, plane: KubePlane, path: str) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(self._follow(plane, path)))

    async def _follow(self, plane: KubePlane, path: str) -> None:
        async for kind, item in plane.cluster.aio.follow(path):
            for one in item["items"] if kind == "LISTED" else [item]:
                about = one["metadata"]["name"]
                pod = path.endswith("/pods")
                self._note(f"pod {about}" if pod else f"target {about} {one['spec']['worldSize']['target']}")

    def _note(self, what: str) -> None:
        with self._news:
            self._times.setdefault(what, time.perf_counter())
            self._news.notify_all()

    def at(self, what: str) -> float:
        with self._news:
            if not self._news.wait_for(lambda: what in self._times, 30):
                raise AssertionError(f"not seen in 30 s: {what}")
            return self._times[what]


def _scale_deployment(plane: KubePlane, repeat: int) -> list[float]:
    labels = {"app": "peer"}
    container = {"name": "c", "image": "any", "command": ["/bin/sleep", "60"]}
    template = {"metadata": {"labels": labels}, "spec": {"containers": [container]}}
    deployment = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "peer"}}
    spec = {"replicas": 1, "selector": {"matchLabels": labels}, "template": template}
    plane.kubectl("apply", "-f", "-", input=json.dumps({**deployment, "spec": spec}))
    taken = []
    for turn in range(2, repeat + 2):
        began = time.perf_counter()
        plane.kubectl("scale", "deployment/peer", f"--replicas={turn}")
        while True:
            found = plane.cluster.api("GET", f"/api/v1/namespaces/{plane.namespace}/pods", labelSelector="app=peer")
            if len(found["items"]) >= turn:
                break
            time.sleep(0.005)
        taken.append(time.perf_counter() - began)
    return taken


# Losing a worker ---------------------------------------------------------------------------------


def loss(given: argparse.Namespace) -> Iterator[Figure]:
    """All processes of a Pod, which are those of a worker, are killed at once; its node, a test kubelet, tells."""
    with _cluster() as (cluster, plane), contextlib.closing(TestKubelet(cluster)) as kubelet:

        def agents() -> dict[str, int]:
            return {pod.partition("/")[2]: pid for pod, pid in kubelet.processes().items()}

        samples = losses.under_a_control_plane(plane, agents, given.losses)
    name = "Kubernetes' test nodes, 2 workers, 1 spare; killed: every process of one worker"
    yield report.compared(f"{name} → first all-reduce of the next group", samples, {}, "ms", Goal(p50=1000))


# Many --------------------------------------------------------------------------------------------


def many(given: argparse.Namespace) -> Iterator[Figure]:
    count, workers = given.trainings, given.workers
    with _cluster() as (cluster, plane), _ready_pods(cluster) as pods:
        latencies = _Latencies(plane)
        began = time.perf_counter()
        path = f"{GROUP}/namespaces/{plane.namespace}/trainings"
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda n: cluster.api("POST", path, _training(f"m{n}", workers, workers + 1)), range(count)))
        submitted = time.perf_counter() - began
        _until_ready(pods, count * workers)
        took = time.perf_counter() - began
        samples = latencies.stop()
        peak = _peak_mb(plane)
        shown = f"{count:,} trainings × {workers} Pods"
        each = f"{count * workers / took:.0f} Pods per s; all submitted after {submitted:.0f} s"
        yield below(f"{shown} created and all Ready", took, 300, "s", note=each)
        note = f"p50 {p50(samples) * 1000:.0f} ms of {len(samples)} reads of the API meanwhile"
        yield below("API latency meanwhile, p99", p99(samples) * 1000, 1000, "ms", note=note)
        yield below("control plane, largest resident size", peak, 500, "MB")
        yield from _restarted(plane, count)


def _restarted(plane: KubePlane, count: int) -> Iterator[Figure]:
    """SIGKILL, started again at once as a kubelet would; it reconciles again when a new target brings a Pod."""
    _quiet(plane)
    before = _versions(plane)
    began = time.perf_counter()
    plane.crash()
    name = "m0"
    target = plane.object(name)["spec"]["worldSize"]["target"] + 1  # type: ignore[index]
    patch = {"spec": {"worldSize": {"target": target}}}
    plane.cluster.patch(f"{GROUP}/namespaces/{plane.namespace}/trainings/{name}", patch)
    plane.serve()
    serving = time.perf_counter() - began
    pod = f"/api/v1/namespaces/{plane.namespace}/pods/{name}-{target - 1}"
    plane.cluster.until(pod, lambda item: item is not None, "the new Pod", 60)
    took = time.perf_counter() - began
    _quiet(plane)
    after = _versions(plane)
    touched = sum(after.get(uid) != version for uid, version in before.items())
    note = f"serves after {serving:.1f} s; {touched} of {len(before)} Pods touched"
    yield below(f"SIGKILL → reconciling again with {count:,} trainings", took, 10, "s", note=note)
    yield Figure("Pods touched by that", float(touched), "Pods", "0 Pods", touched == 0)


def _versions(plane: KubePlane) -> dict[str, str]:
    found = plane.cluster.api("GET", f"/api/v1/namespaces/{plane.namespace}/pods")["items"]
    return {pod["metadata"]["uid"]: pod["metadata"]["resourceVersion"] for pod in found}


def _quiet(plane: KubePlane) -> None:
    """Until the control plane has had nothing to write for a while."""
    path = f"{GROUP}/namespaces/{plane.namespace}/trainings"
    last = ""
    while True:
        items = plane.cluster.api("GET", path)["items"]
        now = max((item["metadata"]["resourceVersion"] for item in items), key=int)
        if now == last:
            return
        last = now
        time.sleep(2.0)


class _Latencies:
    """Reads through muster's API all the time, as a dashboard or a waiting client would."""

    def __init__(self, plane: KubePlane) -> None:
        headers = {"Authorization": f"Bearer {plane.token}"}
        self._http = httpx2.Client(base_url=f"http://{plane.proxy.address('api')}", headers=headers, trust_env=False)
        self._path = f"/v1/namespaces/{plane.namespace}/trainings?limit=50"
        self._samples: list[float] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._over.wait(0.05):
            began = time.perf_counter()
            self._http.get(self._path, timeout=60.0).raise_for_status()
            self._samples.append(time.perf_counter() - began)

    def stop(self) -> list[float]:
        self._over.set()
        self._thread.join()
        return self._samples


# What all of them need ---------------------------------------------------------------------------


def _training(name: str, target: int, most: int) -> Json:
    spec = {"command": ["/bin/sleep", "600"], "worldSize": {"min": 1, "target": target, "max": most}}
    return {"apiVersion": "muster.dev/v1alpha1", "kind": "Training", "metadata": {"name": name}, "spec": spec}


@contextlib.contextmanager
def _ready_pods(cluster: Cluster) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "bench.pods"], env=cluster.env(), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def _until_ready(pods: subprocess.Popen[str], count: int) -> None:
    assert pods.stdout is not None
    for line in pods.stdout:
        if int(line.split()[1]) >= count:
            return


def _count_pods(plane: KubePlane, count: int) -> None:
    while len(plane.cluster.api("GET", f"/api/v1/namespaces/{plane.namespace}/pods")["items"]) < count:
        time.sleep(0.1)


def _peak_mb(plane: KubePlane) -> float:
    (replica,) = plane.replicas.values()
    status = Path(f"/proc/{replica.pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 1024


def _options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeat", type=int, default=10, help="times of what is done one by one")
    parser.add_argument("--scales", type=int, default=100, help="scalings")
    parser.add_argument("--losses", type=int, default=10, help="workers that are killed")
    parser.add_argument("--trainings", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=8)


if __name__ == "__main__":
    os.environ.setdefault("MUSTER_HOME", tempfile.gettempdir())
    sys.exit(report.run("muster on Kubernetes", {"apply": apply, "scale": scale, "loss": loss, "many": many}, _options))

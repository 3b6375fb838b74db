"""Whatever ends a Pod, its rank goes to a spare, another Pod comes, and everyone is told why."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.fleet import eventually
from tests.kube.api import STRATEGIC, Json
from tests.kube.cluster import Cluster
from tests.kube.kubelet import TestKubelet
from tests.kube.plane import KubePlane

Fault = Callable[[KubePlane, TestKubelet, str], None]
PREEMPTED = {"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler", "message": "make room"}


def kill(plane: KubePlane, kubelet: TestKubelet, pod: str) -> None:
    kubelet.kill(pod)


def oom(plane: KubePlane, kubelet: TestKubelet, pod: str) -> None:
    kubelet.oom(pod)


def evict(plane: KubePlane, kubelet: TestKubelet, pod: str) -> None:
    kubelet.evict(pod)


def delete(plane: KubePlane, kubelet: TestKubelet, pod: str) -> None:
    plane.kubectl("delete", "pod", pod, "--wait=false")


def delete_by_force(plane: KubePlane, kubelet: TestKubelet, pod: str) -> None:
    plane.kubectl("delete", "pod", pod, "--force", "--grace-period=0", "--wait=false")


def drain(plane: KubePlane, kubelet: TestKubelet, pod: str) -> None:
    version = "v1" if "v1" in plane.cluster.serves("policy") else "v1beta1"
    eviction = {"apiVersion": f"policy/{version}", "kind": "Eviction", "metadata": {"name": pod}}
    plane.cluster.api("POST", f"{path_of(plane, pod)}/eviction", eviction)


def preempt(plane: KubePlane, kubelet: TestKubelet, pod: str) -> None:
    plane.cluster.patch(f"{path_of(plane, pod)}/status", {"status": {"conditions": [PREEMPTED]}}, STRATEGIC)
    delete(plane, kubelet, pod)


# What is done to a Pod, and what the journal says of its worker then: exit code and reason.
FAULTS: dict[str, tuple[Fault, tuple[Any, ...]]] = {
    "killed": (kill, (137, "Error")),
    "killed for memory": (oom, (137, "OOMKilled")),
    "evicted": (evict, (137, "Evicted")),
    "deleted": (delete, (143, None)),
    "deleted by force": (delete_by_force, (None, "NodeLost")),
    "drained": (drain, (143, None)),
    "preempted": (preempt, (143, "Preempted")),
}


def path_of(plane: KubePlane, pod: str) -> str:
    return f"/api/v1/namespaces/{plane.namespace}/pods/{pod}"


def whole(plane: KubePlane, name: str = "demo", timeout_s: float = 30.0) -> Json:
    """The status, once two train and a spare stands by."""
    path = f"/apis/muster.dev/v1alpha1/namespaces/{plane.namespace}/trainings/{name}"

    def is_whole(item: Json | None) -> bool:
        status = (item or {}).get("status") or {}
        return (status.get("worldSize") or {}).get("ready") == 2 and status["spares"]["ready"] == 1

    found = plane.cluster.until(path, is_whole, "two train, one stands by", timeout_s)
    assert found is not None
    status: Json = found["status"]
    return status


def seats(status: Json) -> dict[int, str]:
    return {rank["rank"]: rank["worker"] for rank in status["ranks"]}


def trains_in(plane: KubePlane, round_: int, timeout_s: float = 30.0) -> Json:
    path = f"/apis/muster.dev/v1alpha1/namespaces/{plane.namespace}/trainings/demo"

    def trains(item: Json | None) -> bool:
        status = (item or {}).get("status") or {}
        return status.get("round") == round_ and status["worldSize"]["ready"] == 2

    found = plane.cluster.until(path, trains, f"round {round_}", timeout_s)
    assert found is not None
    status: Json = found["status"]
    return status


def exited(plane: KubePlane, worker: str) -> Json | None:
    """What the journal says of a worker's end."""
    events = plane.client.get("demo").events()
    ends = [event for event in events if event.reason == "WorkerExited" and event.data["worker"] == worker]
    assert len(ends) <= 1, "it ended once"
    return {**ends[0].data, "message": ends[0].message} if ends else None


def patch(plane: KubePlane, name: str = "demo", **spec: Any) -> None:
    plane.kubectl("patch", "training", name, "--type=merge", "-p", json.dumps({"spec": spec}))


def apply(plane: KubePlane, name: str = "demo", **spec: Any) -> None:
    plane.kubectl("apply", "-f", "-", input=plane.manifest(name, world=(2, 2, 2), **spec))


@pytest.mark.parametrize(
    "names",
    [("killed", "killed for memory", "evicted", "deleted by force"), ("deleted", "drained", "preempted")],
    ids=["abruptly", "in order"],
)
def test_a_spare_takes_the_rank_and_another_pod_comes(
    kube_plane: KubePlane, kubelet: TestKubelet, names: tuple[str, ...]
) -> None:
    plane = kube_plane
    apply(plane, spares=1, stopGraceSeconds=2)
    status = whole(plane)
    for name in names:
        fault, told = FAULTS[name]
        before = seats(status)
        victim, (spare,) = before[1], set(plane.running()) - set(before.values())
        began = time.monotonic()
        fault(plane, kubelet, victim)
        trains = trains_in(plane, status["round"] + 1)
        took = time.monotonic() - began
        print(f"{name}: the spare has the rank after {took:.2f} s")
        # Nobody confirms that the processes of a Pod deleted by force have ended, unless its guard still could.
        assert took < (15 if name == "deleted by force" else 5), f"{name}: nobody waits for a lease"
        assert set(seats(trains).values()) == {before[0], spare}, name
        end = eventually(functools.partial(exited, plane, victim), f"{name}: the journal tells", 15)
        if name == "drained" and plane.cluster.version >= (1, 26):
            told = (told[0], "Evicted")  # since then the server marks the Pod
        assert (end["exitCode"], end.get("reason")) == told, f"{name}: {end}"
        plane.cluster.until(path_of(plane, victim), lambda pod: pod is None or is_left(pod), f"{name}: it may go")
        status = whole(plane)
        assert len(plane.running()) == 3, name
    plane.go()
    done = plane.phase("succeeded")["status"]
    assert [one["exitCode"] for one in done["rankExits"]] == [0, 0]


def is_left(pod: Json) -> bool:
    """It has ended and stays for its log; nothing holds it."""
    return not finalizers(pod) and not pod["metadata"].get("deletionTimestamp")


def finalizers(pod: Json | None) -> Any:
    return pod and pod["metadata"].get("finalizers")


def test_a_training_that_cannot_go_on_tells_how_each_rank_ended(kube_plane: KubePlane, kubelet: TestKubelet) -> None:
    """No spare, and no room for another Pod."""
    plane = kube_plane
    faults: dict[str, tuple[Fault, int, str]] = {
        "kill": (kill, 137, "Error"),
        "oom": (oom, 137, "OOMKilled"),
        "evict": (evict, 137, "Evicted"),
        "preempt": (preempt, 143, "Preempted"),
    }
    for name in faults:
        apply(plane, name, maxRestarts=0, stopGraceSeconds=2)
    for name in faults:
        plane.phase("ready", name)
        patch(plane, name, belowMinimumTimeoutSeconds=0.5)
    plane.kubectl("cordon", kubelet.node)
    for name, (fault, _, _) in faults.items():
        fault(plane, kubelet, f"{name}-1")
    for name, (_, code, reason) in faults.items():
        status = plane.phase("failed", name)["status"]
        ends = {one["worker"]: (one["exitCode"], one["terminationReason"]) for one in status["rankExits"]}
        assert ends == {f"{name}-0": (143, "Stopped"), f"{name}-1": (code, reason)}
        first = status["outcome"]["firstFailure"]
        assert (first["worker"], first["terminationReason"]) == (f"{name}-1", reason)
    pods = [path_of(plane, pod) for name in faults for pod in plane.pods(name)]
    for path in pods:
        plane.cluster.until(path, lambda pod: not finalizers(pod), f"{path} may go")


@pytest.fixture
def far(cluster: Cluster) -> Iterator[TestKubelet]:
    made = TestKubelet(cluster, "node-far")
    yield made
    made.close()


def test_a_node_that_vanishes_is_done_without_and_its_return_disturbs_nobody(
    kube_plane: KubePlane, kubelet: TestKubelet, far: TestKubelet
) -> None:
    """Its processes stand still; of two trainings one has a spare elsewhere."""
    plane = kube_plane
    for name in ("demo", "short"):
        apply(plane, name, stopGraceSeconds=0)
        plane.phase("ready", name)
    plane.kubectl("cordon", far.node)
    patch(plane, spares=1)
    patch(plane, "short", belowMinimumTimeoutSeconds=0.5)
    status = whole(plane)
    plane.kubectl("cordon", kubelet.node)
    (lost,) = [rank for rank in status["ranks"] if rank["node"] == far.node]
    began = time.monotonic()
    far.vanish("freeze")
    trains = trains_in(plane, status["round"] + 1)
    took = time.monotonic() - began
    print(f"vanished: the spare has the rank after {took:.2f} s")
    assert took < 15
    assert lost["worker"] not in seats(trains).values()
    ends = plane.phase("failed", "short", 60)["status"]["rankExits"]
    assert {one["node"]: one["terminationReason"] for one in ends} == {kubelet.node: "Stopped", far.node: "NodeLost"}
    plane.kubectl("uncordon", kubelet.node)
    status = whole(plane)
    plane.cluster.until(path_of(plane, lost["worker"]), lambda pod: pod is None, "its Pod is forced away", 60)
    print(f"vanished: the Pod is gone after {time.monotonic() - began:.2f} s")
    end = eventually(lambda: exited(plane, lost["worker"]), "the journal tells")
    assert (end["exitCode"], end["reason"]) == (None, "NodeLost")
    ranks = plane.started(status["round"], 2)
    far.come_back()
    far.no_process_left()
    plane.go()
    done = plane.phase("succeeded")["status"]
    assert done["round"] == status["round"] and [one["exitCode"] for one in done["rankExits"]] == [0, 0]
    assert plane.started(status["round"], 2) == ranks, "nobody ran beside them"

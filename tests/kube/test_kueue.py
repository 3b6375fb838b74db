"""With Kueue's objects in the cluster: a Workload is made for a queued training, and what is written there is done.

Kueue itself does not run: the tests write what its controller would, into objects of its kinds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from muster.backends.kube import workloads
from muster.types.training import QUEUE
from tests.fleet import eventually
from tests.kube.api import Json
from tests.kube.cluster import Cluster
from tests.kube.kubelet import TestKubelet
from tests.kube.plane import KubePlane

GROUP = f"/apis/{workloads.VERSION}"
KINDS = (("Workload", "workloads", "Namespaced"), ("ResourceFlavor", "resourceflavors", "Cluster"))
NOW = "2026-01-31T12:00:00Z"


def definition(kind: str, plural: str, scope: str) -> Json:
    schema = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
    version = {"name": "v1beta1", "served": True, "storage": True, "subresources": {"status": {}}}
    names = {"kind": kind, "plural": plural, "singular": kind.lower(), "listKind": f"{kind}List"}
    versions = [version | {"schema": {"openAPIV3Schema": schema}}]
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{plural}.{workloads.GROUP}", "annotations": {"api-approved.kubernetes.io": "test"}},
        "spec": {"group": workloads.GROUP, "scope": scope, "names": names, "versions": versions},
    }


@pytest.fixture
def plane(tmp_path: Path, cluster: Cluster, namespace: str, kubelet: TestKubelet) -> Iterator[KubePlane]:
    """Kueue's kinds are there, and a control plane with exactly its own rights."""
    named = [f"crd/{plural}.{workloads.GROUP}" for _, plural, _ in KINDS]
    items = {"apiVersion": "v1", "kind": "List", "items": [definition(*one) for one in KINDS]}
    cluster.kubectl("apply", "-f", "-", input=json.dumps(items))
    cluster.kubectl("wait", "--for=condition=Established", *named, "--timeout=20s")
    made = KubePlane(tmp_path, cluster, namespace)
    user = f"system:serviceaccount:{made.own}:muster"
    made.serve(user=user)
    yield made
    print(made.replicas["one"].text)  # shown when the test fails
    made.close()
    kubelet.no_process_left()
    cluster.kubectl("delete", *named, "--timeout=30s")


def apply(plane: KubePlane, **spec: Any) -> None:
    made = json.loads(plane.manifest(world=(1, 3, 4), spares=1, resources={"cpu": 0.1}, env={"A": "hidden"}, **spec))
    made["metadata"]["labels"] = {QUEUE: "team"}
    plane.kubectl("apply", "-f", "-", input=json.dumps(made))


def workload(plane: KubePlane) -> Json:
    path = f"{GROUP}/namespaces/{plane.namespace}/workloads"
    return eventually(lambda: plane.cluster.api("GET", path)["items"], "a Workload is made", 20)[0]  # type: ignore[no-any-return]


def holds(item: Json, kind: str) -> bool:
    return any(one["type"] == kind and one["status"] == "True" for one in item.get("status", {}).get("conditions", ()))


def say(plane: KubePlane, admitted: int | None, **conditions: bool) -> None:
    """What Kueue's controller writes."""
    found = workload(plane)
    said = [
        {
            "type": kind,
            "status": str(value),
            "reason": "Test",
            "message": f"{kind} by the test",
            "lastTransitionTime": NOW,
        }
        for kind, value in conditions.items()
    ]
    status: Json = {"conditions": said}
    if admitted is not None:
        given = {"name": workloads.POD_SET, "flavors": {"cpu": "gold"}, "count": admitted}
        status["admission"] = {"clusterQueue": "all", "podSetAssignments": [given]}
    path = f"{GROUP}/namespaces/{plane.namespace}/workloads/{found['metadata']['name']}/status"
    plane.cluster.api("PUT", path, {**found, "status": status})


def trained(plane: KubePlane) -> Json:
    return plane.object() or {}


def until(plane: KubePlane, what: str, **spec: Any) -> None:
    def is_so() -> bool:
        shown = trained(plane).get("spec", {})
        return all(shown.get(name) == value for name, value in spec.items())

    eventually(is_so, f"{what}: {spec}, but {trained(plane).get('spec')}", 30)


def test_a_training_is_queued_admitted_in_part_evicted_and_admitted_again(plane: KubePlane) -> None:
    labels = {"kubernetes.io/hostname": "node-1"}
    flavor = {"apiVersion": workloads.VERSION, "kind": "ResourceFlavor", "metadata": {"name": "gold"}}
    plane.cluster.api("POST", f"{GROUP}/resourceflavors", {**flavor, "spec": {"nodeLabels": labels}})
    apply(plane)
    asked = workload(plane)
    (pods,) = asked["spec"]["podSets"]
    assert (asked["spec"]["queueName"], pods["count"], pods["minCount"]) == ("team", 4, 1)
    assert pods["template"]["spec"]["containers"][0]["resources"]["requests"] == {"cpu": "100m"}
    assert "hidden" not in json.dumps(asked)
    until(plane, "it waits", suspend=True)
    assert not plane.pods()

    say(plane, 2, QuotaReserved=True, Admitted=True)
    until(plane, "it goes on with what it got", suspend=False, spares=1)
    eventually(lambda: len(plane.running()) == 2, "a worker and a spare", 30)
    assert trained(plane)["spec"]["worldSize"]["target"] == 1
    assert all(one["spec"].get("nodeSelector") == labels for one in plane.pods().values())
    plane.phase("ready")

    say(plane, 2, QuotaReserved=True, Admitted=True, Evicted=True)
    until(plane, "it leaves", suspend=True, spares=1)
    assert trained(plane)["spec"]["worldSize"]["target"] == 3, "and wants again what it wanted"
    eventually(lambda: not plane.running(), "its Pods have gone", 30)
    eventually(lambda: not holds(workload(plane), "QuotaReserved"), "its quota is given back", 30)
    assert not holds(workload(plane), "Admitted") and "admission" not in workload(plane)["status"]

    plane.crash()
    say(plane, 4, QuotaReserved=True, Admitted=True)
    plane.serve(user=f"system:serviceaccount:{plane.own}:muster")
    eventually(lambda: len(plane.running()) == 4, "all of them", 40)
    assert all(plane.pods()[name]["spec"].get("nodeSelector") == labels for name in plane.running())
    plane.go()
    plane.phase("succeeded")
    eventually(lambda: holds(workload(plane), "Finished"), "its end is told", 30)
    assert "forbidden" not in plane.replicas["one"].text


def test_nobody_stays_who_went_past_the_queue(plane: KubePlane) -> None:
    apply(plane)
    workload(plane)
    until(plane, "it waits", suspend=True)
    handle = plane.client.get("demo")
    handle.resume()
    eventually(lambda: "Requeued" in [event.reason for event in handle.events()], "it is told", 30)
    until(plane, "it waits again", suspend=True)
    eventually(lambda: not plane.running(), "its Pods have gone", 30)

"""What a training asks of its Pods, on a real API server: templates, storage, priority, and where its workers are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from muster.core.training.reconcile import USAGE_ERROR
from muster.types.storage import Storage
from muster.types.worker import SHORTAGE
from tests.fleet import eventually
from tests.kube.api import MERGE
from tests.kube.cluster import Cluster
from tests.kube.house import House, plain_node, play
from tests.kube.kubelet import TestKubelet
from tests.kube.plane import KubePlane
from tests.types.test_pod_template import EVERYTHING

Json = dict[str, Any]
RACK = "example.com/rack"


@pytest.fixture
def kubelet(cluster: Cluster, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[TestKubelet]:
    """Its agents do as a test says, unless a whole control plane is at work; its node is in a rack."""
    plain = None if "kube_plane" in request.fixturenames else {"PATH": plain_node(tmp_path)}
    made = TestKubelet(cluster, labels={RACK: "a", "gpu": "h200"}, env=plain)
    yield made
    made.close()


def conditions(shown: Json) -> dict[str, Json]:
    return {one["type"]: one for one in (shown.get("status") or {}).get("conditions") or ()}


# One worker ----------------------------------------------------------------------------------------


def test_the_server_takes_a_template_as_it_is_merged(cluster: Cluster, kubelet: TestKubelet, namespace: str) -> None:
    async def scenario(house: House) -> None:
        template = json.loads(json.dumps(EVERYTHING))
        for name in ("priorityClassName", "runtimeClassName", "serviceAccountName", "hostNetwork"):
            del template["spec"][name]  # those have to be there
        training = await house.training(template=template)
        begun = await house.backend.start(training, "demo-0", (), "token")
        assert begun.alive, begun.why_ended
        found = await house.until_pod("demo-0", lambda pod: pod is not None, "it is there")
        assert found is not None
        spec = found["spec"]
        assert [one["name"] for one in spec["containers"]] == ["worker", "metrics"]
        assert spec["nodeSelector"] == {"gpu": "h200"} and spec["imagePullSecrets"] == [{"name": "registry"}]
        assert {"key": "gpu", "operator": "Exists"} in spec["tolerations"]
        assert len(spec["topologySpreadConstraints"]) == 2
        assert found["metadata"]["labels"]["team"] == "vision"
        worker = spec["containers"][0]
        assert worker["resources"]["limits"] == {"rdma/hca": "1"}
        assert {one["mountPath"] for one in worker["volumeMounts"]} == {"/home/worker", "/data", "/dev/shm"}

    play(cluster, namespace, scenario)


def test_what_the_server_does_not_take_is_told_in_its_words(
    cluster: Cluster, kubelet: TestKubelet, namespace: str
) -> None:
    async def scenario(house: House) -> None:
        training = await house.training(template={"spec": {"dnsPolicy": "Sometimes"}})
        ended = await house.backend.start(training, "demo-0", (), "token")
        assert ended.exit_code == USAGE_ERROR and "dnsPolicy" in ended.last_words

    play(cluster, namespace, scenario)


def test_a_container_that_outlives_its_worker_is_ended(cluster: Cluster, kubelet: TestKubelet, namespace: str) -> None:
    async def scenario(house: House) -> None:
        template = {"spec": {"containers": [{"name": "side", "image": "x"}]}}
        training = await house.training(template=template)
        await house.backend.start(training, "demo-0", (), "token")
        await house.running(training)
        over = {"exitCode": 0, "startedAt": "2026-01-01T00:00:00Z", "finishedAt": "2026-01-01T00:00:01Z"}
        shown: list[Json] = [
            {"name": name, "image": "x", "imageID": "", "ready": False, "restartCount": 0, "state": state}
            for name, state in (("worker", {"terminated": over}), ("side", {"running": {}}))
        ]
        body = {"status": {"phase": "Running", "containerStatuses": shown}}
        await house.ask("PATCH", f"{house.path('demo-0')}/status", body, kind=MERGE)
        assert (await house.ended(training)).exit_code == 0
        await house.until_pod(
            "demo-0", lambda pod: pod is None or pod["metadata"].get("deletionTimestamp"), "what is left of it is ended"
        )

    play(cluster, namespace, scenario)


# Storage -------------------------------------------------------------------------------------------


def test_a_claim_is_made_once_kept_and_found_again(cluster: Cluster, kubelet: TestKubelet, namespace: str) -> None:
    async def scenario(house: House) -> None:
        ckpt = Storage("ckpt", "/ckpt", size="1Gi", class_="fast", access="ReadWriteOnce")
        training = await house.training(storage=(ckpt,))
        house.api.calls.clear()
        for name in ("demo-0", "demo-1"):
            await house.backend.start(training, name, (), "token")
        made = "POST persistentvolumeclaims"
        assert house.api.calls == [made, "POST secrets", "POST services", "POST pods", "POST pods"]
        claim = await house.ask("GET", house.path("demo-ckpt", "persistentvolumeclaims"))
        assert claim is not None and "ownerReferences" not in claim["metadata"]
        assert claim["spec"]["accessModes"] == ["ReadWriteOnce"] and claim["spec"]["storageClassName"] == "fast"

        house.backend = house.another()
        house.api.calls.clear()
        await house.backend.start(training, "demo-2", (), "token")
        assert house.api.calls[:2] == [made, "GET persistentvolumeclaims"]

    play(cluster, namespace, scenario)


def test_a_claim_of_somebody_else_is_left_alone_and_named(
    cluster: Cluster, kubelet: TestKubelet, namespace: str
) -> None:
    async def scenario(house: House) -> None:
        theirs: Json = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "demo-ckpt"}}
        theirs["spec"] = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": "1Gi"}}}
        await house.ask("POST", house.path("", "persistentvolumeclaims").rstrip("/"), theirs)
        training = await house.training(storage=(Storage("ckpt", "/ckpt", size="1Gi"),))
        ended = await house.backend.start(training, "demo-0", (), "token")
        assert ended.exit_code == SHORTAGE
        assert "there is a PersistentVolumeClaim demo-ckpt that is not muster's" in ended.why_ended

    play(cluster, namespace, scenario)


def test_storage_goes_with_its_training_unless_it_is_kept(kube_plane: KubePlane, cluster: Cluster) -> None:
    plane = kube_plane
    path = f"/api/v1/namespaces/{plane.namespace}/persistentvolumeclaims"
    storage = [
        {"name": "ckpt", "mount": "/ckpt", "size": "1Gi"},
        {"name": "scratch", "mount": "/scratch", "size": "1Gi", "keep": False},
    ]
    plane.kubectl("apply", "-f", "-", input=plane.manifest(world=(1, 1, 1), storage=storage))
    plane.phase("ready")
    assert {one["metadata"]["name"] for one in cluster.api("GET", path)["items"]} == {"demo-ckpt", "demo-scratch"}
    plane.kubectl("delete", "training", "demo")
    plane.gone()
    # The garbage collector looks for new kinds every 30 s only.
    cluster.until(f"{path}/demo-scratch", lambda item: item is None, "it goes", 60)
    assert cluster.get(f"{path}/demo-ckpt") is not None


# A whole control plane -----------------------------------------------------------------------------


def test_what_is_musters_own_is_refused_at_submit_and_told_of_what_kubectl_applied(kube_plane: KubePlane) -> None:
    plane = kube_plane
    template = {"spec": {"containers": [{"name": "worker", "command": ["sh"]}]}}
    field = "spec.template.spec.containers[worker].command: is muster's own"
    with pytest.raises(Exception, match="is muster's own") as raised:
        plane.train(template=template)
    assert field in str(raised.value)
    plane.kubectl("apply", "-f", "-", input=plane.manifest(template=template))
    shown = plane.cluster.until(
        f"/apis/muster.dev/v1alpha1/namespaces/{plane.namespace}/trainings/demo",
        lambda item: item and conditions(item).get("Valid", {}).get("status") == "False",
        "it is invalid",
    )
    assert shown is not None and field in conditions(shown)["Valid"]["message"]
    assert not plane.pods()


def test_nobody_is_troubled_by_a_template_that_is_nested_too_deeply(kube_plane: KubePlane) -> None:
    plane = kube_plane
    deep: Json = json.loads(plane.manifest("deep", template={"spec": {"x": "HERE"}}))
    text = json.dumps(deep).replace('"HERE"', '{"a":[' * 2_000 + "1" + "]}" * 2_000)
    path = f"/apis/muster.dev/v1alpha1/namespaces/{plane.namespace}/trainings"
    plane.cluster.kubectl("create", "--raw", path, "-f", "-", input=text)
    plane.train("fine", world=(1, 1, 1)).wait_until_target_world(timeout=30)
    eventually(
        lambda: "spec.template: is nested more than 20 levels deep" in plane.said("describe", "deep"), "it is told"
    )
    plane.client.get("deep").delete()
    plane.kubectl("wait", "--for=delete", "training/deep", "--timeout=20s")


def test_in_the_control_planes_own_namespace_no_pod_gets_more_than_muster_gives(kube_plane: KubePlane) -> None:
    plane = kube_plane
    thief = {"spec": {"serviceAccountName": "muster", "automountServiceAccountToken": True}}
    made = json.loads(plane.manifest(world=(1, 1, 1), template=thief))
    made["metadata"]["namespace"] = plane.own
    path = f"/apis/muster.dev/v1alpha1/namespaces/{plane.own}/trainings"
    plane.cluster.api("POST", path, made)
    found = plane.cluster.until(
        f"{path}/demo", lambda item: item and (item.get("status") or {}).get("phase") == "failed", "it fails"
    )
    assert found is not None
    assert "spec.template is not taken in the control plane's own namespace" in found["status"]["outcome"]["message"]
    assert not plane.cluster.api("GET", f"/api/v1/namespaces/{plane.own}/pods")["items"]
    plane.cluster.api("DELETE", f"{path}/demo")
    plane.cluster.until(f"{path}/demo", lambda item: item is None, "it goes")


def test_whole_segments_train_in_racks_that_nodes_are_labelled_with(
    kube_plane: KubePlane, cluster: Cluster, kubelet: TestKubelet
) -> None:
    plane = kube_plane
    others = [TestKubelet(cluster, f"node-{at}", pods=2, labels={RACK: rack}) for at, rack in ((2, "b"), (3, "b"))]
    try:
        plane.train(world=(2, 4, 6), segment=2, topology_key=RACK).wait_until_target_world(timeout=30)
        placed = [(one["worker"], one["node"]) for one in (plane.object() or {})["status"]["ranks"]]
        racks = ["a" if node == "node-1" else "b" for _, node in placed]
        assert racks in (["a", "a", "b", "b"], ["a"] * 4, ["b"] * 4)
        assert racks == sorted(racks)
        plane.go()
        plane.phase("succeeded")
    finally:
        for one in others:
            one.close()


def test_priority_reaches_the_scheduler_by_the_class_that_is_labelled_with_it(
    kube_plane: KubePlane, cluster: Cluster
) -> None:
    plane = kube_plane
    path = "/apis/scheduling.k8s.io/v1/priorityclasses"
    about = {"name": f"{plane.namespace}-high", "labels": {"muster.dev/priority": "5"}}
    body = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": about, "value": 700}
    cluster.api("POST", path, body)
    try:
        plane.train("high", world=(1, 1, 1), priority=7).wait_until_target_world(timeout=30)
        plane.train("low", world=(1, 1, 1)).wait_until_target_world(timeout=30)
        (high,), (low,) = plane.pods("high").values(), plane.pods("low").values()
        assert (high["spec"]["priorityClassName"], high["spec"]["priority"]) == (about["name"], 700)
        assert not low["spec"].get("priorityClassName")
    finally:
        cluster.api("DELETE", f"{path}/{about['name']}")


def test_segments_survive_their_control_plane(kube_plane: KubePlane, kubelet: TestKubelet) -> None:
    """Workers come back to one that does not know yet where they are, and are not refused."""
    plane = kube_plane
    handle = plane.train(world=(2, 2, 2), spares=1, segment=2, topology_key=RACK)
    handle.wait_until_target_world(timeout=30)
    victim = handle.ranks[0].worker
    plane.crash()
    plane.serve()
    kubelet.kill(victim)
    eventually(lambda: ((plane.object() or {}).get("status") or {}).get("round") == 1, "the spare takes its place", 30)
    assert handle.wait_until_target_world(timeout=30).ready == 2
    assert victim not in [rank.worker for rank in handle.ranks]
    plane.go()
    plane.phase("succeeded")

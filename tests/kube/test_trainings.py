"""A training on Kubernetes, from `kubectl apply` to the end: what kubectl shows is what the SDK and `muster` show."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import httpx2

from tests.fleet import PROBE, eventually
from tests.kube.api import Json
from tests.kube.cluster import Cluster
from tests.kube.kubelet import TestKubelet
from tests.kube.plane import KubePlane


def conditions(shown: Json) -> dict[str, Json]:
    return {one["type"]: one for one in (shown.get("status") or {}).get("conditions") or ()}


def owned(plane: KubePlane, name: str = "demo") -> list[str]:
    """What there is in the cluster for a training, beside itself."""
    found = []
    for kind in ("pods", "secrets", "services"):
        path = f"/api/v1/namespaces/{plane.namespace}/{kind}"
        items = plane.cluster.api("GET", path, labelSelector=f"muster.dev/training={name}")["items"]
        found += [f"{kind}/{item['metadata']['name']}" for item in items]
    return sorted(found)


def nothing_owned(plane: KubePlane, name: str = "demo", timeout_s: float = 30.0) -> None:
    eventually(lambda: not owned(plane, name), f"nothing of {name} is left, but {owned(plane, name)}", timeout_s)


def test_what_kubectl_applies_trains_and_is_seen_by_everyone(kube_plane: KubePlane, cluster: Cluster) -> None:
    plane = kube_plane
    columns = "-o=custom-columns=PHASE:.status.phase,READY:.status.worldSize.ready"
    config = str(cluster.kubeconfig())
    watch = plane.start(
        cluster.programs.kubectl, "-n", plane.namespace, "get", "trainings", "-w", columns, KUBECONFIG=config
    )
    plane.kubectl("apply", "-f", "-", input=plane.manifest(spares=1))
    plane.kubectl("wait", "--for=condition=TargetReached", "training/demo", "--timeout=20s")
    handle = plane.client.get("demo")
    assert (handle.phase, handle.world.ready) == ("ready", 2)
    assert re.search(r"demo +ready +2/2", plane.said("ps")), plane.said("ps")
    assert re.search(r"demo +ready +2 +2 +0", plane.kubectl("get", "mt")), plane.kubectl("get", "mt")

    plane.kubectl("scale", "training/demo", "--replicas=3")
    assert handle.wait_until_target_world(timeout=30).ready == 3
    plane.start(
        cluster.programs.kubectl, "-n", plane.namespace, "edit", "training/demo",
        KUBECONFIG=config, KUBE_EDITOR="sed -i 's/target: 3/target: 2/'",
    ).expect("edited")  # fmt: skip
    path = f"/apis/muster.dev/v1alpha1/namespaces/{plane.namespace}/trainings/demo"
    cluster.until(path, lambda item: item and item["status"]["worldSize"]["target"] == 2, "the edit is acted on")
    assert handle.wait_until_target_world(timeout=30).ready == 2

    plane.go()
    shown = plane.phase("succeeded")
    assert [exit["exitCode"] for exit in shown["status"]["rankExits"]] == [0, 0]
    assert handle.result(timeout=10).ready == 0
    watch.expect(r"(?s)pending.*ready +2.*ready +3.*ready +2.*succeeded +0")
    assert "succeeded: all 2 ranks" in plane.kubectl("logs", "demo-0")
    plane.kubectl("delete", "training", "demo")
    plane.gone()
    nothing_owned(plane)


def test_kubectl_explains_every_field_and_describes_what_happened(kube_plane: KubePlane) -> None:
    plane = kube_plane
    plane.kubectl("apply", "-f", "-", input=plane.manifest("demo", "exit=0"))
    plane.phase("succeeded")
    assert "How many workers are wanted" in plane.kubectl("explain", "training.spec.worldSize.target")
    assert "absent while it runs" in plane.kubectl("explain", "training.status.rankExits")
    wanted = {"Created", "Admitted", "WorkerStarted", "Succeeded"}

    def told() -> bool:
        described = plane.kubectl("describe", "mt/demo")
        return wanted <= set(described.partition("Events:")[2].split())

    eventually(told, "the Events of kubectl describe", 10)


def test_the_command_line_works_against_a_cluster(kube_plane: KubePlane, tmp_path: Path) -> None:
    plane = kube_plane
    talker = tmp_path / "talker.py"
    talker.write_text(
        "import os, sys, time, pathlib\n"
        "rank, number = os.environ['RANK'], os.environ['MUSTER_ROUND']\n"
        "print(f'rank {rank} in round {number}', flush=True)\n"
        "if (rank, number) == ('1', '0') and '--fall' in sys.argv:\n"
        f"    while not pathlib.Path({str(plane.notes)!r}, 'fall').exists(): time.sleep(0.01)\n"
        "    sys.exit(5)\n"
        f"while not pathlib.Path({str(plane.notes)!r}, 'go').exists(): time.sleep(0.01)\n"
        "print(f'rank {rank} is done', flush=True)\n"
    )
    plane.kubectl("apply", "-f", "-", input=plane.manifest(script=str(talker), args=["--fall"], stopGraceSeconds=1))
    follow = plane.muster("logs", "demo", "-f", "--rank", "1")
    follow.expect("rank 1 in round 0")
    (plane.notes / "fall").touch()
    plane.said("wait", "demo", "--for=target", "--timeout", "30s")
    eventually(lambda: (plane.object() or {})["status"]["round"] == 1, "the second round")
    follow.expect("rank 1 in round 1")
    plane.said("scale", "demo", "3", "--wait", "--timeout", "30s")
    assert "demo is ready" in plane.said("explain", "demo")
    described = plane.said("describe", "demo")
    assert "3 ready, 3 wanted" in described and "rank 2 running" in described, described
    plane.go()
    assert plane.muster("wait", "demo", "--timeout", "30s").wait() == 0
    assert follow.wait() == 0
    assert "demo  healed: rank 1 on demo-1: Exit 5" in follow.text
    said = [line for line in follow.text.splitlines() if "rank" in line and "healed" not in line]
    assert [line[line.index("rank 1") :] for line in said] == [
        "rank 1 in round 0", "rank 1 in round 1", "rank 1 in round 2", "rank 1 is done",
    ], follow.text  # fmt: skip
    assert "rank 0 is done" in plane.said("logs", "demo", "--rank", "0", "--round", "2")
    told = plane.said("events", "demo")
    assert "Succeeded" in told and "target 2 → 3" in told
    (used,) = json.loads(plane.said("usage", "-o", "json"))["items"]
    assert used["training"] == "demo" and used["workers"] == 3 and used["running"] == 0
    assert used["workerSeconds"] > 0 and used["gpuSeconds"] == 0

    plane.said("run", PROBE, "--name", "slow", "-d", "--workers", "1", "--", str(plane.notes), "sleep")
    plane.said("wait", "slow", "--for=min", "--timeout", "30s")
    plane.said("cancel", "slow", "--grace", "0.5s")
    assert plane.muster("wait", "slow", "--timeout", "30s").wait() == 103
    assert plane.muster("scale", "slow", "1").wait() == 4
    assert plane.muster("get", "slwo").wait() == 3


def by_sdk(plane: KubePlane) -> None:
    plane.client.get("demo").delete(timeout=30)


def by_muster(plane: KubePlane) -> None:
    plane.said("delete", "demo")


def by_kubectl(plane: KubePlane) -> None:
    plane.kubectl("delete", "training", "demo")


def deleted(plane: KubePlane) -> set[str]:
    return {event.uid for event in plane.client.events("demo") if event.reason == "Deleted"}


def test_a_deleted_training_leaves_its_story_and_its_name(kube_plane: KubePlane) -> None:
    plane, uids = kube_plane, set()
    old: Json = {
        "metadata": {"name": "demo"},
        "spec": {"clusterIP": "None", "selector": {"muster.dev/training-uid": "x"}},
    }
    services = f"/api/v1/namespaces/{plane.namespace}/services"
    plane.cluster.api("POST", services, old, fieldManager="muster")  # of one before, whose garbage is not yet collected
    for delete in (by_sdk, by_muster, by_kubectl):
        training = plane.train(stop_grace_seconds=1)
        training.wait_until_target_world(timeout=30)
        uid = training.training.uid
        uids.add(uid)
        service = plane.cluster.get(f"{services}/demo")
        assert service is not None and service["metadata"]["ownerReferences"][0]["uid"] == uid
        assert service["spec"]["selector"] == {"muster.dev/training-uid": uid}
        assert owned(plane) == ["pods/demo-0", "pods/demo-1", "secrets/demo-run", "services/demo"]
        delete(plane)
        plane.gone(timeout_s=10)
        eventually(lambda: uids <= deleted(plane), "its end is in the journal, which is written last", 10)
    assert len(uids) == 3, "the name was used again at once"
    assert "Deleted" in plane.said("events", "demo")
    nothing_owned(plane)


def test_an_ended_training_is_removed_when_its_time_is_over(kube_plane: KubePlane) -> None:
    plane = kube_plane
    plane.kubectl("apply", "-f", "-", input=plane.manifest("demo", "exit=0", ttlSecondsAfterFinished=0.5))
    eventually(lambda: any(event.reason == "Deleted" for event in plane.client.events("demo")), "it was removed", 30)
    plane.gone()
    nothing_owned(plane)


def test_a_request_that_is_repeated_is_answered_with_the_first(kube_plane: KubePlane) -> None:
    plane = kube_plane
    url = f"http://{plane.proxy.address('api')}/v1/namespaces/{plane.namespace}/trainings"
    body = json.loads(plane.manifest("demo", "exit=0"))
    asked = {"Authorization": f"Bearer {plane.token}", "Idempotency-Key": "one"}
    first = httpx2.post(url, json=body, headers=asked)
    again = httpx2.post(url, json=body, headers=asked)
    assert first.status_code == 201 and again.json()["metadata"]["uid"] == first.json()["metadata"]["uid"]
    shown = plane.object()
    assert shown is not None and shown["metadata"]["uid"] == first.json()["metadata"]["uid"]
    plane.crash()
    plane.serve()
    later = httpx2.post(url, json=body, headers=asked)
    assert later.json()["metadata"]["uid"] == shown["metadata"]["uid"], "a restart forgets no request"
    other = httpx2.post(url, json=body, headers={**asked, "Idempotency-Key": "two"})
    assert other.json()["error"]["code"] == "already_exists"


def test_a_watch_goes_on_where_it_was_when_the_control_plane_comes_back(kube_plane: KubePlane) -> None:
    plane = kube_plane
    training = plane.train()
    training.wait_until_target_world(timeout=30)
    seen = plane.client.watch(resource_version=training.training.metadata.resource_version)
    plane.crash()
    plane.kubectl("scale", "training/demo", "--replicas=3")
    plane.serve()
    targets = [next(seen).training.training.spec.world_size.target]
    assert targets == [3], "what happened while nobody served is told"
    plane.go()
    deadline = time.monotonic() + 30
    for change in seen:
        assert change.training.phase in ("ready", "succeeded") and time.monotonic() < deadline
        if change.training.phase == "succeeded":
            break


def test_ranks_that_need_their_mesh_wait_for_it(kube_plane: KubePlane, tmp_path: Path) -> None:
    plane = kube_plane
    meshed = tmp_path / "meshed.py"
    meshed.write_text(
        "import os, pathlib, muster\nmuster.mesh_wait(timeout=20)\n"
        f"pathlib.Path({str(plane.notes)!r}, 'mesh-' + os.environ['RANK']).write_text(str(muster.mesh_status()))\n"
    )
    plane.kubectl("apply", "-f", "-", input=plane.manifest(script=str(meshed), args=[], mesh={"required": True}))
    shown = plane.phase("succeeded")
    ready = conditions(shown)["MeshReady"]
    assert ready["status"] == "True" and "all 2 workers reach each other" in ready["message"]
    told = [path.read_text() for path in sorted(plane.notes.glob("mesh-*"))]
    assert len(told) == 2 and all("ready" in one.lower() for one in told), told


def test_secrets_reach_ranks_and_nobody_else(kube_plane: KubePlane, tmp_path: Path) -> None:
    plane = kube_plane
    teller = tmp_path / "teller.py"
    teller.write_text(
        "import os, pathlib\n"
        f"pathlib.Path({str(plane.notes)!r}, 'env').write_text(os.environ['KEY'] + ' ' + os.environ['OPEN'])\n"
    )
    env = {"KEY": "s3cr3t $(HOME) é", "OPEN": "see $(KEY) $$ $HOME"}
    plane.kubectl("apply", "-f", "-", input=plane.manifest(
        script=str(teller), args=[], env=env, secretEnv=["KEY"], world=(1, 1, 1)))  # fmt: skip
    plane.phase("succeeded")
    assert (plane.notes / "env").read_text() == f"{env['KEY']} {env['OPEN']}"
    (pod,) = plane.pods().values()
    assert "s3cr3t" not in json.dumps(pod)
    for words in (("get", "demo", "-o", "json"), ("describe", "demo"), ("events", "demo", "-o", "json")):
        assert "s3cr3t" not in plane.said(*words)
    assert plane.client.get("demo").training.spec.env["KEY"] == "***"
    assert "s3cr3t" not in plane.kubectl("get", "events", "-o", "json")


def test_a_pod_that_waits_says_why_until_a_node_comes(kube_plane: KubePlane) -> None:
    plane = kube_plane
    plane.kubectl("apply", "-f", "-", input=plane.manifest(resources={"gpus": 1}))
    path = f"/apis/muster.dev/v1alpha1/namespaces/{plane.namespace}/trainings/demo"
    shown = plane.cluster.until(
        path,
        lambda item: item and conditions(item).get("TargetReached", {}).get("reason") == "WorkersWaiting",
        "the wait is told",
        20,
    )
    assert shown is not None
    told = conditions(shown)["TargetReached"]
    assert told["status"] == "False" and "Insufficient nvidia.com/gpu" in told["message"], told
    assert shown["status"]["phase"] == "pending"
    assert "Insufficient nvidia.com/gpu" in plane.said("explain", "demo")
    assert any(event.reason == "WorkerWaiting" for event in plane.client.events("demo"))
    node = TestKubelet(plane.cluster, "node-gpu", gpus=2)
    try:
        plane.kubectl("wait", "--for=condition=TargetReached", "training/demo", "--timeout=20s")
        assert "Insufficient" not in plane.client.explain("demo").summary
        plane.go()
        assert {exit["node"] for exit in plane.phase("succeeded")["status"]["rankExits"]} == {"node-gpu"}
        assert plane.client.get("demo").usage().gpu_seconds > 0
    finally:
        node.close()

"""A checkpoint on a claim: is it there for whoever comes next, on another node?"""

from __future__ import annotations

import json
from pathlib import Path

from tests.containers import images
from tests.containers.installation import COUNT, Installation, Trained, furthest
from tests.containers.lab import Lab
from tests.kube.api import Json


def claim(lab: Lab, namespace: str, folder: Path) -> None:
    """A volume that both nodes have, as a file server would give it to them."""
    folder.mkdir()
    folder.chmod(0o777)
    room = {"accessModes": ["ReadWriteMany"], "storageClassName": ""}
    volume = {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"checkpoints-{namespace}"},
        "spec": {**room, "capacity": {"storage": "1Gi"}, "hostPath": {"path": str(folder)}},
    }
    wanted = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "checkpoints", "namespace": namespace},
        "spec": {
            **room,
            "resources": {"requests": {"storage": "1Gi"}},
            "volumeName": f"checkpoints-{namespace}",
        },
    }
    both = {"apiVersion": "v1", "kind": "List", "items": [volume, wanted]}
    lab.kubectl("apply", "-f", "-", input=json.dumps(both))


def test_a_claim_is_the_same_folder_on_both_nodes(real: Lab) -> None:
    """The lab's own half of the story, without muster: what one node's Pod wrote the other's reads."""
    namespace = real.new_namespace()
    claim(real, namespace, real.folder / f"claim-{namespace}")
    rights = {"runAsUser": 65532, "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    identity = {"runAsNonRoot": True, "fsGroup": 65532, "seccompProfile": {"type": "RuntimeDefault"}}
    for node, script in (("node-1", "echo kept >/checkpoints/file"), ("node-2", "cat /checkpoints/file")):
        container = {
            "name": "c",
            "image": images.MUSTER,
            "command": ["sh", "-c", script],
            "securityContext": rights,
            "volumeMounts": [{"name": "checkpoints", "mountPath": "/checkpoints"}],
        }
        volume = {"name": "checkpoints", "persistentVolumeClaim": {"claimName": "checkpoints"}}
        spec: Json = {"restartPolicy": "Never", "nodeName": node, "containers": [container], "volumes": [volume]}
        spec["securityContext"] = identity
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": node}, "spec": spec}
        real.kubectl("-n", namespace, "apply", "-f", "-", input=json.dumps(pod))
        path = f"/api/v1/namespaces/{namespace}/pods/{node}"
        real.until(path, lambda it: it and it["status"].get("phase") == "Succeeded", f"{node} is done", 60.0)
    assert real.kubectl("-n", namespace, "logs", "node-2").stdout == "kept\n"
    real.drop_namespace(namespace)


def test_a_checkpoint_on_a_claim_outlives_pod_and_node(installed: Installation, trained: Trained) -> None:
    """One rank, so that nobody else remembers."""
    folder = installed.lab.folder / f"claim-{trained.namespace}"
    claim(installed.lab, trained.namespace, folder)
    storage = [{"name": "checkpoints", "claim": "checkpoints", "mount": "/checkpoints"}]
    trained.submit("python", COUNT, "100000", "/checkpoints", world=(1, 1, 1), storage=storage)
    before = trained.until_step(20)
    (victim,) = {one["node"] for one in before["ranks"]}
    installed.lab.nodes[victim].kill()
    after = trained.until_step(furthest(before) + 1, after_round=before["round"], timeout_s=150.0)
    assert {one["node"] for one in after["ranks"]} == {"node-1", "node-2"} - {victim}
    (pod,) = {one["worker"] for one in after["ranks"]}
    (line,) = [line for line in trained.kubectl("logs", pod).splitlines() if "from step" in line]
    assert int(line.split()[-1]) >= furthest(before), "it goes on where the checkpoint is"

"""A checkpoint on a claim: is it there for whoever comes next, on another node?

Needs `spec.storage` (name, claim, mount). Where the definition lacks it, the test is skipped and says so.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from muster.kube.crd import custom_resource_definition
from tests.containers.installation import COUNT, Installation, Trained, furthest
from tests.kube.api import Json


def storage_schema() -> Json | None:
    (version,) = custom_resource_definition()["spec"]["versions"]
    found: Json | None = version["schema"]["openAPIV3Schema"]["properties"]["spec"]["properties"].get("storage")
    return found


def claim(installed: Installation, namespace: str, folder: Path) -> None:
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
    installed.lab.kubectl("apply", "-f", "-", input=json.dumps(both))


def test_a_checkpoint_on_a_claim_outlives_pod_and_node(installed: Installation, trained: Trained) -> None:
    """One rank, so that nobody else remembers."""
    schema = storage_schema()
    if schema is None:
        pytest.skip("the Training of this version has no spec.storage")
    folder = installed.lab.folder / f"claim-{trained.namespace}"
    claim(installed, trained.namespace, folder)
    storage: Json = {"name": "checkpoints", "claim": "checkpoints", "mount": "/checkpoints"}
    given = [storage] if schema["type"] == "array" else storage
    trained.submit("python", COUNT, "100000", "/checkpoints", world=(1, 1, 1), storage=given)
    before = trained.until_step(20)
    (victim,) = {one["node"] for one in before["ranks"]}
    installed.lab.nodes[victim].kill()
    after = trained.until_step(furthest(before) + 1, after_round=before["round"], timeout_s=150.0)
    assert {one["node"] for one in after["ranks"]} == {"node-1", "node-2"} - {victim}
    (pod,) = {one["worker"] for one in after["ranks"]}
    (line,) = [line for line in trained.kubectl("logs", pod).splitlines() if "from step" in line]
    assert int(line.split()[-1]) >= furthest(before), "it goes on where the checkpoint is"

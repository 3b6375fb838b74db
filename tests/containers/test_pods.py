"""A worker that is a container: what is in it, what does the cluster allow it, and what can kubectl do with it?"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.containers import images
from tests.containers.installation import Installation, Trained, furthest
from tests.fleet import eventually
from tests.kube.api import Json
from tests.kube.pod_security import violations


def test_shared_memory_is_there_and_can_be_written(trained: Trained) -> None:
    trained.counting()
    trained.until_step(1)
    written = "grep -q ' /dev/shm ' /proc/mounts && head -c 1000000 /dev/zero >/dev/shm/x && stat -c %s /dev/shm/x"
    assert trained.kubectl("exec", "demo-0", "--", "sh", "-c", written).strip() == "1000000"


def test_workers_are_found_by_name_and_the_control_plane_is_too(trained: Trained) -> None:
    trained.counting()
    trained.until_step(1)
    own = f"demo-1.demo.{trained.namespace}.svc.cluster.local"
    found = trained.kubectl("exec", "demo-0", "--", "getent", "hosts", own)
    assert found.split()[0] == trained.pods()["demo-1"]["status"]["podIP"]
    service = trained.lab.api("GET", "/api/v1/namespaces/muster/services/muster")["spec"]["clusterIP"]
    assert trained.kubectl("exec", "demo-0", "--", "getent", "hosts", "muster.muster.svc").split()[0] == service


def test_restricted_rules_take_us_and_refuse_others(installed: Installation, trained: Trained) -> None:
    """1.20 has no Pod Security: a policy with its rules stands in, and the published rules are applied to what ran."""
    trained.counting()
    trained.until_step(1)
    for pod in [*trained.pods().values(), *installed.replicas().values()]:
        assert pod["metadata"]["annotations"]["kubernetes.io/psp"] == "restricted"
        assert violations(pod) == []
    root = {"containers": [{"name": "c", "image": images.MUSTER, "securityContext": {"runAsUser": 0}}]}
    body: Json = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "root"}, "spec": root}
    said = trained.lab.kubectl("-n", trained.namespace, "apply", "-f", "-", input=json.dumps(body), check=False)
    assert said.returncode and "running with the root UID is forbidden" in said.stderr


def test_kubectl_reads_enters_scales_and_deletes(trained: Trained) -> None:
    trained.counting()
    before = trained.until_step(1)
    assert "rank 0 of 2 from step 0" in "".join(trained.kubectl("logs", pod) for pod in trained.pods())
    assert trained.kubectl("exec", "demo-1", "--", "hostname").strip() == "demo-1"
    assert trained.kubectl("exec", "demo-1", "--", "id", "-u").strip() == "65532"
    trained.kubectl("scale", "mt/demo", "--replicas", "3")
    after = trained.until_step(furthest(before) + 1, after_round=before["round"])
    assert len(after["ranks"]) == 3 and len(trained.pods()) == 3
    trained.kubectl("delete", "mt/demo", "--timeout=60s", timeout_s=90.0)
    assert trained.lab.get(trained.path) is None
    eventually(lambda: not trained.pods(), "its Pods are gone", 60)


def test_a_shell_is_opened_where_a_rank_runs(installed: Installation, trained: Trained, tmp_path: Path) -> None:
    trained.counting()
    status = trained.until_step(1)
    (seat,) = [one for one in status["ranks"] if one["rank"] == 1]
    words = ("shell", "-n", trained.namespace, trained.name)
    asked = "echo $RANK of $WORLD_SIZE on $(hostname) as $(id -u); exit 7"
    said = installed.as_admin(*words, "1", "--", "sh", "-c", asked, folder=tmp_path, code=7)
    assert f"1 of 2 on {seat['worker']} as 65532\n" in said
    left = installed.as_admin(*words, "1", "--", "env", folder=tmp_path)
    assert "MUSTER_RUN_TOKEN" not in left, "nothing by which it could speak as the worker"
    refused = installed.as_admin(*words, "5", "--", "env", folder=tmp_path, code=3)
    assert "demo has no rank 5: its ranks are 0 to 1" in refused


def test_what_the_kernel_killed_for_memory_is_told(trained: Trained) -> None:
    trained.submit(
        "python", "/src/programs/hungry.py", world=(1, 1, 1), resources={"memory": "160Mi"}, maxRestarts=0, warm="never"
    )
    ended = trained.until_phase("failed")
    assert [one["terminationReason"] for one in ended["rankExits"]] == ["OOMKilled"]
    trained.until_event("OOMKilled")


@pytest.mark.parametrize("how", ["evicted", "deleted"])
def test_a_worker_that_is_taken_away_is_told_and_replaced(trained: Trained, how: str) -> None:
    trained.counting()
    before, old = trained.until_step(20), set(trained.pods())
    if how == "evicted":
        eviction = {"apiVersion": "policy/v1beta1", "kind": "Eviction", "metadata": {"name": "demo-1"}}
        trained.lab.api("POST", f"/api/v1/namespaces/{trained.namespace}/pods/demo-1/eviction", eviction)
    else:
        trained.kubectl("delete", "pod", "demo-1", "--wait=false")
    after = trained.until_step(furthest(before) + 1, after_round=before["round"])
    assert after["restarts"] == 0 and "demo-1" not in {one["worker"] for one in after["ranks"]}
    assert set(trained.pods()) - old, "another Pod is in its place"
    trained.until_event("WorkerExited", "demo-1")

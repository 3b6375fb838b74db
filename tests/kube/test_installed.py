"""From `muster kube install` to a training that succeeds, with nothing between but the cluster itself."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.fleet import PROBE, eventually
from tests.kube.cluster import Cluster
from tests.kube.kubelet import TestKubelet
from tests.kube.service_proxy import ServiceProxy


@pytest.fixture
def home(cluster: Cluster) -> Iterator[str]:
    made = cluster.new_namespace("muster")
    yield made
    cluster.kubectl("-n", made, "delete", "deployment/muster", "--ignore-not-found", "--wait=false")
    cluster.drop_namespace(made)


def test_an_installed_control_plane_trains(
    cluster: Cluster, namespace: str, kubelet: TestKubelet, home: str, tmp_path: Path
) -> None:
    """Its Pod runs what the Deployment says, as the account that the Deployment names, with the rendered roles.

    One replica: Pods share the network here, and the API's port is the same for all. The Service's name stands in no
    DNS here, so its address is given instead.
    """
    ports = {"api": 0, "coordinator": 8471, "mesh": 8472}
    proxy = ServiceProxy(cluster, home, "muster", ports)
    install = [sys.executable, "-m", "muster.cli.main", "kube", "install", "-n", home, "--replicas", "1", "--dry-run"]
    rendered = subprocess.run(install, capture_output=True, text=True, check=True).stdout
    objects = list(yaml.safe_load_all(rendered))
    (container,) = objects[-1]["spec"]["template"]["spec"]["containers"]
    words = container["args"]
    words[words.index("--advertise") + 1] = proxy.host
    container["env"] = [one for one in container["env"] if one["name"] not in ("MUSTER_HOME", "TMPDIR")]
    container["env"].append({"name": "MUSTER_HOME", "value": str(tmp_path / "home")})  # for a volume of its own
    cluster.kubectl("apply", "-f", "-", input=yaml.safe_dump_all(objects))
    try:
        proxy.until_ready("api", 60.0)
    except TimeoutError:
        logs = cluster.kubectl("-n", home, "logs", "-l", "app.kubernetes.io/name=muster", check=False)
        shown = cluster.kubectl("-n", home, "get", "pods", "-o", "wide", check=False)
        raise AssertionError(f"nobody leads: {shown.stdout}{logs.stdout}{logs.stderr}") from None

    spec = {"script": PROBE, "args": [str(tmp_path), "wait"], "workingDir": str(tmp_path)}
    spec |= {"worldSize": {"min": 2, "target": 2, "max": 3}}  # type: ignore[dict-item]
    about = {"name": "demo", "namespace": namespace}
    training = {"apiVersion": "muster.dev/v1alpha1", "kind": "Training", "metadata": about, "spec": spec}
    cluster.kubectl("apply", "-f", "-", input=json.dumps(training))
    cluster.kubectl("-n", namespace, "wait", "--for=condition=TargetReached", "training/demo", "--timeout=60s")
    (tmp_path / "go").touch()
    path = f"/apis/muster.dev/v1alpha1/namespaces/{namespace}/trainings/demo"
    ended = cluster.until(path, lambda item: item and item["status"].get("phase") == "succeeded", "it succeeds", 60.0)
    assert ended is not None and [one["exitCode"] for one in ended["status"]["rankExits"]] == [0, 0]
    cluster.kubectl("-n", namespace, "delete", "training/demo", "--timeout=60s")
    pods = f"/api/v1/namespaces/{namespace}/pods"
    eventually(lambda: not cluster.api("GET", pods)["items"], "its Pods are gone", 30)
    proxy.close()

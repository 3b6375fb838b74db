"""Is the cluster of the tests a cluster? What the other tests rely on, on the real API server."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from tests.fleet import eventually, gone
from tests.kube import pods
from tests.kube.api import Api, Json, Refused
from tests.kube.cluster import Cluster
from tests.kube.kubelet import TestKubelet

ECHO = 'trap "exit 0" TERM; echo up; while :; do sleep 0.05; done'
STUBBORN = 'trap "" TERM; echo up; while :; do sleep 0.05; done'


class Pods:
    """What a test does with Pods of its namespace."""

    def __init__(self, cluster: Cluster, namespace: str) -> None:
        self.cluster = cluster
        self.path = f"/api/v1/namespaces/{namespace}/pods"
        self.namespace = namespace

    def make(
        self, name: str, script: str, *, meta: Json | None = None, container: Json | None = None, **spec: Any
    ) -> Json:
        main = {"name": "main", "image": "any", "command": ["sh", "-c", script], **(container or {})}
        body = {
            "metadata": {"name": name, **(meta or {})},
            "spec": {"restartPolicy": "Never", "containers": [main], **spec},
        }
        return self.cluster.api("POST", self.path, body)

    def until(self, name: str, phase: str, timeout_s: float = 20.0) -> Json:
        def there(pod: Json | None) -> bool:
            return bool(pod and pod["status"].get("phase") == phase)

        found = self.cluster.until(f"{self.path}/{name}", there, f"{name} is {phase}", timeout_s)
        assert found is not None
        return found

    def until_gone(self, name: str) -> None:
        self.cluster.until(f"{self.path}/{name}", lambda pod: pod is None, f"{name} is gone")

    def ended(self, name: str) -> Json:
        ended: Json = state(self.until(name, "Failed"))["terminated"]
        return ended

    def log(self, name: str, *options: str) -> str:
        return self.cluster.kubectl("logs", name, "-n", self.namespace, *options).stdout

    def up(self, name: str) -> None:
        """Until its script runs: a trap before that would not be set."""
        self.until(name, "Running")
        eventually(lambda: "up" in self.log(name), f"{name} is up")


def state(pod: Json) -> Json:
    found: Json = pod["status"]["containerStatuses"][0]["state"]
    return found


def condition(item: Json, kind: str) -> Json:
    found: list[Json] = [one for one in item["status"].get("conditions", []) if one["type"] == kind]
    return found[0] if found else {}


@pytest.fixture
def place(cluster: Cluster, namespace: str) -> Pods:
    return Pods(cluster, namespace)


def test_a_pod_runs_and_its_end_is_told(kubelet: TestKubelet, place: Pods) -> None:
    place.make("one", ECHO)
    pod = place.until("one", "Running")
    assert "running" in state(pod)
    assert condition(pod, "Ready")["status"] == "True"
    socket.create_server((pod["status"]["podIP"], 0)).close()
    assert kubelet.processes().keys() == {f"{place.namespace}/one"}
    place.make("two", "exit 3")
    ended = place.ended("two")
    assert (ended["exitCode"], ended["reason"]) == (3, "Error")
    assert ended["startedAt"] <= ended["finishedAt"]
    place.make("three", "true")
    assert state(place.until("three", "Succeeded"))["terminated"]["reason"] == "Completed"
    kubelet.kill("one")
    assert place.ended("one")["exitCode"] == 137
    kubelet.no_process_left()


def test_the_environment_comes_from_values_fields_and_secrets(
    cluster: Cluster, kubelet: TestKubelet, place: Pods
) -> None:
    container = {
        "env": [
            {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
            {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
            {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "one"}}},
            {"name": "ALL", "value": "$(POD) on $(NODE) with $(KEY)"},
        ],
        "args": ["$(ALL)"],
        "command": ["sh", "-c", 'echo "$0; $IP"; pwd; command -v muster-node; command -v python'],
        "workingDir": "/usr",
    }
    place.make("env", "", container=container)

    def waits(pod: Json | None) -> bool:
        return bool(pod and pod["status"].get("containerStatuses") and "waiting" in state(pod))

    waiting = cluster.until(f"{place.path}/env", waits)
    assert waiting and state(waiting)["waiting"]["reason"] == "CreateContainerConfigError"
    secret = {"metadata": {"name": "keys"}, "stringData": {"one": "s3cret"}}
    cluster.api("POST", f"/api/v1/namespaces/{place.namespace}/secrets", secret)
    ip = place.until("env", "Succeeded")["status"]["podIP"]
    said, folder, *programs = place.log("env").splitlines()
    assert said == f"env on node-1 with s3cret; {ip}"
    assert folder == "/usr"
    assert [os.path.basename(program) for program in programs] == ["muster-node", "python"]


def test_logs_follow_and_stay_until_the_pod_goes(cluster: Cluster, kubelet: TestKubelet, place: Pods) -> None:
    place.make("talker", 'echo one; echo two >&2; trap "echo bye; exit 0" TERM; echo up; while :; do sleep 0.05; done')
    place.up("talker")
    follow = [cluster.programs.kubectl, "logs", "-f", "talker", "-n", place.namespace]
    with subprocess.Popen(follow, env=cluster.env(), stdout=subprocess.PIPE, text=True) as following:
        assert following.stdout is not None
        assert [following.stdout.readline() for _ in range(3)] == ["one\n", "two\n", "up\n"]
        kubelet.kill("talker", signal.SIGTERM)
        assert following.communicate(timeout=10)[0] == "bye\n"
    place.until("talker", "Succeeded")
    assert place.log("talker", "--tail=1") == "bye\n"
    assert place.log("talker", "--timestamps", "--since=1h").splitlines()[0].endswith("Z one")


def test_deletion_is_patient_and_then_is_not(cluster: Cluster, kubelet: TestKubelet, place: Pods) -> None:
    meta = {"finalizers": ["muster.dev/exit"]}
    place.make("kept", ECHO, meta=meta)
    place.make("stubborn", STUBBORN, meta=meta)
    place.up("kept")
    place.up("stubborn")
    cluster.kubectl("delete", "pod", "kept", "-n", place.namespace, "--wait=false")
    cluster.kubectl("delete", "pod", "stubborn", "-n", place.namespace, "--wait=false", "--grace-period=1")
    assert state(place.until("kept", "Succeeded"))["terminated"]["exitCode"] == 0
    assert place.ended("stubborn")["exitCode"] == 137
    kubelet.no_process_left()
    for name in ("kept", "stubborn"):
        assert cluster.api("GET", f"{place.path}/{name}")["metadata"]["deletionTimestamp"]
        cluster.patch(f"{place.path}/{name}", {"metadata": {"finalizers": None}})
        place.until_gone(name)


def test_memory_evictions_and_images(cluster: Cluster, kubelet: TestKubelet, place: Pods) -> None:
    limited = {"resources": {"limits": {"memory": "64Mi"}}, "command": [sys.executable, "-c", "b'x' * (200 << 20)"]}
    place.make("hungry", "", container=limited)
    ended = place.ended("hungry")
    assert (ended["exitCode"], ended["reason"]) == (137, "OOMKilled")
    for name in ("oom", "evicted"):
        place.make(name, ECHO)
        place.until(name, "Running")
    kubelet.oom("oom")
    assert place.ended("oom")["reason"] == "OOMKilled"
    kubelet.evict(f"{place.namespace}/evicted")
    evicted = place.until("evicted", "Failed")["status"]
    assert evicted["reason"] == "Evicted"
    assert "low on resource" in evicted["message"]
    place.make("unpulled", "", container={"image": "missing:1"})

    def backs_off(pod: Json | None) -> bool:
        return bool(pod and pod["status"].get("containerStatuses") and "waiting" in state(pod))

    unpulled = cluster.until(f"{place.path}/unpulled", backs_off)
    assert unpulled and state(unpulled)["waiting"]["reason"] == "ImagePullBackOff"
    kubelet.no_process_left()


def test_everything_that_a_pod_started_ends_with_it(kubelet: TestKubelet, place: Pods) -> None:
    place.make("parent", "setsid sleep 600 & echo $!; echo up; sleep 600")
    place.up("parent")
    child = int(place.log("parent").split()[0])
    assert not gone(child)
    kubelet.kill("parent")
    place.until("parent", "Failed")
    assert gone(child)


def test_what_fits_nowhere_says_why_and_goes_where_there_is_room(
    cluster: Cluster, kubelet: TestKubelet, place: Pods
) -> None:
    gpu = {"resources": {"limits": {"nvidia.com/gpu": "2"}}}
    with contextlib.closing(TestKubelet(cluster, "node-2", gpus=1)):
        place.make("big", "true", container=gpu)
        pending = cluster.until(f"{place.path}/big", lambda pod: pod and condition(pod, "PodScheduled"))
        assert pending is not None
        said = condition(pending, "PodScheduled")
        assert (said["status"], said["reason"]) == ("False", "Unschedulable")
        assert said["message"] == "0/2 nodes are available: 2 Insufficient nvidia.com/gpu."
        with contextlib.closing(TestKubelet(cluster, "node-3", gpus=2)):
            assert place.until("big", "Succeeded")["spec"]["nodeName"] == "node-3"


def test_a_node_that_vanishes_is_not_ready_and_its_pods_are_deleted(
    cluster: Cluster, kubelet: TestKubelet, place: Pods
) -> None:
    def ready(wanted: str) -> Any:
        return lambda node: node and condition(node, "Ready").get("status") == wanted

    place.make("lost", ECHO)
    place.until("lost", "Running")
    with contextlib.closing(TestKubelet(cluster, "node-2")):
        kubelet.vanish(processes="freeze")
        cluster.until("/api/v1/nodes/node-1", ready("Unknown"))
        lost = cluster.until(f"{place.path}/lost", lambda pod: pod and pod["metadata"].get("deletionTimestamp"))
        assert lost and lost["status"]["phase"] == "Running"
        kubelet.come_back()
        cluster.until("/api/v1/nodes/node-1", ready("True"))
        place.until_gone("lost")
        kubelet.no_process_left()


def test_pods_survive_an_api_server_that_restarts_and_forgets(
    cluster: Cluster, kubelet: TestKubelet, place: Pods
) -> None:
    version = cluster.api("GET", place.path)["metadata"]["resourceVersion"]
    place.make("worker", ECHO)
    place.up("worker")
    before = kubelet.processes()
    cluster.forget_history()
    with pytest.raises(Refused) as refused:
        cluster.background.call(_first_event(cluster.aio, place.path, version))
    assert refused.value.code == 410
    assert kubelet.processes() == before
    kubelet.kill("worker", signal.SIGTERM)
    place.until("worker", "Succeeded")


async def _first_event(api: Api, path: str, version: str) -> str:
    async for kind, _ in api.watch(path, {"resourceVersion": version}):
        return kind
    raise AssertionError("the watch ended")


def test_what_an_owner_leaves_is_collected(cluster: Cluster, place: Pods) -> None:
    maps = f"/api/v1/namespaces/{place.namespace}/configmaps"
    owner = cluster.api("POST", maps, {"metadata": {"name": "owner"}})["metadata"]
    reference = {"apiVersion": "v1", "kind": "ConfigMap", "name": "owner", "uid": owner["uid"]}
    cluster.api("POST", maps, {"metadata": {"name": "owned", "ownerReferences": [reference]}})
    cluster.api("DELETE", f"{maps}/owner")
    cluster.until(f"{maps}/owned", lambda item: item is None, "the owned object is gone")


def test_rights_are_checked(cluster: Cluster, namespace: str) -> None:
    account = f"system:serviceaccount:{namespace}:worker"
    asked = ("auth", "can-i", "list", "pods", "-n", namespace)
    assert cluster.kubectl(*asked, user=account, check=False).stdout == "no\n"
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "view"}
    subject = {"kind": "ServiceAccount", "name": "worker", "namespace": namespace}
    bindings = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{namespace}/rolebindings"
    cluster.api("POST", bindings, {"metadata": {"name": "view"}, "roleRef": role, "subjects": [subject]})
    eventually(lambda: cluster.kubectl(*asked, user=account, check=False).stdout == "yes\n", "the right holds")


def test_a_pod_with_an_account_speaks_for_it(cluster: Cluster, kubelet: TestKubelet, place: Pods) -> None:
    place.make("asks", f"{cluster.programs.kubectl} get pods", serviceAccountName="worker")
    place.until("asks", "Failed")
    assert f"system:serviceaccount:{place.namespace}:worker" in place.log("asks")


def test_pretended_pods_run_without_a_process(cluster: Cluster, place: Pods) -> None:
    with contextlib.closing(TestKubelet(cluster, pretend=True)) as kubelet:
        names = [f"many-{number}" for number in range(20)]
        for name in names:
            place.make(name, "never run")
        for name in names:
            place.until(name, "Running")
        kubelet.kill("many-7")
        assert place.ended("many-7")["exitCode"] == 137
        place.cluster.kubectl("delete", "pod", "many-8", "-n", place.namespace)


@pytest.mark.parametrize(
    ("text", "expanded"),
    [("$(A)-$(B)", "1-$(B)"), ("$$(A)", "$(A)"), ("$A ${A}", "$A ${A}"), ("$$$(A)", "$1"), ("", "")],
)
def test_variables_expand_as_in_kubernetes(text: str, expanded: str) -> None:
    assert pods.expand(text, {"A": "1"}) == expanded


@pytest.fixture
def orphan() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A process that starts another under a guard, and says which."""
    program = (
        "import os, subprocess, sys; from tests.kube.guard import Guard; guard = Guard('MARK=' + sys.argv[1]);"
        "print(subprocess.Popen(['sleep', '600'], env={'MARK': sys.argv[1]}).pid, flush=True); sys.stdin.read()"
    )
    argv = [sys.executable, "-c", program, f"guarded-{os.getpid()}"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
        process.kill()


def test_what_is_guarded_ends_with_a_killed_test(orphan: tuple[subprocess.Popen[str], str]) -> None:
    process, pid = orphan
    assert not gone(int(pid))
    process.kill()
    eventually(lambda: gone(int(pid)), "the guarded process is gone", 10)

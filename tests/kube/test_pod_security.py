"""A cluster takes only what Pod Security calls "restricted": does it take what is rendered, workers and muster itself?

An API server before 1.25 has a PodSecurityPolicy with the same rules instead of the namespace's label.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from muster.backends.kube import render
from muster.kube import manifests
from muster.kube.manifests import InstallOptions
from muster.types.training import Mesh, Resources, Training
from tests.fleet import eventually
from tests.kube.api import Api, Json, Refused
from tests.kube.cluster import Cluster
from tests.kube.pod_security import violations
from tests.training_builders import a_training

TRAININGS = {
    "plain": a_training(),
    "full": a_training(
        image="mine:1",
        working_dir="/work",
        procs_per_worker=8,
        resources=Resources(cpu=4.0, memory="64Gi", gpus=8),
        env={"KEY": "hidden", "HOME": "/root"},
        secret_env=("KEY",),
        mesh=Mesh(required=True, timeout_seconds=45.0, probe_address="10.8.0.0/16"),
    ),
}
USERS = {"ours": render.USER, "theirs": 1000, "image": None}


def a_pod(training: Training, user: int | None = render.USER) -> Json:
    name = f"{training.metadata.name}-0"
    pod = render.pod(
        training,
        name,
        coordinator="muster:8471",
        mesh_endpoint="muster:8472",
        image="base",
        agent_image="muster:1",
        user=user,
    )
    assert pod["spec"]["initContainers"], "the agent is copied"
    return pod


@pytest.mark.parametrize("user", USERS)
@pytest.mark.parametrize("training", TRAININGS)
def test_a_worker_is_restricted_whatever_its_training_asks_for(training: str, user: str) -> None:
    assert violations(a_pod(TRAININGS[training], USERS[user])) == []


def test_a_worker_as_root_is_what_somebody_asked_for() -> None:
    assert violations(a_pod(TRAININGS["plain"], 0)) == ["capabilities", "non-root", "root user"]


@pytest.mark.parametrize("options", [InstallOptions(), InstallOptions(tls_secret="tls", worker_user="0", replicas=1)])
def test_the_control_plane_is_restricted(options: InstallOptions) -> None:
    held = [one for one in manifests.render(options) if "template" in (one.get("spec") or {})]
    assert [one["kind"] for one in held] == ["Deployment"], "there is nothing else that makes Pods"
    assert violations(held[0]["spec"]["template"]) == []


def within(*path: str | int, value: Any) -> Callable[[Json], None]:
    def change(pod: Json) -> None:
        place: Any = pod["spec"]
        for name in path[:-1]:
            place = place[name] if isinstance(name, int) else place.setdefault(name, {})
        place[path[-1]] = value

    return change


def in_context(name: str, value: Any) -> Callable[[Json], None]:
    return within("containers", 0, "securityContext", name, value=value)


BREACHES = {
    "host process": in_context("windowsOptions", {"hostProcess": True}),
    "host namespaces": within("hostNetwork", value=True),
    "privileged": in_context("privileged", True),
    "capabilities": in_context("capabilities", {"drop": ["ALL"], "add": ["SYS_ADMIN"]}),
    "volume types": within("volumes", value=[{"name": "x", "hostPath": {"path": "/"}}]),
    "host ports": within("containers", 0, "ports", value=[{"containerPort": 1, "hostPort": 1}]),
    "host probes": within("containers", 0, "livenessProbe", value={"httpGet": {"host": "10.0.0.1"}}),
    "apparmor": in_context("appArmorProfile", {"type": "Unconfined"}),
    "selinux": in_context("seLinuxOptions", {"type": "spc_t"}),
    "proc mount": in_context("procMount", "Unmasked"),
    "sysctls": within("securityContext", "sysctls", value=[{"name": "kernel.msgmax", "value": "1"}]),
    "seccomp": in_context("seccompProfile", {"type": "Unconfined"}),
    "privilege escalation": in_context("allowPrivilegeEscalation", None),
    "non-root": in_context("runAsNonRoot", False),
    "root user": in_context("runAsUser", 0),
}


@pytest.mark.parametrize("rule", BREACHES)
def test_each_rule_would_be_noticed(rule: str) -> None:
    pod = copy.deepcopy(a_pod(TRAININGS["plain"]))
    BREACHES[rule](pod)
    assert violations(pod) == [rule]


def test_each_rule_counts_for_every_container() -> None:
    for kind in ("initContainers", "ephemeralContainers"):
        pod = a_pod(TRAININGS["plain"]) | {}
        pod["spec"] = {**pod["spec"], kind: [{"name": "more", "image": "x"}]}
        assert violations(pod) == ["capabilities", "privilege escalation"]


# On a real API server ----------------------------------------------------------------------------

POLICY: Json = {
    "privileged": False,
    "allowPrivilegeEscalation": False,
    "requiredDropCapabilities": ["ALL"],
    "volumes": ["configMap", "emptyDir", "projected", "secret", "downwardAPI", "persistentVolumeClaim"],
    "hostNetwork": False,
    "hostIPC": False,
    "hostPID": False,
    "runAsUser": {"rule": "MustRunAsNonRoot"},
    "seLinux": {"rule": "RunAsAny"},
    "supplementalGroups": {"rule": "RunAsAny"},
    "fsGroup": {"rule": "RunAsAny"},
    "readOnlyRootFilesystem": False,
}


@pytest.fixture
def restricted(cluster: Cluster, namespace: str) -> Iterator[Callable[[Json], Json]]:
    """Create a Pod as a dry run in a namespace that allows only restricted Pods."""
    if "v1beta1" not in cluster.serves("policy"):
        label = {"pod-security.kubernetes.io/enforce": "restricted"}
        cluster.patch(f"/api/v1/namespaces/{namespace}", {"metadata": {"labels": label}})
        yield lambda pod: cluster.api("POST", f"/api/v1/namespaces/{namespace}/pods", pod, dryRun="All")
        return
    allowed = {"seccomp.security.alpha.kubernetes.io/allowedProfileNames": "runtime/default"}
    name = f"restricted-{namespace}"
    policies = "/apis/policy/v1beta1/podsecuritypolicies"
    cluster.api("POST", policies, {"metadata": {"name": name, "annotations": allowed}, "spec": POLICY})
    user = f"system:serviceaccount:{namespace}:ann"
    token = cluster.token_of(user)
    kinds = "--resource=podsecuritypolicies.policy"
    cluster.kubectl("create", "clusterrole", name, "--verb=use", kinds, f"--resource-name={name}")
    cluster.kubectl("-n", namespace, "create", "role", "pods", "--verb=create", "--resource=pods")
    for role in (f"--clusterrole={name}", "--role=pods"):
        words = ("create", "rolebinding", role.rpartition("=")[2], role, f"--serviceaccount={namespace}:ann")
        cluster.kubectl("-n", namespace, *words)
    with cluster.another_apiserver("--enable-admission-plugins=PodSecurityPolicy") as url:

        async def create(pod: Json) -> Json:
            api = Api(url, token, str(cluster.ca))
            try:
                return await api.request("POST", f"/api/v1/namespaces/{namespace}/pods", pod, dryRun="All")
            finally:
                await api.close()

        yield lambda pod: cluster.background.call(create(pod))
    cluster.api("DELETE", f"{policies}/{name}")
    cluster.kubectl("delete", "clusterrole", name)


def of_security(pod: Json) -> list[Json]:
    return [one.get("securityContext") or {} for one in (pod["spec"], *pod["spec"]["containers"])]


def test_a_real_server_with_the_same_rules_takes_workers_as_they_are(
    restricted: Callable[[Json], Json], cluster: Cluster, namespace: str
) -> None:
    """What is left out it would fill in, and say yes: so it is looked at that it had nothing to fill in."""

    def sent(training: Training, user: int | None) -> Json:
        pod = copy.deepcopy(a_pod(training, user))
        pod["metadata"] |= {"namespace": namespace, "ownerReferences": []}
        return pod

    def may_be_created() -> bool:
        try:
            return bool(restricted(sent(TRAININGS["plain"], render.USER)))
        except Refused:
            return False

    eventually(may_be_created, "the rights count")
    for training in TRAININGS.values():
        for user in (render.USER, 1000):
            pod = sent(training, user)
            found = restricted(pod)
            if "v1beta1" in cluster.serves("policy"):
                assert found["metadata"]["annotations"]["kubernetes.io/psp"] == f"restricted-{namespace}"
            assert of_security(found) == of_security(pod)
    bare = sent(TRAININGS["plain"], None)
    bare["spec"]["securityContext"] = bare["spec"]["containers"][0]["securityContext"] = {}
    with pytest.raises(Refused, match="seccomp"):  # as 0.1.0 rendered it
        restricted(bare)
    with pytest.raises(Refused, match=r"runAsNonRoot|runAsUser=0"):
        restricted(sent(TRAININGS["plain"], 0))

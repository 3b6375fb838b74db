"""Which partial Pods a training may bring, and which field of the others is named."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.types import pod_template
from muster.types.pod_template import DEEPEST, MOST_BYTES

Json = dict[str, Any]
MOUNTS = {"/home/worker": "is muster's own", "/ckpt": "is the mount of spec.storage[ckpt]"}


def told(template: Json, *env: str) -> list[str]:
    return [f"{one.field}: {one.message}" for one in pod_template.problems(template, env=env, mounts=MOUNTS)]


def worker(**fields: Any) -> Json:
    return {"spec": {"containers": [{"name": "worker", **fields}]}}


EVERYTHING: Json = {
    "metadata": {"labels": {"team": "vision"}, "annotations": {"example.com/note": "x"}},
    "spec": {
        "nodeSelector": {"gpu": "h200"},
        "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": []}},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "topologySpreadConstraints": [
            {"topologyKey": "zone", "maxSkew": 1, "whenUnsatisfiable": "DoNotSchedule"},
            {"topologyKey": "zone", "maxSkew": 2, "whenUnsatisfiable": "ScheduleAnyway"},
        ],
        "priorityClassName": "high",
        "imagePullSecrets": [{"name": "registry"}],
        "serviceAccountName": "trainer",
        "automountServiceAccountToken": True,
        "runtimeClassName": "nvidia",
        "securityContext": {"runAsUser": 1000, "fsGroup": None},
        "hostNetwork": True,
        "hostAliases": [{"ip": "10.0.0.1", "hostnames": ["a"]}],
        "volumes": [{"name": "data", "nfs": {"server": "s", "path": "/"}}, {"name": "home", "emptyDir": {}}],
        "initContainers": [{"name": "fetch", "image": "busybox", "command": ["true"]}],
        "containers": [
            {
                "name": "worker",
                "env": [{"name": "NCCL_DEBUG", "value": "INFO"}],
                "volumeMounts": [{"name": "data", "mountPath": "/data"}, {"name": "home", "mountPath": "/dev/shm"}],
                "ports": [{"containerPort": 53, "protocol": "TCP"}, {"containerPort": 53, "protocol": "UDP"}],
                "resources": {"limits": {"rdma/hca": 1}, "requests": {"memory": "1Gi"}},
                "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
            },
            {"name": "metrics", "image": "exporter", "command": ["export"], "args": []},
        ],
    },
}


@pytest.mark.parametrize("template", [{}, {"spec": {}}, {"metadata": {}}, {"spec": None}, EVERYTHING])
def test_what_is_the_users_own_passes(template: Json) -> None:
    assert told(template) == []


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (worker(command=["x"]), "spec.template.spec.containers[worker].command: is muster's own"),
        (worker(args=[]), "spec.template.spec.containers[worker].args: is muster's own"),
        (worker(image="x"), "spec.template.spec.containers[worker].image: is muster's own: spec.image sets it"),
        (
            worker(workingDir="/"),
            "spec.template.spec.containers[worker].workingDir: is muster's own: spec.workingDir sets it",
        ),
        (worker(restartPolicy="Always"), "spec.template.spec.containers[worker].restartPolicy: is muster's own"),
        (
            worker(terminationMessagePolicy="File"),
            "spec.template.spec.containers[worker].terminationMessagePolicy: is muster's own",
        ),
        (
            worker(env=[{"name": "MUSTER_RUN_TOKEN", "value": "x"}]),
            "spec.template.spec.containers[worker].env[MUSTER_RUN_TOKEN]: is muster's own: choose another name",
        ),
        (
            worker(env=[{"name": "POD_IP"}]),
            "spec.template.spec.containers[worker].env[POD_IP]: is muster's own: choose another name",
        ),
        (
            worker(env=[{"name": "SET"}]),
            "spec.template.spec.containers[worker].env[SET]: is set by spec.env, too",
        ),
        (
            worker(volumeMounts=[{"name": "x", "mountPath": "/home//worker/"}]),
            "spec.template.spec.containers[worker].volumeMounts[/home//worker/]: is muster's own",
        ),
        (
            worker(volumeMounts=[{"name": "x", "mountPath": "/ckpt"}]),
            "spec.template.spec.containers[worker].volumeMounts[/ckpt]: is the mount of spec.storage[ckpt]",
        ),
        (
            worker(resources={"limits": {"nvidia.com/gpu": 1}}),
            "spec.template.spec.containers[worker].resources.limits[nvidia.com/gpu]: "
            "is muster's own: spec.resources.gpus sets it",
        ),
        ({"spec": {"restartPolicy": "Always"}}, "spec.template.spec.restartPolicy: is muster's own"),
        ({"spec": {"hostname": None}}, "spec.template.spec.hostname: is muster's own"),
        (
            {"spec": {"shareProcessNamespace": True}},
            "spec.template.spec.shareProcessNamespace: is muster's own: "
            "a worker's container must end with all its processes",
        ),
        (
            {"spec": {"terminationGracePeriodSeconds": 1}},
            "spec.template.spec.terminationGracePeriodSeconds: is muster's own: it follows from spec.stopGraceSeconds",
        ),
        (
            {"spec": {"volumes": [{"name": "muster-home"}]}},
            "spec.template.spec.volumes[muster-home]: is muster's own: names that begin with muster- are",
        ),
        (
            {"spec": {"initContainers": [{"name": "worker"}]}},
            "spec.template.spec.initContainers[worker]: is muster's own: choose another name",
        ),
        ({"metadata": {"finalizers": []}}, "spec.template.metadata.finalizers: is muster's own"),
        ({"metadata": {"name": "x"}}, "spec.template.metadata.name: is muster's own"),
        (
            {"metadata": {"labels": {"muster.dev/training": "x"}}},
            "spec.template.metadata.labels[muster.dev/training]: is muster's own",
        ),
        (
            {"metadata": {"labels": {"app.kubernetes.io/managed-by": "x"}}},
            "spec.template.metadata.labels[app.kubernetes.io/managed-by]: is muster's own",
        ),
        ({"metadata": {"annotations": {"a": 1}}}, "spec.template.metadata.annotations[a]: must be a text"),
        ({"metadata": {"labels": []}}, "spec.template.metadata.labels: must be an object"),
        ({"metadata": []}, "spec.template.metadata: must be an object"),
        ({"status": {}}, "spec.template.status: only metadata and spec are merged"),
        ({"spec": []}, "spec.template.spec: must be an object"),
        ({"spec": {"containers": {}}}, "spec.template.spec.containers: must be a list"),
        ({"spec": {"containers": [{}]}}, "spec.template.spec.containers[0]: needs its name"),
        ({"spec": {"containers": ["x"]}}, "spec.template.spec.containers[0]: needs its name"),
        (worker(env=[{"value": "x"}]), "spec.template.spec.containers[worker].env[0]: needs its name"),
        (
            worker(ports=[{"containerPort": "x"}]),
            "spec.template.spec.containers[worker].ports[0]: needs its containerPort",
        ),
        (worker(resources=[]), "spec.template.spec.containers[worker].resources: must be an object"),
        (
            {"spec": {"containers": [{"name": "a"}, {"name": "a"}]}},
            "spec.template.spec.containers[a]: is given twice",
        ),
        (
            {"spec": {"$patch": "replace"}},
            "spec.template.spec: '$patch' is a directive of a patch; fields and lists are merged without any",
        ),
        ({"spec": {"x": float("inf")}}, "spec.template.spec.x: is too large a number"),
        ({"spec": {"x": ["\ud800"]}}, "spec.template.spec.x[0]: is not valid text"),
        ({"spec": {"x": {1}}}, "spec.template.spec.x: is no JSON value"),
        (
            {"spec": {"x": "x" * MOST_BYTES}},
            f"spec.template: has {MOST_BYTES + 19} bytes, at most {MOST_BYTES} are possible",
        ),
    ],
)
def test_what_is_musters_own_is_named(template: Json, said: str) -> None:
    assert told(template, "SET") == [said]


def test_everything_that_is_wrong_is_told_at_once() -> None:
    template = worker(command=["x"], env=[{"name": "MUSTER_X"}]) | {"metadata": {"uid": "x"}}
    assert len(told(template)) == 3


def test_no_depth_is_too_much_for_it() -> None:
    deep: Json = {}
    for _ in range(500):
        deep = {"x": [deep]}
    assert told({"spec": deep}) == [f"spec.template: is nested more than {DEEPEST} levels deep"]


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["name", "env", "ports", "containers", "volumes", "labels", "$x"]), inner, max_size=3
        )
    ),
    max_leaves=20,
)


@given(st.dictionaries(st.sampled_from(["metadata", "spec", "x"]), values))
def test_whatever_comes_is_answered_and_never_a_fault(template: Json) -> None:
    for one in pod_template.problems(template, mounts=MOUNTS):
        assert one.field.startswith("spec.template") and one.message
    if not told(template):
        json.dumps(template, allow_nan=False)

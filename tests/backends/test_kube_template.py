"""How a partial Pod changes the one of a worker: as the API server would merge a patch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.backends.kube import render
from muster.backends.kube.template import merged, worker_of
from muster.types import pod_template
from muster.types.training import Resources
from tests.training_builders import a_training
from tests.types.test_pod_template import EVERYTHING

Json = dict[str, Any]


def a_pod(template: Json | None = None, **spec: Any) -> Json:
    spec = {"env": {"A": "1"}, "resources": Resources(cpu=1, memory="4Gi", gpus=1), **spec}
    return render.pod(
        a_training(uid="u1", template=template, **spec), "demo-0", coordinator="muster:8471", image="base"
    )


def on_worker(**fields: Any) -> Json:
    return {"spec": {"containers": [{"name": "worker", **fields}]}}


def by_name(entries: list[Json]) -> dict[str, Json]:
    return {one["name"]: one for one in entries}


@pytest.mark.parametrize("template", [None, {}, {"spec": None}, {"metadata": {"labels": None}}, {"spec": {}}])
def test_without_a_template_the_pod_is_as_it_was(template: Json | None) -> None:
    assert a_pod(template) == a_pod()


def test_objects_are_merged_and_null_removes() -> None:
    context = a_pod({"spec": {"securityContext": {"runAsUser": 1000, "fsGroup": None}}})["spec"]["securityContext"]
    assert context == {
        "runAsNonRoot": True,
        "runAsUser": 1000,
        "runAsGroup": 65532,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def test_lists_are_merged_by_their_key_ours_first() -> None:
    pod = a_pod(EVERYTHING)
    assert [one["name"] for one in pod["spec"]["containers"]] == ["worker", "metrics"]
    assert [one["name"] for one in pod["spec"]["volumes"]] == ["muster-home", "data", "home"]
    worker = worker_of(pod)
    assert by_name(worker["env"])["NCCL_DEBUG"] == {"name": "NCCL_DEBUG", "value": "INFO"}
    assert by_name(worker["env"])["A"] == {"name": "A", "value": "1"}
    assert [one["mountPath"] for one in worker["volumeMounts"]] == ["/home/worker", "/data", "/dev/shm"]
    assert [one["protocol"] for one in worker["ports"]] == ["TCP", "UDP"]
    assert len(pod["spec"]["topologySpreadConstraints"]) == 2
    assert pod["spec"]["serviceAccountName"] == "trainer" and pod["spec"]["automountServiceAccountToken"] is True


def test_more_resources_stand_beside_those_of_the_spec() -> None:
    found = worker_of(a_pod(on_worker(resources={"limits": {"rdma/hca": 1}, "requests": {"memory": "1Gi"}})))
    assert found["resources"] == {
        "limits": {"cpu": "1000m", "memory": "4Gi", "nvidia.com/gpu": "1", "rdma/hca": 1},
        "requests": {"cpu": "1000m", "memory": "1Gi", "nvidia.com/gpu": "1"},
    }


def test_a_default_variable_is_replaced_as_a_whole() -> None:
    given = {"name": "HOME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}
    found = [one for one in worker_of(a_pod(on_worker(env=[given])))["env"] if one["name"] == "HOME"]
    assert found == [given], "a value and where it comes from exclude each other"


def test_lists_without_a_key_are_replaced() -> None:
    rights = worker_of(a_pod(on_worker(securityContext={"capabilities": {"drop": ["NET_RAW"], "add": ["IPC_LOCK"]}})))
    assert rights["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["NET_RAW"], "add": ["IPC_LOCK"]},
    }


def test_containers_beside_the_worker_are_as_unprivileged_unless_they_say_otherwise() -> None:
    others = [{"name": "a", "image": "x"}, {"name": "b", "image": "x", "securityContext": {}}]
    pod = a_pod({"spec": {"containers": others, "initContainers": [{"name": "first", "image": "x"}]}})
    ours = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    found = by_name([*pod["spec"]["containers"], *pod["spec"]["initContainers"]])
    assert {name: one["securityContext"] for name, one in found.items()} == {
        "worker": ours, "a": ours, "b": {}, "first": ours,
    }  # fmt: skip


def test_labels_and_annotations_are_added_to_ours() -> None:
    about = a_pod(EVERYTHING)["metadata"]
    assert about["labels"].items() > a_pod()["metadata"]["labels"].items() and about["labels"]["team"] == "vision"
    assert about["annotations"] == {"example.com/note": "x"} and about["finalizers"] == ["muster.dev/exit"]


# Whatever a template says that is taken, what muster needs is as it was.

scalars = st.none() | st.booleans() | st.integers(0, 9) | st.text("ab/", max_size=3)
entries = st.fixed_dictionaries(
    {},
    optional={
        name: st.lists(
            st.fixed_dictionaries(
                {}, optional={"name": names, "mountPath": paths, "value": scalars, "command": scalars}
            ),
            max_size=3,
        )
        for name, names, paths in [
            ("containers", st.sampled_from(["worker", "b"]), st.just("/x")),
            ("volumes", st.sampled_from(["muster-home", "data"]), st.just("/x")),
            ("initContainers", st.sampled_from(["worker", "c"]), st.just("/x")),
        ]
    }
    | {name: scalars for name in ("restartPolicy", "hostname", "nodeName", "hostPID", "priorityClassName")},
)
templates = st.fixed_dictionaries(
    {},
    optional={
        "metadata": st.fixed_dictionaries(
            {},
            optional={
                kind: st.dictionaries(st.sampled_from(["a", "muster.dev/training-uid", "x/y"]), scalars, max_size=2)
                for kind in ("labels", "annotations", "finalizers")
            },
        ),
        "spec": entries,
    },
)


@given(templates)
def test_what_muster_needs_is_never_changed(template: Json) -> None:
    if pod_template.problems(template, mounts={}):
        return
    before, after = a_pod(), a_pod(copy.deepcopy(template))
    for name in ("restartPolicy", "hostname", "subdomain", "terminationGracePeriodSeconds", "enableServiceLinks"):
        assert after["spec"][name] == before["spec"][name]
    assert not after["spec"].get("hostPID")
    ours, theirs = worker_of(before), worker_of(after)
    assert theirs["command"] == ours["command"] and theirs["image"] == ours["image"] and "args" not in theirs
    assert [one for one in theirs["env"] if one in ours["env"]] == ours["env"]
    assert [one for one in theirs["volumeMounts"] if one in ours["volumeMounts"]] == ours["volumeMounts"]
    assert all(one in after["spec"]["volumes"] for one in before["spec"]["volumes"])
    assert after["metadata"]["labels"].items() >= before["metadata"]["labels"].items()
    for name in ("name", "namespace", "ownerReferences", "finalizers"):
        assert after["metadata"][name] == before["metadata"][name]


@given(templates)
def test_a_template_merged_twice_is_merged_once_and_nothing_given_is_touched(template: Json) -> None:
    if pod_template.problems(template, mounts={}):
        return
    kept, pod = copy.deepcopy(template), a_pod()
    once = merged(pod, template)
    assert merged(once, template) == once and template == kept and pod == a_pod()
